"""``headrace serve`` as a child of the tests: a real process tree that can be watched and hurt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class Served:
    """One ``headrace serve``, its output in a file."""

    def __init__(self, state_dir: Path, *argv: str) -> None:
        self.state_dir = state_dir
        self.output = state_dir.with_suffix(".log")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        command = [sys.executable, "-m", "cli", "serve", "--state-dir", str(state_dir), "--log-format", "json", *argv]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environ)

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def said(self) -> list[str]:
        """Lines for people, without the children's logs."""
        return [line for line in self.text().splitlines() if not line.startswith("{")]

    def facts(self) -> dict[str, Any]:
        eventually(lambda: "Ctrl-C stops it" in self.text() or self.process.poll() is not None, self.text)
        facts: dict[str, Any] = json.loads((self.state_dir / "serve.json").read_text(encoding="utf-8"))
        return facts

    def pid(self, child: str) -> int:
        return int((self.state_dir / "run" / f"{child}.pid").read_text(encoding="ascii"))


def eventually(condition: Callable[[], bool], why: Callable[[], str], within_s: float = 180.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
