"""One page of metrics for several processes: an edge's own and those of the workers beside it.

For a laptop and for tools that read one address. Where Prometheus scrapes each process, leave it off.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Final

_TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 8 << 20


async def federated(own: bytes, urls: Sequence[str]) -> bytes:
    """``own`` and the pages at ``urls`` as one exposition. A worker that does not answer is left out."""
    if not urls:
        return own
    pages = await asyncio.gather(*(asyncio.to_thread(_fetch, url) for url in urls))
    return merged([own, *(page for page in pages if page)])


def merged(pages: Sequence[bytes]) -> bytes:
    """Expositions as one: the samples of a family that stands on several pages are put under one heading."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> (HELP and TYPE lines, samples)
    for page in pages:
        samples: list[str] = []
        for line in page.decode().splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                heading, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line.split(" ", 2)[1] not in (old.split(" ", 2)[1] for old in heading):
                    heading.append(line)
            elif line:
                samples.append(line)
    lines = [line for heading, samples in families.values() for line in (*heading, *samples)]
    return ("\n".join(lines) + "\n").encode()


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            page: bytes = answer.read(_MAX_BYTES)
            return page
    except (urllib.error.URLError, OSError, ValueError):
        return b""
