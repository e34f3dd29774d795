"""What the log costs in the product: bytes in the server, bytes on its disk, its CPU, and what it adds to an answer.

    python -m bench.log_cost [--mode int4] [--lengths 16,64,256] [--no-times] [--json FILE]

Bytes: requests of exact output lengths through ``headrace serve``, then ``MEMORY USAGE`` of the keys of each (its hash
and its stream), and how much the append-only file has grown beyond what it grows by when idle (leases, figures). These
are counts, which load does not move. Times: the engine in process and the same work through HTTP, edge, log and worker,
in turn (`bench.front_door`); run them on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.ending import end_in_order
from bench.front_door import FrontDoor, front_door
from bench.servers import FORMATS, Running, headrace, running
from cli.model_import import ensure_demo_model
from common.transport import LogClient, RedisSettings

_REQUESTS: Final = 4  # of each kind
_OTHERS_LENGTH: Final = 64
_IDLE_S: Final = 5.0
_PROMPT: Final = " ".join(str(k) for k in range(60))  # 120 tokens or so
_KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "5 top logprobs": {"logprobs": 5},
    "4 choices": {"n": 4, "temperature": 1.0},
}


@dataclass(frozen=True, slots=True)
class Stored:
    """What the log holds of requests of one kind and length; medians over them, bytes."""

    kind: str
    output_tokens: int  # of all choices
    prompt_tokens: int
    stream_bytes: float  # the events
    hash_bytes: float  # the request itself and its state
    file_bytes: float  # in the append-only file, for each request
    events: float

    def __str__(self) -> str:
        memory = self.stream_bytes + self.hash_bytes
        return (
            f"{self.kind}: {self.output_tokens} tokens ({self.prompt_tokens} of prompt): memory {memory:.0f} bytes = "
            f"{self.hash_bytes:.0f} request + {self.stream_bytes:.0f} in {self.events:.0f} events, "
            f"{self.stream_bytes / self.output_tokens:.1f} a token; file {self.file_bytes:.0f}, "
            f"{self.file_bytes / self.output_tokens:.1f} a token"
        )


@dataclass(slots=True)
class LogCost:
    stored: list[Stored] = field(default_factory=list)
    times: FrontDoor | None = None

    def __str__(self) -> str:
        lines = [str(one) for one in self.stored]
        if self.times is not None:
            for name, values in self.times.log_us_per_token.items():
                us = median(values)
                lines.append(
                    f"log server at {name}: {us:.0f} us CPU a token, {us / 10:.1f}% of a core at 1,000 tokens/s"
                )
            lines.append(str(self.times))
        return "\n".join(lines)


def bytes_stored(mode: str, model_dir: Path, lengths: Sequence[int]) -> list[Stored]:
    """One after the other through a server of its own. Raises `ServerFailed`, OSError."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-log-cost-") as directory,
        running(headrace(mode, model_dir), Path(directory)) as live,
    ):
        socket = Path(directory) / "log" / "server.sock"
        return asyncio.run(_measure(live, f"unix://{socket}", lengths))


async def _measure(live: Running, redis_url: str, lengths: Sequence[int]) -> list[Stored]:
    client = await LogClient.open(RedisSettings(redis_url=redis_url))
    try:
        before = await _file_bytes(client)
        await asyncio.sleep(_IDLE_S)
        idle = (await _file_bytes(client) - before) / _IDLE_S
        plain = [await _stored(live, client, "plain", length, idle) for length in lengths]
        others = [await _stored(live, client, kind, _OTHERS_LENGTH, idle) for kind in _KINDS if kind != "plain"]
        return plain + others
    finally:
        await client.close()


async def _stored(live: Running, client: LogClient, kind: str, length: int, idle: float) -> Stored:
    """``idle``: bytes a second by which the file grows without requests."""
    before, started = await _file_bytes(client), time.perf_counter()
    body = {"model": live.model, "max_tokens": length, "ignore_eos": True, "temperature": 0, **_KINDS[kind]}
    answers = [
        await asyncio.to_thread(_complete, live.url, {**body, "prompt": f"{turn} {_PROMPT}"})
        for turn in range(_REQUESTS)
    ]
    grown = await _file_bytes(client) - before - idle * (time.perf_counter() - started)
    keys, usage = client.keys, answers[0][1]
    streams = [keys.output(request_id) for request_id, _ in answers]
    hashes = [keys.request(request_id) for request_id, _ in answers]
    return Stored(
        kind=kind,
        output_tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        stream_bytes=median([await _memory(client, key) for key in streams]),
        hash_bytes=median([await _memory(client, key) for key in hashes]),
        file_bytes=grown / _REQUESTS,
        events=median([await client.command("XLEN", key, key=key) for key in streams]),
    )


async def _memory(client: LogClient, key: str) -> int:
    return int(await client.command("MEMORY", "USAGE", key, "SAMPLES", 0, key=key))


async def _file_bytes(client: LogClient) -> int:
    """Of the append-only file; what is buffered in the server counts already."""
    reply = await client.command("INFO", "persistence", key=client.keys.models)
    if isinstance(reply, dict):
        return int(reply["aof_current_size"])
    facts = dict(line.split(":", 1) for line in reply.decode().split() if ":" in line)
    return int(facts["aof_current_size"])


def _complete(url: str, body: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """(request id, usage) of one answer."""
    request = urllib.request.Request(
        f"{url}/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.headers["X-Request-Id"]), json.load(answer)["usage"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.log_cost", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", choices=sorted(FORMATS), default="int4", help="format of the weights")
    parser.add_argument("--lengths", default="16,64,256", help="output tokens of the requests whose bytes are counted")
    parser.add_argument("--no-bytes", action="store_true", help="only the times")
    parser.add_argument("--no-times", action="store_true", help="only the bytes")
    parser.add_argument(
        "--workloads", type=lambda text: text.split(","), default=["A", "B", "C"], help="of the times, such as A,C"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(argv)


def main() -> int:
    end_in_order()
    arguments = parse()
    model_dir = ensure_demo_model(Path(".headrace/models"), print)
    cost = LogCost()
    if not arguments.no_bytes:
        lengths = [int(text) for text in arguments.lengths.split(",")]
        cost.stored = bytes_stored(arguments.mode, model_dir, lengths)
    if not arguments.no_times:
        cost.times = front_door(
            arguments.mode, model_dir, rounds=1, seed=arguments.seed, minutes=2, workloads=arguments.workloads
        )
    print(cost)
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(cost), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
