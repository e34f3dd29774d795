"""One edge process holding many SSE streams: delivery delay, memory and CPU.

    python -m bench.many_streams --streams 2000 --tokens 20 --interval 0.5

A log server, an edge and a scripted engine run as processes of their own; the engine gives every stream one token an
interval, whose text is the time at which it was appended. The delay is from there to the moment at which the client has
read it from its socket, so it holds append, push, render, HTTP and the client itself, all on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import resource
import secrets
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

from bench.ending import end_in_order
from cli.bench.figures import percentile
from cli.supervisor import die_with
from common.events import OutputEvent, Tokens
from common.transport import RedisSettings
from tests.integration.edge.letters_model import NAME
from tests.integration.edge.running_edge import EdgeProcess
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.servers import Server, running

_STAMP = re.compile(rb'"content":"(\d+\.\d+) "')
_READS = re.compile(r'headrace_edge_catch_up_reads_total\{why="(\w+)"\} (\S+)')
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


class ClockWorker(ScriptedWorker):
    """Writes the time instead of letters."""

    def _tokens(self, state, now: float) -> list[OutputEvent]:  # type: ignore[no-untyped-def]
        if state.produced >= state.budget:
            return []
        state.produced += 1
        return [Tokens(epoch=state.owned.epoch, t=now, choice=0, token_ids=(97,), text=f"{time.time():.6f} ")]


async def engine(redis_url: str, key_prefix: str, interval_s: float) -> None:
    """The child process: until it is told to end."""
    worker = ClockWorker(RedisSettings(redis_url=redis_url, key_prefix=key_prefix, partitions=1))
    worker.step_s = interval_s
    await worker.start()
    rest_from_collecting()
    await asyncio.Event().wait()


def rest_from_collecting() -> None:
    """No collection of cycles in what measures: with so many objects each would look like a delay of the edge."""
    gc.collect()
    gc.disable()


def memory_and_cpu(pid: int) -> tuple[int, float]:
    """Resident bytes and CPU seconds so far of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[21]) * _PAGE, (int(fields[11]) + int(fields[12])) / _TICK


def catch_up_reads(url: str) -> str:
    """How often readers had to look into the log, as the edge counted."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return ", ".join(f"{why} {int(float(count))}" for why, count in _READS.findall(page))


async def read_stream(port: int, tokens: int, delays: list[float], started: asyncio.Event) -> int:
    """Tokens that arrived on one connection."""
    body = (
        f'{{"model":"{NAME}","messages":[{{"role":"user","content":"go"}}],"max_tokens":{tokens},"stream":true}}'
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    count, rest = 0, b""
    while part := await reader.read(65536):
        now, rest = time.time(), rest + part
        for match in _STAMP.finditer(rest):
            count += 1
            if started.is_set():
                delays.append(now - float(match.group(1)))
        rest = rest[rest.rfind(b"\n") + 1 :]
    writer.close()
    return count


async def measure(options: argparse.Namespace, redis: RedisSettings, edge: EdgeProcess) -> None:
    delays: list[float] = []
    everybody = asyncio.Event()
    idle_bytes, _ = memory_and_cpu(edge.process.pid)
    tasks = []
    for _ in range(options.streams):
        tasks.append(asyncio.create_task(read_stream(edge.port, options.tokens, delays, everybody)))
        await asyncio.sleep(options.ramp / options.streams)
    everybody.set()  # delays count once all streams are open
    rest_from_collecting()
    begun, (_, cpu_before) = time.monotonic(), memory_and_cpu(edge.process.pid)
    await asyncio.sleep(options.tokens * options.interval * 0.4)
    held_bytes, cpu_after = memory_and_cpu(edge.process.pid)
    window_s, in_window, cpu_s = time.monotonic() - begun, len(delays), cpu_after - cpu_before
    counts = await asyncio.gather(*tasks)
    complete = sum(count == options.tokens for count in counts)
    print(f"streams complete             {complete} of {options.streams}")
    print(f"tokens timed                 {len(delays)}")
    print(f"delivery delay ms p50        {1000 * percentile(delays, 50):.1f}")
    print(f"delivery delay ms p99        {1000 * percentile(delays, 99):.1f}")
    print(f"delivery delay ms max        {1000 * max(delays):.1f}")
    print(f"edge memory idle MiB         {idle_bytes / 2**20:.0f}")
    print(f"edge memory a stream KiB     {(held_bytes - idle_bytes) / options.streams / 1024:.1f}")
    print(f"edge CPU, share of a core    {cpu_s / window_s:.2f}")
    print(f"edge CPU us a token          {1e6 * cpu_s / max(in_window, 1):.1f}")
    print(f"catch-up reads, by cause     {catch_up_reads(edge.url) or 'none'}")


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=20, help="of each stream")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two tokens of a stream")
    parser.add_argument("--ramp", type=float, default=4.0, help="seconds over which the streams are opened")
    parser.add_argument("--engine", nargs=2, metavar=("URL", "PREFIX"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        url, prefix = options.engine
        asyncio.run(engine(url, prefix, options.interval))
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, options.streams + 500)), hard))
    with running(Server(fsync="everysec")) as server:
        redis = RedisSettings(redis_url=server.url, key_prefix=f"{secrets.token_hex(4)}:", partitions=1)
        command = [sys.executable, "-m", "bench.many_streams", "--interval", str(options.interval)]
        child = subprocess.Popen(
            [*command, "--engine", redis.redis_url, redis.key_prefix],
            preexec_fn=partial(die_with, os.getpid()),
        )
        edge = EdgeProcess(
            redis,
            partitions=1,
            max_queued_requests=100_000,
            max_queued_tokens=1_000_000_000,
            log_level="warning",
            catalog_refresh_s=1.0,
        )
        try:
            edge.start()
            asyncio.run(measure(options, redis, edge))
        finally:
            edge.kill()
            child.terminate()
            child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
