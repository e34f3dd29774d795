"""The power of the log server fails, or its disk is full: what durability promises of what was acknowledged."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.faults.audit import audit
from tests.faults.conftest import Deploy
from tests.faults.features import Feature, feature
from tests.faults.power import Fragile
from tests.faults.test_failover_matrix import Scene, owners, tokens_of
from tests.faults.traffic import undisturbed

pytestmark = [pytest.mark.e2e]
LONG = Feature("long", fields={"temperature": 1.0, "max_tokens": 8000, "seed": 5})


async def test_strict_loses_nothing_that_anybody_was_told(deploy: Deploy) -> None:
    server, strict = Fragile("always"), {"durability": "strict"}
    deployment = await deploy(edges=1, server=server, worker=strict, edge=strict)
    expected = await undisturbed(deployment, [LONG, feature("json_schema"), feature("chat")])
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcript = scene.ask(LONG)
        await scene.until(transcript, lambda events: len(tokens_of(events)) >= 100)
        for one in (feature("json_schema"), feature("chat")):  # accepted within moments of the cut
            asked = scene.ask(one)
            await deployment.until(lambda asked=asked: asked.request_id)
        shown = len(transcript.logged_blocks())
        server.cut_power()
        await asyncio.to_thread(server.start)
        assert len(await scene.events(transcript)) >= shown
        await scene.finish()
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []


async def test_standard_loses_a_tail_that_live_workers_write_again(deploy: Deploy) -> None:
    server = Fragile("everysec")
    deployment = await deploy(edges=1, server=server)
    expected = await undisturbed(deployment, [LONG])
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcript = scene.ask(LONG)
        await scene.until(transcript, lambda events: bool(owners(events)))
        with server.client() as client:  # the claim is on the disk, and what follows is not
            client.config_set("appendfsync", "always")
            claimed = server.written()
            await deployment.until(lambda: server.kept() > claimed)
            client.config_set("appendfsync", "no")
        await deployment.until(lambda: pauses_with_a_tail(server))
        assert not transcript.is_complete
        assert server.cut_power() > 0
        await asyncio.to_thread(server.start)
        await scene.finish()
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []


def pauses_with_a_tail(server: Fragile) -> bool:
    """Whether the server, which stands still then, has written what is not on the disk."""
    server.pause()
    if server.written() > server.kept():
        return True
    server.resume()
    return False


async def test_a_strict_server_whose_disk_is_full_ends_and_comes_back_with_everything(deploy: Deploy) -> None:
    server, strict = Fragile("always"), {"durability": "strict"}
    deployment = await deploy(edges=1, server=server, worker=strict, edge=strict)
    expected = await undisturbed(deployment, [LONG])
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcript = scene.ask(LONG)
        await scene.until(transcript, lambda events: len(tokens_of(events)) >= 100)
        server.fill_disk()
        await deployment.until(lambda: not server.is_running)
        server.empty_disk()
        await asyncio.to_thread(server.start)
        await scene.finish()
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []
