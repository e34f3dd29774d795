"""Waking an event loop from the engine thread without handing it the interpreter.

``call_soon_threadsafe`` writes to a socket with the interpreter's lock released: the loop's thread takes the lock, and
the engine gets it back when that thread next waits. Here the write keeps the lock, so the loop's thread begins when the
engine releases the lock anyway, which is for its native code.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_write = ctypes.PyDLL(None).write  # PyDLL: calls do not release the lock
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class LoopWaker:
    """Calls back on a loop soon after `wake` was called on another thread; several calls may be one callback."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        """To be called on the loop's thread, as `close`."""
        self._loop = loop
        self._callback = callback
        self._is_due = False
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        loop.add_reader(self._reader, self._heard)

    def wake(self) -> None:
        """From any thread, also after `close`."""
        if not self._is_due:
            self._is_due = True
            _write(self._writer, b"\0", 1)

    def close(self) -> None:
        """Call back no more."""
        self._loop.remove_reader(self._reader)

    def __del__(self) -> None:
        # Not in `close`: another thread may be about to write, and the number may belong to another file by then.
        os.close(self._reader)
        os.close(self._writer)

    def _heard(self) -> None:
        # In this order: a call in between leaves a byte that will be heard, or comes before the callback. If the byte
        # of such a call were read here after the flag was taken back, the flag would stand for ever.
        os.read(self._reader, 16)
        self._is_due = False
        self._callback()
