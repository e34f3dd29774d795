"""Ending requests that no worker takes: what edges do when the last worker of a model has been gone for too long."""

from __future__ import annotations

import time

from common.errors import HeadraceError, LogCorrupt
from common.events import Failed, encode
from common.transport import scripts
from common.transport.client import LogClient
from common.transport.frames import publish
from common.transport.keys import GROUP
from common.transport.records import Frame, RequestPhase


class GivingUp:
    """Fails requests in the log. Of an owned one nothing is touched."""

    def __init__(self, client: LogClient) -> None:
        self._client = client

    async def give_up(self, request_id: str, error: HeadraceError, *, begun_too: bool) -> bool:
        """Make ``error`` the end of the request if nobody owns it; whether that was done. Repeating it is harmless.

        One that was never begun is owned by nobody; with ``begun_too`` also one that is queued again, or whose owner's
        lease is gone.
        Raises `LogUnavailable`, and `InvalidRequest` for a malformed id.
        """
        keys = self._client.keys
        name, output = keys.request(request_id), keys.output(request_id)
        while True:
            values = await self._client.command("HMGET", name, "state", "epoch", "owner", "model", key=name)
            phase = RequestPhase.DONE if values[0] is None else RequestPhase(values[0].decode())
            if phase is RequestPhase.DONE or (phase is RequestPhase.RUNNING and not begun_too):
                return False
            epoch, owner, model = int(values[1]), (values[2] or b"").decode(), values[3].decode()
            length = await self._client.command("XLEN", output, key=output)
            if length and not begun_too:
                return False
            partition = keys.partition(request_id)
            payload = encode(
                Failed(epoch=epoch + 1, t=time.time(), code=error.code, message=error.message, param=error.param or "")
            )
            reply = await self._client.run(
                scripts.GIVE_UP,
                [
                    name,
                    output,
                    keys.load(partition, model),
                    keys.lease(partition, owner),
                    *keys.queues(partition, model),
                    *keys.backlogs(partition, model),
                ],
                [GROUP, self._client.settings.retention_s, phase.value, epoch, length, owner, payload, request_id],
                is_durable=True,
            )
            match reply:
                case [b"changed"]:
                    continue
                case [b"over"] | [b"owned"]:
                    return False
                case [b"ended", n, edges]:
                    await publish(self._client, [(edges, [Frame(request_id, n, payload)])])
                    return True
                case _:
                    raise LogCorrupt(f"give_up answered {reply!r}")
