"""Python's collector of cycles, told what a server is like: many small objects that live as long as a stream does."""

from __future__ import annotations

import gc
from typing import Final

# Allocations less frees up to a pass over the young; passes up to one over the middle-aged; those up to one over all.
# As they are by default, opening two thousand streams walks over all objects ten times, up to half a second each.
THRESHOLDS: Final = (10_000, 10, 20)


def settle() -> None:
    """To be called once a process is built: what is there stays, and is not looked at again.

    Code alone is 200,000 objects in a worker: on a busy machine walking over them took half a second, and nothing was
    computed meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
