"""The network between one process and the log: a relay on loopback that can be cut, stalled, slowed and reset."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

_PIECE = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, no time: closing sends RST


class Link:
    """Relays every connection made to ``port`` to ``target_port``, from now on. Belongs to the running event loop."""

    def __init__(self, target_port: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self._listening = asyncio.create_task(asyncio.start_server(self._serve, sock=listener))
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_cut = False
        self._delay_s = 0.0
        self._tear_next = False

    async def close(self) -> None:
        """End all connections and listen no more."""
        self.cut()
        (await self._listening).close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every connection ends at once, and new ones are refused as soon as they are made."""
        self._is_cut = True
        self._reset_all()

    def stall(self) -> None:
        """Connections stay, and new ones are taken, but nothing passes: a cable that was pulled."""
        self._flows.clear()

    def slow(self, delay_s: float) -> None:
        """Everything arrives so much later, in both directions."""
        self._delay_s = delay_s

    def tear(self) -> None:
        """The next answer arrives by half, then every connection is reset."""
        self._tear_next = True

    def mend(self) -> None:
        """As it was."""
        self._is_cut = False
        self._delay_s = 0.0
        self._tear_next = False
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            _reset(writer)
            return
        try:
            from_log, to_log = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:  # the log is away: so is its end of the line
            _reset(writer)
            return
        self._writers |= {writer, to_log}
        for source, sink, is_answer in ((reader, to_log, False), (from_log, writer, True)):
            task = asyncio.create_task(self._pass_on(source, sink, is_answer=is_answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool) -> None:
        try:
            while piece := await source.read(_PIECE):
                await self._flows.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if is_answer and self._tear_next:
                    self._tear_next = False
                    sink.write(piece[: len(piece) // 2])
                    await sink.drain()
                    self._reset_all()
                    return
                sink.write(piece)
                await sink.drain()
        except OSError:
            return
        finally:
            self._writers.discard(sink)
            with contextlib.suppress(RuntimeError):  # the loop may be closing
                sink.close()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
