"""Request bodies: read whole, bounded in size and time. The content type is not looked at: clients err about it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

from common.errors import InvalidRequest, TenantLimitReached
from edge.boundary import ClientGone
from edge.errors import BodyTooLarge, BodyTooSlow

if TYPE_CHECKING:
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


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. To be called after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_much(tally: Tally) -> TenantLimitReached:
    return TenantLimitReached(
        f"Your requests hold {tally.held} bytes at this server, the limit of one key is {tally.limit}.",
        retry_after_s=1.0,
        reason="tenant_bytes",
    )


def _too_large(settings: LimitSettings) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {settings.max_body_bytes} bytes, the limit of this server.")
