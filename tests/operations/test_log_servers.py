"""The whole stack on every kind of log server, and on servers that fail over or are full."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from email.message import Message
from random import Random

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from common.events import Started
from tests.faults.client import Client, Transcript
from tests.faults.deployment import Deployment
from tests.faults.features import Feature, feature
from tests.faults.power import Fragile
from tests.faults.traffic import undisturbed
from tests.operations.conftest import LEASE_S, Operate, assert_whole, session
from tests.servers import Cluster, Server, Watched

pytestmark = [pytest.mark.e2e]
LONG = Feature("long", fields={"temperature": 1.0, "max_tokens": 3000, "seed": 5})
BACKLOG_STEPS = 64


@pytest.mark.parametrize("durability", ["standard", pytest.param("strict", marks=pytest.mark.slow)])
async def test_streams_go_on_after_a_failover(operate: Operate, durability: str) -> None:
    strict = {"durability": "strict", "strict_replicas": 1} if durability == "strict" else {}
    server = Watched(replicas=2 if strict else 1)  # strict needs one that is left to acknowledge
    deployment = await operate(server, edges=2, workers=1, worker=strict, edge=strict)
    expected = await undisturbed(deployment, [LONG, feature("json_schema")])
    async with session() as http:
        client = Client(http, lambda: deployment.edges, Random(1))
        running = Transcript(LONG)
        asked = [
            asyncio.create_task(client.stream(LONG, "running", transcript=running)),
            asyncio.create_task(client.stream(feature("json_schema"), "beside")),
        ]
        await until_read(deployment, running, 5000)
        server.primary.kill()
        asked.append(asyncio.create_task(client.document(feature("json_schema"), "asked-meanwhile")))
        transcripts = await asyncio.gather(*asked)
    assert_whole(transcripts, expected)


async def test_a_cluster_serves_resumes_and_cancels(operate: Operate) -> None:
    deployment = await operate(Cluster(), edges=2, workers=1)
    features = [LONG, feature("chat"), feature("json_schema")]
    expected = await undisturbed(deployment, features)
    async with session() as http:
        client = Client(http, lambda: deployment.edges, Random(2))
        left = asyncio.create_task(client.leave(LONG, 3000))
        transcripts = await asyncio.gather(
            client.stream(LONG, "cut", hang_up_after=60_000), *(client.stream(f, f.name) for f in features)
        )
        await left
    assert_whole(transcripts, expected)
    assert len(transcripts[0].connections) > 2
    partitions = {transcript.request_id.partition("-")[0] for transcript in transcripts}
    assert len(partitions) > 1

    async def is_idle() -> bool:
        stats = await deployment.registry.queue_stats(LONG.body(stream=True)["model"])
        return (stats.depth, stats.tokens) == (0, 0)

    await deployment.until(is_idle)  # the request whose reader left is over, too
    assert deployment.workers[0].metric("headrace_worker_cancels_total") == 1


async def test_a_full_server_refuses_new_work_pauses_what_runs_and_goes_on(operate: Operate) -> None:
    server = Server(options={"maxmemory": "48mb", "maxmemory-policy": "noeviction"})
    worker = {"max_output_backlog_steps": BACKLOG_STEPS}
    deployment = await operate(server, edges=1, workers=1, worker=worker)
    expected = await undisturbed(deployment, [LONG])
    edge, (running_worker,) = deployment.edges[0], deployment.workers
    async with session() as http:
        client = Client(http, lambda: deployment.edges, Random(3))
        transcript = Transcript(LONG)
        asked = asyncio.create_task(client.stream(LONG, "running", transcript=transcript))
        await until_read(deployment, transcript, 5000)
        await asyncio.to_thread(fill, server)
        await asyncio.sleep(1.2)  # the edge looks once a second
        status, headers, code = await asyncio.to_thread(refusal, edge.url)
        assert (status, code) in ((429, "overloaded"), (503, "log_unavailable"))
        assert 1 <= int(headers["Retry-After"]) <= 60
        assert (await asyncio.to_thread(urllib.request.urlopen, f"{edge.url}/health")).status == 200
        await deployment.until(lambda: running_worker.metric("headrace_worker_log_errors_total") > 0)
        await deployment.until(lambda: running_worker.metric("headrace_worker_output_backlog_steps") > 0)
        shown = -1000
        while len(transcript.connections[0].raw) - shown >= 200:  # keep-alives at most
            shown = len(transcript.connections[0].raw)
            await asyncio.sleep(1.0)
        assert not asked.done()
        assert 0 < running_worker.metric("headrace_worker_output_backlog_steps") <= BACKLOG_STEPS
        with server.client() as behind:
            behind.delete("filler")
        assert_whole([await asked], expected)
    owners = [item for item in await deployment.reading.read_range(transcript.request_id, after=0, limit=10_000)
              if isinstance(item.event, Started)]  # fmt: skip
    assert len(owners) == 1  # the lease was kept all the while


async def test_a_full_disk_pauses_what_runs_and_everything_goes_on(operate: Operate) -> None:
    server = Fragile("everysec")
    # With the disk, all leases are gone: who renews first waits for the others for half a lease, which is enough for a
    # busy machine, too.
    worker = {"max_output_backlog_steps": BACKLOG_STEPS, "lease_ttl_s": 2 * LEASE_S}
    deployment = await operate(server, edges=1, workers=2, worker=worker)
    expected = await undisturbed(deployment, [LONG])
    (edge,) = deployment.edges
    async with session() as http:
        client = Client(http, lambda: deployment.edges, Random(3))
        transcript = Transcript(LONG)
        asked = asyncio.create_task(client.stream(LONG, "running", transcript=transcript))
        await until_read(deployment, transcript, 5000)
        server.fill_disk()
        await deployment.until(lambda: refuses_writes(server))  # from its first failed append on
        status, headers, code = await asyncio.to_thread(refusal, edge.url)
        assert (status, code) == (503, "log_unavailable")
        assert 1 <= int(headers["Retry-After"]) <= 60
        # Leases cannot be renewed: soon nobody is known to live, and a balancer is told.
        await deployment.until(lambda: not_ready(edge.url))
        await asyncio.sleep(4 * LEASE_S)
        assert not asked.done()
        server.empty_disk()
        assert_whole([await asked], expected)
        await deployment.until(edge.is_ready)
    owners = [item for item in await deployment.reading.read_range(transcript.request_id, after=0, limit=10_000)
              if isinstance(item.event, Started)]  # fmt: skip
    assert len(owners) == 1, "the other worker took over although its own lease was gone as well"


def refuses_writes(server: Server) -> bool:
    with server.client() as client:
        try:
            client.set("probe", 1)
        except ResponseError as error:
            return str(error).startswith("MISCONF")
    return False


def not_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=60):
            return False
    except urllib.error.HTTPError as error:
        error.close()
        return error.code == 503


def fill(server: Server) -> None:
    """To the last byte that the server takes."""
    with server.client() as client:
        size = 1 << 20
        while size >= 64:
            try:
                client.execute_command("APPEND", "filler", b"x" * size)
            except OutOfMemoryError:
                size //= 2


def refusal(url: str) -> tuple[int, Message, str]:
    """Status, headers and error code of a request that is refused."""
    body = json.dumps(LONG.body(stream=False)).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=120)
    with refused.value as answer:
        return answer.code, answer.headers, json.loads(answer.read())["error"]["code"]


async def until_read(deployment: Deployment, transcript: Transcript, size: int) -> None:
    """Wait until a client has read so many bytes of a stream that still runs."""
    await deployment.until(lambda: transcript.connections and len(transcript.connections[0].raw) > size)
    assert not transcript.is_complete
