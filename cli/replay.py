"""``headrace replay REQUEST_ID MODEL``: run a request again and compare it, token for token, with what was logged.

Needs the log and the model's files; no worker, no edge. The recorded seed, parameters and prompt are used. Says
"identical", or where the first token differs and what both sides have there; exits with 1 when they differ. With other
weights, another format or another kernel family than the worker had, the fingerprints differ, and so may the tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from cli.groups import LOG_READERS
from cli.inspect import read_request
from cli.local_log import opened_log
from cli.timeline import counted
from common.config import Flags, Loaded, Settings, load
from common.events import EngineRequest, Recorded, Started
from common.request_state import RequestState, fold
from common.tokenization.tokenizer import Tokenizer
from engine_worker.assembly import Assembly, EngineSettings, load_engine
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, SchedulerSettings
from engine_worker.sequence import Sequence as EngineSequence

EXIT_DIFFERENT: Final = 1
# What the fingerprint covers beside the weights.
FORMAT_FLAGS: Final = ("--dtype", "--quantization", "--kv-cache-dtype", "--model-impl", "--backend", "--native-target")


class ReplaySettings(Settings):
    """Which request is run again."""

    replayed_id: Annotated[str, Flags(("--request-id",), positional=True)] = Field(description="Id of the request.")


GROUPS: Final[tuple[type[Settings], ...]] = (
    ReplaySettings,
    ModelSettings,
    ComputeSettings,
    SchedulerSettings,
    KvCacheSettings,
    *LOG_READERS,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a choice parts from its log: ``position`` counts its output tokens from 0; None = it had ended there."""

    choice: int
    position: int
    logged: int | None
    replayed: int | None


def main(argv: Sequence[str], prog: str) -> int:
    loaded = load(GROUPS, argv, prog=prog, description=(__doc__ or "").strip())
    request, events = asyncio.run(_read(loaded, loaded[ReplaySettings].replayed_id))
    settings = EngineSettings(
        model=loaded[ModelSettings],
        compute=loaded[ComputeSettings],
        scheduler=loaded[SchedulerSettings],
        kv_cache=loaded[KvCacheSettings],
    )
    assembly = load_engine(settings)
    for line in fingerprint_lines(events, assembly.model.fingerprint):
        print(line)
    state = fold(events)
    replayed = replay(assembly, request, state)
    differences = list(compare(state, replayed))
    tokenizer = Tokenizer.from_json(assembly.model.tokenizer_json, dict(assembly.model.tokenizer_config))
    for item in differences:
        print(_in_words(item, tokenizer))
    if not differences:
        count = sum(len(choice.token_ids) for choice in state.choices.values())
        print(f"identical: {counted(count, 'token')} in {counted(len(state.choices), 'choice')}")
    return EXIT_DIFFERENT if differences else 0


async def _read(loaded: Loaded, request_id: str) -> tuple[EngineRequest, list[Recorded]]:
    async with opened_log(loaded) as client:
        _, request, events = await read_request(client, request_id)
    return request, events


def fingerprint_lines(events: Sequence[Recorded], own: str) -> Iterator[str]:
    """What is known on both sides of the weights and of all else that a fingerprint covers."""
    recorded = {item.event.weights_fingerprint for item in events if isinstance(item.event, Started)}
    if recorded <= {own}:
        yield f"weights and format {own[:16]}, the same as recorded"
    else:
        theirs = ", ".join(sorted(name[:16] for name in recorded))
        yield f"weights and format {own[:16]}, recorded {theirs}: NOT the same weights, or not computed in the same way"
        yield f"  give replay the model and what the worker had of {', '.join(FORMAT_FLAGS)}"


def replay(assembly: Assembly, request: EngineRequest, state: RequestState) -> dict[int, tuple[int, ...]]:
    """Output tokens by choice, generated anew until each choice is as long as its log or has ended."""
    if request.sampling.grammar is not None:
        assembly.compile(request.sampling.grammar)
    numbers = itertools.count(1)
    sequences = {
        index: EngineSequence(
            seq_id=next(numbers),
            request_id=request.request_id,
            choice=index,
            prompt_token_ids=request.prompts[index // request.n],
            sampling=request.sampling,
            max_model_len=assembly.plan.max_model_len,
            prompt_index=index // request.n,
            cache_salt=request.cache_salt,
        )
        for index in state.choices
    }
    for sequence in sequences.values():
        assembly.prepare(sequence)
    engine = assembly.engine
    engine.add(sequences.values())
    while engine.has_work:
        engine.step(time.time())
        done = all(len(state.choice(i).token_ids) <= s.num_output_tokens for i, s in sequences.items())
        if done:  # the log ends here, by a stop string or because somebody cancelled it
            engine.cancel(request.request_id)
    return {index: sequence.output_token_ids() for index, sequence in sequences.items()}


def compare(state: RequestState, replayed: dict[int, tuple[int, ...]]) -> Iterator[Difference]:
    """The first difference of each choice. Tokens behind the end of a log were never shown and do not count."""
    for index, tokens in sorted(replayed.items()):
        logged = state.choice(index).token_ids
        for position, token_id in enumerate(logged):
            again = tokens[position] if position < len(tokens) else None
            if again != token_id:
                yield Difference(index, position, token_id, again)
                break


def _in_words(item: Difference, tokenizer: Tokenizer) -> str:
    def shown(token_id: int | None) -> str:
        return "the end" if token_id is None else f"{token_id} {tokenizer.token_text(token_id)!r}"

    return (
        f"choice {item.choice} differs at output token {item.position}: "
        f"logged {shown(item.logged)}, replayed {shown(item.replayed)}"
    )
