"""What goes wrong inside a worker, in mid-answer: another one goes on, and the answers are those of an undisturbed run.

Each test breaks one of two workers once, in a step in which both of its requests are computed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.faults.audit import audit
from tests.faults.broken_worker import ARMED, GO_ON, GROUP, HOW
from tests.faults.conftest import Deploy
from tests.faults.deployment import Process
from tests.faults.features import Feature
from tests.faults.test_failover_matrix import LONG, Scene, mid_decode, owners
from tests.faults.traffic import undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
STUCK_S = 2.0
ASKED = [LONG, Feature("beside", fields={"temperature": 1.0, "max_tokens": 3000, "seed": 9})]


@pytest.fixture
def small_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A control group with 64 MB, where one can be made."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = root / f"headrace-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    monkeypatch.setenv(GROUP, str(group))
    yield
    group.rmdir()


def is_fenced(worker: Process) -> bool:
    """False also of one that ends just now."""
    try:
        return worker.metric("headrace_worker_fenced_total") > 0
    except OSError:
        return False


async def break_once(deploy: Deploy, monkeypatch: pytest.MonkeyPatch, how: str, **worker: object) -> Process:
    """Two requests from their beginning, over the break, to their end, and everything audited; who broke."""
    monkeypatch.setenv(HOW, how)
    deployment = await deploy(edges=1, worker_module="tests.faults.broken_worker", worker=worker)
    expected = await undisturbed(deployment, ASKED)
    (deployment.directory / ARMED).touch()
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcripts = [scene.ask(one) for one in ASKED]
        await scene.finish()
        all_owners = [owners(await scene.events(transcript)) for transcript in transcripts]
    hit = {names[0] for names in all_owners if len(names) == 2}
    assert len(hit) == 1, all_owners
    victim = deployment.worker(hit.pop())
    await deployment.until(lambda: not victim.is_running or is_fenced(victim))
    if not victim.is_running:
        deployment.remove(victim)
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []
    return victim


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("allocate_beyond_the_limit", "can't allocate memory"),
        ("grow_beyond_the_limit", "MemoryError"),
        ("raise_in_the_step", "a kernel went wrong"),
    ],
)
async def test_a_step_that_fails_ends_its_worker_and_no_request(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    victim = await break_once(deploy, monkeypatch, how)
    assert await victim.exit_code() == 1
    assert words in victim.log.read_text()


async def test_a_worker_whose_memory_is_used_up_is_killed_and_its_requests_go_on(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, small_group: None
) -> None:
    victim = await break_once(deploy, monkeypatch, "be_killed_by_the_kernel")
    assert await victim.exit_code() == -signal.SIGKILL


@pytest.mark.parametrize("bound", [{}, {"max_step_s": STUCK_S, "step_slack": 0}], ids=["learnt", "fixed"])
async def test_a_forward_pass_that_never_returns_costs_its_worker_the_lease(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, bound: dict[str, float]
) -> None:
    victim = await break_once(deploy, monkeypatch, "hang", **bound)
    assert await victim.exit_code() == 1
    log = victim.log.read_text()
    assert "the step loop seems stuck" in log
    assert "the step loop has been stuck" in log
    assert "in hang" in log  # where it hangs is told


async def test_a_worker_that_was_only_slow_goes_on_and_nothing_is_held_against_its_requests(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOW, "be_slow")
    deployment = await deploy(edges=1, worker_module="tests.faults.broken_worker", worker={"lease_ttl_s": 2.0})
    expected = await undisturbed(deployment, ASKED)
    (deployment.directory / ARMED).touch()
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcript = scene.ask(LONG)
        events = await scene.until(transcript, lambda events: len(owners(events)) == 2)
        (deployment.directory / GO_ON).touch()
        victim = deployment.worker(owners(events)[0])
        await deployment.until(lambda: victim.metric("headrace_worker_stalls_total") >= 2)
        assert "it was slow, not stuck" in victim.log.read_text()
        await deployment.until(victim.is_ready)
        await scene.finish()
        await deployment.until(lambda: is_fenced(victim))
        assert (await deployment.reading.status(transcript.request_id)).attempts == 0
    assert victim.is_running
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []


async def test_native_code_that_stops_the_whole_process_loses_the_lease_and_is_refused_afterwards(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = await break_once(deploy, monkeypatch, "hang_with_the_interpreter")
    assert victim.is_running
    assert victim.metric("headrace_worker_fenced_total") > 0


async def test_a_worker_that_alone_cannot_reach_the_log_is_replaced_and_refused_when_it_comes_back(
    deploy: Deploy,
) -> None:
    deployment = await deploy(edges=1, has_links=True)
    expected = await undisturbed(deployment, ASKED)
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcript = scene.ask(LONG)
        await scene.until(transcript, mid_decode)
        alone = await scene.owner(transcript)
        deployment.links[alone.name].stall()
        await scene.until(transcript, lambda events: len(owners(events)) == 2)
        deployment.links[alone.name].mend()
        await scene.finish()
        await deployment.until(lambda: alone.metric("headrace_worker_fenced_total") >= 1)
    assert alone.is_running
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []
