"""Calls that recurse as deep as their input says, on a stack that is large enough for it.

The grammar compiler descends natively, one level for each link of a chain of rules or ``$ref``s. On an ordinary stack
of 8 MiB, a chain of a few thousand (a body of 100 KB) ends the process with a segmentation fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

# Address space, not memory: only the pages that are touched are paid for. A link takes up to 11 KiB of stack and 36
# characters of source, so what the sources' bound of 512 Ki characters allows needs about 160 MiB.
STACK_BYTES: Final = 512 << 20
_starting = threading.Lock()  # the stack size is a setting of the whole process


def on_deep_stack(call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, run in a thread of its own with a stack of `STACK_BYTES`."""
    result: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(call, result), name="deep-stack", daemon=True)
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()


def _run(call: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
        result.set_exception(error)
