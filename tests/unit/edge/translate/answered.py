"""Requests with events as a worker would record them, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.events import (
    CancelReason,
    ChoiceFinished,
    Ended,
    EngineRequest,
    Failed,
    FinishReason,
    OutputEvent,
    PromptScored,
    Recorded,
    Started,
    TokenLogprobs,
    Tokens,
    Usage,
)
from common.tokenization.tokenizer import Tokenizer
from edge.translate.responses import DONE, AnswerBuilder, StreamRenderer
from tests.unit.edge.served_models import byte_tokenizer

STARTED = Started(epoch=1, t=1.0, worker="w", prompt_tokens=3)


def scored(token_id: int, count: int) -> TokenLogprobs:
    """A token that is the most likely one, with ``count`` alternatives, the last of them impossible."""
    others = tuple(range(3, 3 + count - 1))
    values = (-0.5, *(-1.0 - i for i in range(count - 2)), float("-inf"))[:count]
    return TokenLogprobs(logprob=-0.5, rank=1, top_ids=(token_id, *others)[:count], top_logprobs=values)


@dataclass
class Log:
    """What a worker writes for one request; ``tokenizer`` spells the texts."""

    request: EngineRequest
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    events: list[OutputEvent] = field(default_factory=lambda: [STARTED])
    counted: int = 0

    def scores(self, prompt_index: int = 0) -> Log:
        top = self.request.sampling.prompt_logprobs
        prompt = self.request.prompts[prompt_index]
        if top is not None:
            logprobs = (None, *(scored(token_id, top) for token_id in prompt[1:]))
            self.events.append(PromptScored(epoch=1, t=1.5, prompt_index=prompt_index, logprobs=logprobs))
        return self

    def says(self, text: str, choice: int = 0, *, shown: str | None = None) -> Log:
        """One event; ``shown``: its text where some is held back."""
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        top = self.request.sampling.logprobs
        logprobs = () if top is None else tuple(scored(token_id, top) for token_id in token_ids)
        self.counted += len(token_ids)
        self.events.append(
            Tokens(
                epoch=1, t=2.0, choice=choice, token_ids=token_ids, text=text if shown is None else shown,
                logprobs=logprobs, cached_tokens=2,
            )
        )  # fmt: skip
        return self

    def finishes(
        self, reason: FinishReason = FinishReason.STOP, choice: int = 0, *, text: str = "", stop: str | None = None
    ) -> Log:
        self.events.append(
            ChoiceFinished(epoch=1, t=3.0, choice=choice, finish_reason=reason, text=text, stop_reason=stop)
        )
        return self

    def ends(self, cancelled: CancelReason | None = None) -> Log:
        usage = Usage(prompt_tokens=3, completion_tokens=self.counted, cached_tokens=2)
        self.events.append(Ended(epoch=1, t=4.0, usage=usage, cancelled=cancelled))
        return self

    def fails(self, code: str = "engine_error", message: str = "the kernel said no") -> Log:
        self.events.append(Failed(epoch=1, t=4.0, code=code, message=message))
        return self

    def recorded(self) -> list[Recorded]:
        return [Recorded(n, event) for n, event in enumerate(self.events, start=1)]

    def chunks(self, after: int = 0) -> list[bytes]:
        renderer = StreamRenderer(self.request, self.tokenizer, after=after)
        chunks = [chunk for recorded in self.recorded() for chunk in renderer.feed(recorded)]
        assert renderer.ended
        return chunks

    def parsed(self) -> list[dict[str, Any]]:
        """Chunks of a stream that ends as it should, as objects."""
        *chunks, done = self.chunks()
        assert done == DONE
        return [json.loads(chunk) for chunk in chunks]

    def answer(self) -> dict[str, Any]:
        builder = AnswerBuilder(self.request, self.tokenizer)
        for recorded in self.recorded():
            assert not builder.ended
            builder.feed(recorded)
        answer: dict[str, Any] = json.loads(builder.body())
        return answer


def assembled(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice of a chat stream as a client puts it together."""
    result: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": [], "token_ids": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        result["content"] += delta.get("content", "")
        result["reasoning"] += delta.get("reasoning", "")
        result["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        result["token_ids"] += choice.get("token_ids", [])
        for part in delta.get("tool_calls", []):
            if "id" in part:
                result["calls"].append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                result["calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        if choice["finish_reason"] is not None:
            result["finish_reason"], result["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    return result
