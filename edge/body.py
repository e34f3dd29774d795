"""Request bodies: read whole, bounded in size and time. The content type is not looked at: clients err about it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from common.errors import InvalidRequest, TenantLimitReached
from edge.boundary import ClientGone
from edge.errors import BodyTooLarge, BodyTooSlow
from edge.http_protocol import direct_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request
    from starlette.types import Receive

    from edge.config import LimitSettings
    from edge.tally import Tally


async def read_body(request: Request, settings: LimitSettings, tally: Tally) -> bytes:
    """The body's bytes, which count in ``tally`` until the caller gives them back.

    Raises `BodyTooLarge`, `BodyTooSlow`, `InvalidRequest`, `TenantLimitReached`, `ClientGone`.
    """
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > settings.max_body_bytes:
        raise _too_large(settings)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("compressed bodies are not accepted", param="Content-Encoding")
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _collect(request.receive, settings, tally)
    except TimeoutError as error:
        raise BodyTooSlow(f"The body did not arrive within {settings.body_timeout_s:g} s.") from error


async def _collect(receive: Receive, settings: LimitSettings, tally: Tally) -> bytes:
    parts: list[bytes] = []
    size = 0
    with ExitStack() as undo:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > settings.max_body_bytes:
                raise _too_large(settings)
            if not tally.take(len(part)):
                raise _too_much(tally)
            undo.callback(tally.give, len(part))
            parts.append(part)
            if not message.get("more_body", False):
                undo.pop_all()
                return b"".join(parts)


@contextmanager
def watching(request: Request, on_hang_up: Callable[[], None]) -> Iterator[None]:
    """Inside, ``on_hang_up`` is called when the client closes its connection. The body must have been read."""
    direct = direct_body(request.scope)
    if direct is not None:
        with direct.watching(on_hang_up):
            yield
        return
    task = asyncio.create_task(_call_when_gone(request.receive, on_hang_up))
    try:
        yield
    finally:
        task.cancel()


async def _call_when_gone(receive: Receive, on_hang_up: Callable[[], None]) -> None:
    """Under a server that is not ours."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_hang_up()


def _too_much(tally: Tally) -> TenantLimitReached:
    return TenantLimitReached(
        f"Your requests hold {tally.held} bytes at this server, the limit of one key is {tally.limit}.",
        retry_after_s=1.0,
        reason="tenant_bytes",
    )


def _too_large(settings: LimitSettings) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {settings.max_body_bytes} bytes, the limit of this server.")
