"""What one chunk costs the edge: frames offered, events taken, rendered, framed, written directly or by the response.

Run: ``python -m bench.edge_relay [streams] [tokens]``. No network and no Redis: frames are offered as the subscription
would, connections and responses are sinks. The table shows CPU time for each chunk, stage by stage, and all together.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from common.events import ChoiceFinished, Ended, EngineRequest, FinishReason, SamplingParams, Started, Tokens, Usage
from common.tokenization.tokenizer import Tokenizer
from edge.config import StreamSettings
from edge.delivery import Delivery
from edge.follower import Follower
from edge.http_protocol import DirectBody
from edge.sse import EventStream, frame_bare
from edge.stream_body import StreamBody
from edge.translate.presentation import CHAT, Presentation, encode_presentation
from edge.translate.responses import StreamRenderer

Payload = tuple[int, bytes]


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer.from_json(tokenizer.to_str().encode())


def make_request() -> EngineRequest:
    shown = Presentation(
        endpoint=CHAT, response_id="chatcmpl-1", created=1_700_000_000, model="bench", include_usage=True
    )
    return EngineRequest(
        request_id="0-01a22887-5c3e-7d65-96bf-b985368a1a8e",
        model="bench",
        prompts=((1, 2, 3),),
        sampling=SamplingParams(max_tokens=1000),
        presentation=encode_presentation(shown),
    )


def make_payloads(num_tokens: int) -> list[Payload]:
    events: list[Any] = [Started(epoch=1, t=1.0, worker="w")]
    events += [Tokens(epoch=1, t=1.0, choice=0, token_ids=(i,), text=" word") for i in range(num_tokens)]
    events.append(ChoiceFinished(epoch=1, t=1.0, choice=0, finish_reason=FinishReason.LENGTH))
    events.append(Ended(epoch=1, t=1.0, usage=Usage(prompt_tokens=3, completion_tokens=num_tokens)))
    encode = msgspec.msgpack.Encoder().encode
    return [(n, encode(event)) for n, event in enumerate(events, start=1)]


def per_chunk_us(work: Callable[[], object], chunks: int, repeat: int = 5) -> float:
    """The best of several runs, in microseconds of CPU for each chunk."""
    best = float("inf")
    for _ in range(repeat):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best / chunks * 1e6


def follow(payloads: list[Payload]) -> list[Any]:
    """One reader that takes each event as it comes."""
    follower = Follower("r", after=0, capacity=256, gap=None)
    taken = []
    for n, payload in payloads:
        follower.offer(n, payload)
        taken += follower.take()
    return taken


class Sink:
    """A connection that takes everything, as `DirectBody` sees it."""

    def __init__(self) -> None:
        self.flow = self.transport = self
        self.write_paused = self.disconnected = self.response_complete = False
        self.chunked_encoding = True

    def write(self, _: bytes) -> None:
        return None

    def is_closing(self) -> bool:
        return False


def push_all(streams: int, payloads: list[Payload], request: EngineRequest, tokenizer: Tokenizer) -> None:
    """The direct way, all streams stepping together."""
    followers = []
    for _ in range(streams):
        follower = Follower("r", after=0, capacity=256, gap=None)
        direct: Any = DirectBody(Sink())  # type: ignore[arg-type]
        body = StreamBody(StreamRenderer(request, tokenizer), Delivery(), direct)
        follower.direct = functools.partial(_push, follower, body)
        followers.append(follower)
    for n, payload in payloads:
        for follower in followers:
            follower.offer(n, payload)
            follower.flush()


def _push(follower: Follower, body: StreamBody) -> None:
    if body.is_ready:
        body.take(follower.take())


async def write_all(streams: int, payloads: list[Payload], request: EngineRequest, tokenizer: Tokenizer) -> None:
    """The long way: whole responses, one write an event, all streams stepping together as an engine makes them."""
    followers = [Follower("r", after=0, capacity=256, gap=None) for _ in range(streams)]

    async def blocks(follower: Follower) -> Any:
        renderer = StreamRenderer(request, tokenizer)
        while not renderer.ended:
            await follower.changed()
            chunks = [chunk for recorded in follower.take() for chunk in renderer.feed(recorded)]
            if chunks:
                yield frame_bare(chunks)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(_: Any) -> None:
        return None

    settings = StreamSettings()
    scope: dict[str, Any] = {"type": "http", "method": "POST"}
    responses = [
        EventStream(blocks(follower), settings, with_ids=False, headers={}, on_close=lambda: None)
        for follower in followers
    ]
    tasks = [asyncio.create_task(response(scope, receive, send)) for response in responses]
    for n, payload in payloads:
        for follower in followers:
            follower.offer(n, payload)
            follower.flush()
        for _ in range(4):  # turns of the loop until every response has written
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)


def main() -> None:
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    tokenizer, request, payloads = make_tokenizer(), make_request(), make_payloads(tokens)
    events = follow(payloads)

    def render() -> list[list[bytes]]:
        renderer = StreamRenderer(request, tokenizer)
        return [renderer.feed(recorded) for recorded in events]

    rendered = render()
    rows = [
        ("offer, take, decode", per_chunk_us(lambda: follow(payloads), tokens)),
        ("render", per_chunk_us(render, tokens)),
        ("frame", per_chunk_us(lambda: [frame_bare(chunks) for chunks in rendered], tokens)),
        (
            f"directly, {streams} streams",
            per_chunk_us(lambda: push_all(streams, payloads, request, tokenizer), tokens * streams, repeat=2),
        ),
        (
            f"by the response, {streams} streams",
            per_chunk_us(
                lambda: asyncio.run(write_all(streams, payloads, request, tokenizer)), tokens * streams, repeat=2
            ),
        ),
    ]
    for name, us in rows:
        print(f"{name:32} {us:8.2f} us/chunk")


if __name__ == "__main__":
    main()
