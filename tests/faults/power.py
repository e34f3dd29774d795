"""A log server whose power can be cut, and whose disk can be full.

`synced.c`, preloaded into the server, notes the size of each append-only file at its last fsync. Cutting the power
kills the server and takes everything behind that size away, which is the worst that a disk that keeps its word does.
It also answers the server's writes as a full disk does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers import Server


class Fragile(Server):
    """Skips the test where no C compiler is found."""

    def __init__(self, fsync: str) -> None:
        super().__init__(fsync=fsync)
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler")
        library = self.directory / "synced.so"
        source = Path(__file__).with_name("synced.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.environ = {**os.environ, "LD_PRELOAD": str(library)}

    def written(self) -> int:
        """Bytes in its append-only files."""
        return sum(file.stat().st_size for file in self._files())

    def kept(self) -> int:
        """How many of them a power cut would leave."""
        return sum(_kept(file) for file in self._files())

    def cut_power(self) -> int:
        """Kill it and drop what was not synced; how many bytes that was."""
        self.kill()
        lost = self.written() - self.kept()
        for file in self._files():
            os.truncate(file, _kept(file))
        return lost

    def fill_disk(self) -> None:
        """No append succeeds any more."""
        self._full.touch()

    def empty_disk(self) -> None:
        self._full.unlink()

    @property
    def _full(self) -> Path:
        return self.directory / "appendonlydir" / "full"

    def _files(self) -> list[Path]:
        return list((self.directory / "appendonlydir").glob("*.incr.aof"))


def _kept(file: Path) -> int:
    note = file.with_name(file.name + ".synced")
    return int(note.read_text()) if note.exists() else 0
