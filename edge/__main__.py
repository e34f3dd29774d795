"""``python -m edge``: one edge process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

from common import garbage, last_words
from common.config import Settings, load_or_exit
from common.errors import ConfigError, LogUnavailable
from common.telemetry.logging import configure_logging, get_logger
from common.telemetry.settings import FederationSettings, TelemetrySettings
from common.telemetry.tracing import Tracing
from common.transport import LogClient, RedisSettings
from edge.app import EdgeSettings, create_app
from edge.config import ApiSettings, CatalogSettings, HttpSettings, LimitSettings, StreamSettings
from edge.lifecycle import Lifecycle
from edge.server import EdgeServer, address_of, bind

EXIT_CONFIG: Final = 2
RECONNECT_PAUSE_S: Final = 1.0
GROUPS: Final[tuple[type[Settings], ...]] = (
    HttpSettings,
    ApiSettings,
    LimitSettings,
    StreamSettings,
    CatalogSettings,
    FederationSettings,
    RedisSettings,
    TelemetrySettings,
)


def main(argv: Sequence[str] | None = None, prog: str = "python -m edge") -> int:
    """Serve until SIGTERM; the exit status."""
    given = sys.argv[1:] if argv is None else argv
    loaded = load_or_exit(GROUPS, given, prog=prog, description="One edge: the OpenAI API over HTTP.")
    settings = EdgeSettings(
        http=loaded[HttpSettings],
        api=loaded[ApiSettings],
        limits=loaded[LimitSettings],
        streams=loaded[StreamSettings],
        catalog=loaded[CatalogSettings],
        redis=loaded[RedisSettings],
        federation=loaded[FederationSettings],
    )
    configure_logging("edge", loaded[TelemetrySettings])
    logger = get_logger("edge")
    logger.info("settings", **loaded.given())
    try:
        asyncio.run(wait_for_log(settings.redis))
        with bind(settings.http, settings.streams.send_timeout_s) as sock:
            tracing = Tracing.configure("edge", address_of(sock), loaded[TelemetrySettings])
            lifecycle = Lifecycle()
            server = EdgeServer(create_app(settings, lifecycle, tracing), settings.http, settings.streams, lifecycle)
            logger.info("listening", address=address_of(sock))
            garbage.settle()
            server.run(sockets=[sock])
            tracing.shutdown()
    except ConfigError as error:
        last_words.leave(error.message)
        logger.error("configuration", error=error.message)
        return EXIT_CONFIG
    return 0 if server.started else 1


async def wait_for_log(settings: RedisSettings) -> None:
    """An edge may be started before its log; nothing listens until it is there. Raises `ConfigError`."""
    logger = get_logger("edge")
    told = ""
    while True:
        try:
            log = await LogClient.open(settings)
        except LogUnavailable as error:
            if error.message != told:
                logger.warning("waiting for the log", error=error.message)
            told = error.message
            await asyncio.sleep(RECONNECT_PAUSE_S)
        else:
            await log.close()
            return


if __name__ == "__main__":
    sys.exit(main())
