"""Another thread wakes a loop: at least once after the last call, and not after it was closed."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from engine_worker.wakeup import LoopWaker


async def test_every_call_is_followed_by_a_callback() -> None:
    loop, work, seen = asyncio.get_running_loop(), [], []
    done = asyncio.Event()

    def callback() -> None:
        seen.append(len(work))
        if len(work) == 2000:
            done.set()

    waker = LoopWaker(loop, callback)

    def other_thread() -> None:
        for number in range(2000):
            work.append(number)
            waker.wake()

    thread = threading.Thread(target=other_thread)
    thread.start()
    await asyncio.wait_for(done.wait(), 120)
    thread.join()
    waker.close()
    assert seen[-1] == 2000


async def test_after_close_a_call_does_nothing() -> None:
    called = []
    waker = LoopWaker(asyncio.get_running_loop(), lambda: called.append(1))
    waker.close()
    waker.wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not called


async def test_a_call_while_an_earlier_one_is_being_heard_does_not_silence_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = asyncio.Event()
    waker = LoopWaker(asyncio.get_running_loop(), called.set)
    read = os.read

    def read_between_two_calls(fd: int, size: int) -> bytes:
        waker.wake()
        data = read(fd, size)
        waker.wake()
        return data

    monkeypatch.setattr("engine_worker.wakeup.os.read", read_between_two_calls)
    waker.wake()
    await asyncio.wait_for(called.wait(), 60)
    monkeypatch.undo()
    for _ in range(3):
        called.clear()
        waker.wake()
        await asyncio.wait_for(called.wait(), 60)
    waker.close()
