"""``headrace inspect REQUEST_ID``: what happened to a request, from its events. Needs the log alone, no worker.

Prints the timeline and the text; ``--at N`` shows the text as it was after event N, ``--events`` every event,
``--json`` the events as lines of JSON. The id is the response's ``x-request-id`` or the id in a log line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from cli.groups import LOG_READERS
from cli.local_log import opened_log
from cli.timeline import counted, event_json, state_at, timeline
from common.config import Flags, Loaded, Settings, load
from common.events import EngineRequest, Recorded
from common.telemetry.trace_ids import trace_id_hex
from common.transport import LogClient, Reading, RequestPhase, RequestStatus


class InspectSettings(Settings):
    """Which request is looked at, and how closely."""

    request_id: Annotated[str, Flags(positional=True)] = Field(description="Id of the request.")
    at: int | None = Field(None, ge=0, description="Show the text as it was after this event.")
    events: bool = Field(False, description="Show every event; otherwise runs of tokens are one line.")
    as_json: Annotated[bool, Flags(("--json",))] = Field(False, description="Events as lines of JSON.")


def main(argv: Sequence[str], prog: str) -> int:
    loaded = load([InspectSettings, *LOG_READERS], argv, prog=prog, description=(__doc__ or "").strip())
    asyncio.run(_inspect(loaded[InspectSettings], loaded))
    return 0


async def _inspect(settings: InspectSettings, loaded: Loaded) -> None:
    async with opened_log(loaded) as client:
        status, request, events = await read_request(client, settings.request_id)
        place = await Reading(client).queue_place(settings.request_id)
    arrived_s = request.arrival_s or status.submitted_s  # what all times are counted from, that of the queue too
    shown = events if settings.at is None else events[: settings.at]
    if settings.as_json:
        for item in shown:
            print(event_json(item, arrived_s))
        return
    for line in heading(status, request):
        print(line)
    if place is not None:
        wait = "" if place.estimated_wait_s is None else f", about {place.estimated_wait_s:.1f} s to wait"
        print(f"queue     position {place.ahead + 1}{wait}")
    for entry in timeline(request, shown, arrived_s, is_detailed=settings.events):
        print(entry)
    state = state_at(events, len(shown))
    for index in range(request.num_choices):
        title = "text" if request.num_choices == 1 else f"text of choice {index}"
        print(f"{title} after event {state.last_n}:\n{state.choice(index).text}")


async def read_request(client: LogClient, request_id: str) -> tuple[RequestStatus, EngineRequest, list[Recorded]]:
    """Everything the log holds of a request. Raises `StreamExpired` when it holds nothing (any more)."""
    reading = Reading(client)
    status = await reading.status(request_id)
    attached = await reading.attach(request_id, after=0, edge_id="")
    events = list(attached.events)
    while events and len(events) < attached.last_n:
        page = await reading.read_range(request_id, after=len(events))
        if not page:
            break
        events += page
    return status, attached.spec, events


def heading(status: RequestStatus, request: EngineRequest) -> list[str]:
    """What is known before the first event."""
    sampling = request.sampling
    prompts = sum(len(prompt) for prompt in request.prompts)
    lines = [
        f"request   {status.request_id}",
        f"trace     {trace_id_hex(status.request_id, request.trace)}",
        f"model     {status.model}",
        f"state     {status.phase}, epoch {status.epoch}, {counted(status.attempts, 'takeover')}"
        + (f", owned by {status.owner}" if status.phase is RequestPhase.RUNNING else ""),
        f"prompt    {counted(prompts, 'token')}, {counted(request.num_choices, 'choice')}, "
        f"max_tokens {sampling.max_tokens}, temperature {sampling.temperature:g}, seed {sampling.seed}",
    ]
    if status.cancel is not None:
        lines.append(f"cancel    {status.cancel} asked by {status.cancelled_by or 'nobody named'}")
    if status.edges:
        lines.append(f"readers   {', '.join(status.edges)}")
    return lines
