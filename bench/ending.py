"""A bench that is ended from outside takes with it what it has started."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

_ASKED = (signal.SIGTERM, signal.SIGHUP)


def end_in_order() -> None:
    """From now on SIGTERM and SIGHUP unwind the main thread as Ctrl-C does, so that everything is stopped on the way;
    the exit code is 128 and the signal's number. A second one ends the process at once."""
    for number in _ASKED:
        signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    for one in _ASKED:
        signal.signal(one, signal.SIG_DFL)
    raise SystemExit(128 + number)
