"""``headrace edge``: one edge process."""

from __future__ import annotations

from collections.abc import Sequence

from edge.__main__ import main as run


def main(argv: Sequence[str], prog: str) -> int:
    return run(argv, prog)
