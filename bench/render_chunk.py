"""Microseconds that an edge spends on one streamed chunk: from a recorded event to the bytes of the document.

Run: python -m bench.render_chunk
"""

from __future__ import annotations

import time
from typing import Any

from common.events import EngineRequest, Recorded, SamplingParams, Started, TokenLogprobs, Tokens
from edge.translate.presentation import CHAT, COMPLETION, Presentation, encode_presentation
from edge.translate.responses import StreamRenderer
from tests.unit.edge.served_models import byte_tokenizer

EVENTS = 100_000


def request(**presentation: Any) -> EngineRequest:
    shown = Presentation(
        response_id="chatcmpl-0", created=1, model="small", system_fingerprint="headrace-0", **presentation
    )
    return EngineRequest(
        request_id="0",
        model="small",
        prompts=((1, 2),),
        sampling=SamplingParams(max_tokens=1),
        presentation=encode_presentation(shown),
    )


def measure(name: str, of: EngineRequest, logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
    renderer = StreamRenderer(of, byte_tokenizer())
    event = Tokens(epoch=1, t=1.0, choice=0, token_ids=(70,), text=' "word', logprobs=logprobs)
    recorded = [Recorded(1, Started(epoch=1, t=1.0, worker="w")), *(Recorded(n, event) for n in range(2, EVENTS))]
    started = time.perf_counter()
    for item in recorded:
        renderer.feed(item)
    print(f"{name:34} {(time.perf_counter() - started) / EVENTS * 1e6:6.2f} us")


def main() -> None:
    top = (TokenLogprobs(logprob=-0.5, rank=1, top_ids=(70, 71, 72, 73, 74), top_logprobs=(-0.5, -1, -2, -3, -4)),)
    measure("chat", request(endpoint=CHAT))
    measure("completion", request(endpoint=COMPLETION))
    measure("chat, looking for hermes calls", request(endpoint=CHAT, tool_format="hermes", tool_choice="auto"))
    measure("chat, after reasoning", request(endpoint=CHAT, reasoning_format="think"))
    measure("chat, usage in every chunk", request(endpoint=CHAT, include_usage=True, continuous_usage=True))
    measure("chat, five logprobs", request(endpoint=CHAT, logprobs=5), top)


if __name__ == "__main__":
    main()
