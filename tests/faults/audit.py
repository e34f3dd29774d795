"""What must hold after faults: for every request in the log, for every client, and for what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp

from common.events import TERMINAL, Ended, Failed, Recorded, Started, Tokens
from common.request_state import RequestState, fold
from common.transport import LogClient
from tests.faults.answers import Answer, blocks_of
from tests.faults.client import Transcript
from tests.faults.deployment import Deployment

T = TypeVar("T")


@dataclass(frozen=True)
class Takeover:
    """A request that went on at another worker. ``pause_s``: from the last output before to the first after, as the
    client saw it; None when the client was not connected all the while. ``at``: its end, monotonic seconds."""

    request_id: str
    from_worker: str
    to_worker: str
    pause_s: float | None
    at: float = 0.0


@dataclass
class Findings:
    """What an audit found. ``wrong`` is empty when all promises were kept."""

    accepted: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    lost: int = 0  # requests without an end, and answers that are not complete
    repeated: int = 0  # events that a client saw twice
    checked_answers: int = 0
    resumed_readers: int = 0
    takeovers: list[Takeover] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def history(deployment: Deployment, request_id: str) -> list[Recorded]:
    """Every event of a request."""
    events: list[Recorded] = []
    while page := await deployment.reading.read_range(request_id, after=len(events)):
        events += page
    return events


async def audit(deployment: Deployment, transcripts: Iterable[Transcript], expected: dict[str, Answer]) -> Findings:
    """Check everything. ``expected``: the undisturbed answer of each feature, by name."""
    findings = Findings()
    await _wait_until_idle(deployment, findings)
    states: dict[str, RequestState] = {}
    starts: dict[str, list[Recorded]] = {}

    async def look(request_id: str) -> None:
        events = await history(deployment, request_id)
        states[request_id] = _check_log(request_id, events, findings)
        starts[request_id] = [item for item in events if isinstance(item.event, Started)]

    await _side_by_side(look, await deployment.reading.request_ids())
    async with aiohttp.ClientSession() as session:

        async def check(transcript: Transcript) -> None:
            state = states.get(transcript.request_id)
            if state is None or not transcript.is_complete:
                findings.lost += 1
                findings.wrong.append(f"{_name(transcript)}: no whole answer: {transcript.gave_up or 'cut off'}")
                return
            await _check_reader(deployment, session, transcript, findings)
            _check_answer(transcript, state, expected[transcript.feature.name], findings)
            findings.takeovers += _takeovers(transcript, starts[transcript.request_id])

        await _side_by_side(check, [transcript for transcript in transcripts if not transcript.left])
    return findings


async def _side_by_side(check: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Each item once, a few at a time."""
    rest = iter(items)

    async def take() -> None:
        for item in rest:
            await check(item)

    await asyncio.gather(*(take() for _ in range(8)))


def _check_log(request_id: str, events: list[Recorded], findings: Findings) -> RequestState:
    findings.accepted += 1
    ends = [item for item in events if isinstance(item.event, TERMINAL)]
    if [item.n for item in events] != list(range(1, len(events) + 1)):
        findings.wrong.append(f"{request_id}: the numbers have a gap")
    if len(ends) != 1 or events[-1] is not ends[0]:
        findings.lost += 1
        findings.wrong.append(f"{request_id}: {len(ends)} terminal events, the last is {events[-1:]}")
        return RequestState()
    state = fold(events)
    drawn = sum(len(item.event.token_ids) for item in events if isinstance(item.event, Tokens))
    findings.tokens += drawn
    match ends[0].event:
        case Ended() as end:
            findings.ended += 1
            findings.cancelled += end.cancelled is not None
            if end.usage.completion_tokens != drawn:
                findings.wrong.append(f"{request_id}: usage says {end.usage.completion_tokens} of {drawn} tokens")
        case Failed() as failure:
            findings.failed += 1
            findings.wrong.append(f"{request_id}: failed with {failure.code}: {failure.message}")
    return state


async def _check_reader(
    deployment: Deployment, session: aiohttp.ClientSession, transcript: Transcript, findings: Findings
) -> None:
    """What a client put together over its connections is, byte for byte, what the log replays in one piece."""
    if transcript.document is not None:
        return
    seen = [block for block, _ in transcript.logged_blocks()]
    positions = [block.position for block in seen]
    findings.repeated += len(positions) - len(set(positions))
    findings.resumed_readers += len([c for c in transcript.connections if c.raw]) > 1
    edge = deployment.edges[0]
    async with session.get(f"{edge.url}/v1/streams/{transcript.request_id}") as response:
        replay = blocks_of(await response.read())
    with_ids = [(block.id, block.data) for block in seen]
    if with_ids != [(block.id, block.data) for block in replay]:
        findings.wrong.append(
            f"{_name(transcript)}: the client's {len(seen)} blocks are not the {len(replay)} replayed"
        )
    if positions != sorted(set(positions)):
        findings.wrong.append(f"{_name(transcript)}: positions repeat or go back")


def _check_answer(transcript: Transcript, state: RequestState, expected: Answer, findings: Findings) -> None:
    findings.checked_answers += 1
    answer = transcript.answer()
    if answer != expected:
        findings.wrong.append(f"{_name(transcript)}: {_difference(answer, expected)}")
    if state.usage is not None and answer.usage != (state.usage.prompt_tokens, state.usage.completion_tokens):
        findings.wrong.append(f"{_name(transcript)}: the client's usage {answer.usage} is not the log's {state.usage}")


def _difference(answer: Answer, expected: Answer) -> str:
    if answer.error or answer.usage != expected.usage or answer.choices.keys() != expected.choices.keys():
        return f"error {answer.error!r}, usage {answer.usage}, expected {expected.usage}"
    for index, choice in expected.choices.items():
        found = answer.choices[index]
        if found.text != choice.text:
            at = next(
                (i for i, (a, b) in enumerate(zip(found.text, choice.text, strict=False)) if a != b),
                min(len(found.text), len(choice.text)),
            )
            return (
                f"choice {index} differs at character {at}: {found.text[at : at + 20]!r}, {choice.text[at : at + 20]!r}"
            )
        if found != choice:
            return f"choice {index}: {found.finish_reason}, {found.stop_reason}; {len(found.tokens)} logprobs differ"
    return "differs"


def _takeovers(transcript: Transcript, starts: list[Recorded]) -> list[Takeover]:
    blocks = [(block.position[0], at) for block, at in transcript.logged_blocks() if block.position]
    found, owner = [], ""
    for item in starts:
        assert isinstance(item.event, Started)
        if owner and item.event.worker != owner:
            before = [at for n, at in blocks if n < item.n]
            after = [at for n, at in blocks if n > item.n]
            pause = after[0] - before[-1] if before and after and len(transcript.connections) == 1 else None
            at = after[0] if after else 0.0
            found.append(Takeover(transcript.request_id, owner, item.event.worker, pause, at))
        owner = item.event.worker
    return found


async def _wait_until_idle(deployment: Deployment, findings: Findings) -> None:
    """Nothing queued, pending, running or cached for somebody; reported as wrong when it does not come true."""

    async def is_idle() -> bool:
        return not await leftovers(deployment)

    try:
        await deployment.until(is_idle, 120, 0.2)
    except AssertionError:
        findings.wrong += await leftovers(deployment)


async def leftovers(deployment: Deployment) -> list[str]:
    """What ended requests have left behind, in words."""
    return await _queue_leftovers(deployment.client) + await asyncio.to_thread(_gauges, deployment)


async def _queue_leftovers(client: LogClient) -> list[str]:
    found = []
    for name in await client.retrying(lambda: client.connections.scan("headrace:*:q:*")):
        key = name.decode()
        length = await client.command("XLEN", key, key=key)
        pending = (await client.command("XPENDING", key, "engine", key=key))["pending"]
        if length or pending:
            found.append(f"{key}: {length} entries, {pending} pending")
    for name in await client.retrying(lambda: client.connections.scan("headrace:*:backlog:*")):
        found.append(f"{name.decode()}: something waits")
    for name in await client.retrying(lambda: client.connections.scan("headrace:*:load:*")):
        key = name.decode()
        load = await client.command("HGETALL", key, key=key)
        found += [
            f"{key}: {field.decode()} is {value.decode()}"
            for field, value in load.items()
            if field.startswith(b"tokens:") and int(value)
        ]
    return found


def _gauges(deployment: Deployment) -> list[str]:
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    found = []
    for worker in deployment.workers:
        if worker.is_running:
            found += [f"{worker.name}: {name} is {value}" for name in gauges if (value := worker.metric(name))]
    return found + [
        f"{edge.name}: {value:.0f} generations in flight"
        for edge in deployment.edges
        if (value := edge.metric("headrace_edge_requests_in_flight"))
    ]


def _name(transcript: Transcript) -> str:
    return f"{transcript.feature.name} ({transcript.request_id})"
