"""A request's life as lines of text: a pure function of its request, its status and its events."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.events import (
    ChoiceFinished,
    Ended,
    EngineRequest,
    Failed,
    Milestone,
    OutputEvent,
    PromptScored,
    Recorded,
    Started,
    Tokens,
)
from common.request_state import RequestState, apply


@dataclass(frozen=True, slots=True)
class Line:
    """One or several neighbouring events. ``at_s``: seconds from the arrival of the request."""

    first_n: int
    last_n: int
    at_s: float
    text: str

    def __str__(self) -> str:
        numbers = str(self.first_n) if self.first_n == self.last_n else f"{self.first_n}-{self.last_n}"
        return f"{self.at_s:+10.3f}s  {numbers:>11}  {self.text}"


def state_at(events: Sequence[Recorded], n: int) -> RequestState:
    """The fold of the first ``n`` events (all, when there are fewer)."""
    state = RequestState()
    for item in events[:n]:
        state = apply(state, item)
    return state


def timeline(
    request: EngineRequest, events: Sequence[Recorded], arrived_s: float, *, is_detailed: bool
) -> Iterator[Line]:
    """Lines in order. Runs of token events are one line unless ``is_detailed``."""
    run: list[Recorded] = []
    seen_choices: set[int] = set()
    is_handed_over = False
    for item in events:
        event = item.event
        if isinstance(event, Tokens) and event.choice in seen_choices and not is_detailed:
            run.append(item)
            continue
        if run:
            yield _decode_line(run, arrived_s)
            run = []
        is_first = isinstance(event, Tokens) and event.choice not in seen_choices
        if isinstance(event, Tokens):
            seen_choices.add(event.choice)
        text = describe(request, event, is_first_token=is_first, is_handed_over=is_handed_over)
        yield Line(item.n, item.n, event.t - arrived_s, text)
        is_handed_over = is_handover(event)
    if run:
        yield _decode_line(run, arrived_s)


def is_handover(event: OutputEvent) -> bool:
    """Whether its worker has given the request to others in order: who continues has not taken it over."""
    return isinstance(event, Milestone) and event.what == "handed_over"


def describe(
    request: EngineRequest, event: OutputEvent, *, is_first_token: bool = False, is_handed_over: bool = False
) -> str:
    """One event in words. ``is_handed_over``: the event before it `is_handover`."""
    choice = f" choice {event.choice}" if request.num_choices > 1 and hasattr(event, "choice") else ""
    match event:
        case Started(resumed_from=0):
            return (
                f"started by {event.worker} under epoch {event.epoch}, {counted(event.prompt_tokens, 'prompt token')}, "
                f"{event.queue_s:.3f} s after its arrival"
            )
        case Started():
            how, why = ("continued", " (handed over)") if is_handed_over else ("taken over", "")
            rest = f"goes on after event {event.resumed_from}{why}"
            return f"{how} by {event.worker} under epoch {event.epoch}, {rest}"
        case Milestone():
            detail = ", ".join(f"{key} {value}" for key, value in event.detail.items())
            return f"{event.what.replace('_', ' ')}{choice}{': ' if detail else ''}{detail}"
        case PromptScored():
            return f"prompt {event.prompt_index} scored"
        case Tokens():
            what = "first token" if is_first_token else "tokens"
            cached = (
                f", {counted(event.cached_tokens, 'prompt token')} from the prefix cache" if event.cached_tokens else ""
            )
            return f"{what}{choice}: {_quoted(event.text)} {list(event.token_ids)}{cached}"
        case ChoiceFinished():
            why = f" ({event.stop_reason!r})" if event.stop_reason is not None else ""
            rest = f", held back until now: {_quoted(event.text)}" if event.text else ""
            return f"finished{choice}: {event.finish_reason}{why}{rest}"
        case Ended():
            usage = event.usage
            end = "ended" if event.cancelled is None else f"cancelled ({event.cancelled})"
            return (
                f"{end}: {counted(usage.prompt_tokens, 'prompt token')} ({usage.cached_tokens} cached), "
                f"{counted(usage.completion_tokens, 'completion token')}"
            )
        case Failed():
            return f"failed: {event.code}: {event.message}"


def counted(number: int, thing: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def event_json(item: Recorded, arrived_s: float) -> str:
    """One event as a line of JSON, with its number, its kind and the seconds since the arrival."""
    event = item.event
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    kind = event.__struct_config__.tag
    body = {"n": item.n, "kind": kind, "at_s": round(event.t - arrived_s, 6), **fields}
    return json.dumps(body, default=lambda value: {k: getattr(value, k) for k in value.__struct_fields__})


def _decode_line(run: Sequence[Recorded], arrived_s: float) -> Line:
    first, last = run[0], run[-1]
    count = sum(len(item.event.token_ids) for item in run if isinstance(item.event, Tokens))
    text = "".join(item.event.text for item in run if isinstance(item.event, Tokens))
    span_s = last.event.t - first.event.t
    pace = f", {1000 * span_s / (len(run) - 1):.1f} ms apart" if len(run) > 1 else ""
    longest = max((b.event.t - a.event.t for a, b in itertools.pairwise(run)), default=0.0)
    pause = f", longest pause {1000 * longest:.0f} ms" if len(run) > 1 else ""
    choices = {item.event.choice for item in run if isinstance(item.event, Tokens)}
    what = f": {_quoted(text)}" if len(choices) == 1 else f" of {len(choices)} choices"
    return Line(first.n, last.n, first.event.t - arrived_s, f"decode: {counted(count, 'token')}{pace}{pause}{what}")


def _quoted(text: str, most: int = 60) -> str:
    return json.dumps(text if len(text) <= most else f"{text[: most - 1]}…", ensure_ascii=False)
