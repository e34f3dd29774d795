"""A worker that breaks once, in mid-answer, as a machine or a bug would: ``python -m tests.faults.broken_worker``.

``BREAK_HOW`` says how. The first worker to remove the file `ARMED` breaks, the next owner of the request does not. The
real runner computes everything else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine_worker.__main__ import main
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.step import StepPlan

HOW, GROUP = "BREAK_HOW", "BREAK_GROUP"
ARMED, GO_ON = "armed", "go-on"  # in the directory that holds the model's
AFTER_TOKENS = 150
_GIL_S = 6


def _limit_memory() -> None:
    """64 MB of address space beside what is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), resource.RLIM_INFINITY))


def allocate_beyond_the_limit() -> None:
    """The address space is full: an allocation of torch's in the forward pass fails, as with too large a batch."""
    _limit_memory()
    torch.empty(1 << 30, dtype=torch.uint8).zero_()


def grow_beyond_the_limit() -> None:
    """The same of Python's own: `MemoryError`."""
    _limit_memory()
    bytearray(1 << 30)


def be_killed_by_the_kernel() -> None:
    """The memory of a control group, which the process joins here, is used up."""
    Path(os.environ[GROUP], "cgroup.procs").write_text(str(os.getpid()))
    block = bytearray(1 << 30)
    for at in range(0, len(block), 4096):
        block[at] = 1


def raise_in_the_step() -> None:
    raise RuntimeError("a kernel went wrong")


def hang() -> None:
    """Other threads go on."""
    time.sleep(3600)


def be_slow() -> None:
    """Until somebody says that it may go on."""
    while not _beside_the_model(GO_ON).exists():
        time.sleep(0.02)


def hang_with_the_interpreter() -> None:
    """In native code that never gives the interpreter's lock back, until it does: nothing else of the process runs."""
    ctypes.PyDLL(None).sleep(_GIL_S)


BREAKS: dict[str, Callable[[], None]] = {
    break_.__name__: break_
    for break_ in (
        allocate_beyond_the_limit,
        grow_beyond_the_limit,
        be_killed_by_the_kernel,
        raise_in_the_step,
        hang,
        be_slow,
        hang_with_the_interpreter,
    )
}


def _beside_the_model(name: str) -> Path:
    return Path(os.environ["HEADRACE_MODEL"]).with_name(name)


def is_in_mid_answer(plan: StepPlan) -> bool:
    return any(item.sequence.num_output_tokens >= AFTER_TOKENS for item in plan.scheduled)


def breaks_now(plan: StepPlan) -> bool:
    """For one step of all workers together."""
    if not is_in_mid_answer(plan):
        return False
    try:
        _beside_the_model(ARMED).unlink()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    execute = ModelRunner.execute

    def breaking(runner: ModelRunner, plan: StepPlan) -> Any:
        if breaks_now(plan):
            BREAKS[os.environ[HOW]]()
        return execute(runner, plan)

    ModelRunner.execute = breaking  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
