"""Routes whose endpoint wants nothing from the framework but the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from fastapi import Request, Response


class PlainRoute(APIRoute):
    """Calls ``async def endpoint(request) -> Response`` as it is: the framework would look for parameters to fill and a
    model to serialise at each request, which takes longer than parsing its body here does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint
