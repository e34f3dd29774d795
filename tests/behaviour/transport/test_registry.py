"""Models, blobs and workers."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from common.errors import ConfigError, LogCorrupt, StreamExpired
from common.model_card import ModelCard
from tests.behaviour.transport.world import MODEL, World

TOKENIZER = b'{"version": "1.0"}' * 100
DIGEST = hashlib.sha256(TOKENIZER).hexdigest()


def card(**changes: Any) -> ModelCard:
    known: dict[str, Any] = {
        "name": MODEL,
        "served_names": (MODEL, "alias"),
        "weights_fingerprint": "f" * 64,
        "max_model_len": 128,
        "vocab_size": 300,
        "eos_token_ids": (2,),
        "tokenizer_blob": DIGEST,
    }
    return ModelCard(**{**known, **changes})


async def test_a_model_is_listed_with_the_workers_that_live(world: World) -> None:
    assert await world.registry.models() == []
    for name in ("w2", "w1"):
        await world.worker(name)
        await world.registry.register(name, card(), {DIGEST: TOKENIZER})
    (model,) = await world.registry.models()
    assert (model.card, model.live_workers) == (card(), ("w1", "w2"))
    assert await world.registry.blob(DIGEST) == TOKENIZER
    world.workers[0].die()
    (model,) = await world.registry.models()
    assert model.live_workers == ("w1",)
    await world.registry.unregister("w1")
    (model,) = await world.registry.models()
    assert (model.card, model.live_workers) == (card(), ())
    assert [(record.worker, record.is_live) for record in await world.registry.workers()] == [("w2", False)]


async def test_registering_again_is_harmless_and_renews_the_card(world: World) -> None:
    await world.worker("w1")
    await world.registry.register("w1", card(), {DIGEST: TOKENIZER})
    await world.registry.register("w1", card(max_model_len=64), {DIGEST: TOKENIZER})
    (model,) = await world.registry.models()
    assert (model.card.max_model_len, model.live_workers) == (64, ("w1",))


async def test_a_worker_with_other_weights_is_refused_while_others_live(world: World) -> None:
    worker = await world.worker("w1")
    await world.registry.register("w1", card(), {})
    with pytest.raises(ConfigError, match="other weights"):
        await world.registry.register("w2", card(weights_fingerprint="0" * 64), {})
    worker.die()
    await world.registry.register("w2", card(weights_fingerprint="0" * 64), {})


async def test_figures_are_reported_and_a_lost_record_comes_back(world: World) -> None:
    await world.worker("w1")
    await world.registry.register("w1", card(), {})
    key = world.client.keys.workers
    await world.raw("DEL", key, key=key)
    await world.registry.report("w1", {"running": 3})
    (record,) = await world.registry.workers()
    assert (record.worker, record.model, record.stats, record.is_live) == ("w1", MODEL, {"running": 3}, True)
    with pytest.raises(KeyError):
        await world.registry.report("w7", {})


async def test_workers_that_died_long_ago_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.registry.register("old", card(), {})
    monkeypatch.setattr("common.transport.registry._FORGET_WORKER_S", -1.0)
    await world.worker("w1")
    await world.registry.register("w1", card(), {})
    assert [record.worker for record in await world.registry.workers()] == ["w1"]


async def test_blobs_are_checked_on_both_sides(world: World) -> None:
    with pytest.raises(ValueError, match="other content"):
        await world.registry.register("w1", card(), {DIGEST: b"other"})
    with pytest.raises(StreamExpired):
        await world.registry.blob(DIGEST)
    key = world.client.keys.blob(DIGEST)
    await world.raw("SET", key, b"spoilt", key=key)
    with pytest.raises(LogCorrupt):
        await world.registry.blob(DIGEST)


async def test_queue_figures_follow_the_requests(world: World) -> None:
    for priority in (0, 0, -1, 1):
        await world.submit(world.request(priority=priority))
    stats = await world.registry.queue_stats(MODEL)
    assert (stats.depth, stats.running, stats.waiting, stats.tokens, stats.dead_letters) == (4, 0, 4, 52, 0)
    assert stats.depth_by_class == {"resume": 0, "high": 1, "underserved": 0, "normal": 2, "low": 1}
    worker = await world.worker("w1")
    owned = await worker.claim_one()
    stats = await world.registry.queue_stats(MODEL)
    assert (stats.depth, stats.running) == (4, 1)
    await worker.finish(owned)
    stats = await world.registry.queue_stats(MODEL)
    assert (stats.depth, stats.running, stats.tokens) == (3, 0, 39)
