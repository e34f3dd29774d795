"""The demo model in real worker processes: an answer, and the same answer although its worker is killed."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from common.events import Ended, EngineRequest, Grammar, SamplingParams, Started
from common.request_state import fold
from common.tokenization.chat_template import ChatTemplate
from common.tokenization.tokenizer import Tokenizer
from common.transport import new_request_id
from tests.demo_model import demo_model_dir
from tests.integration.worker.conftest import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.model]


class Client:
    """What an edge knows: the card and the blob in the log, nothing of the worker's disk."""

    def __init__(self, fleet: Fleet, tokenizer: Tokenizer, template: ChatTemplate, eos: tuple[int, ...]) -> None:
        self.fleet = fleet
        self._tokenizer = tokenizer
        self._template = template
        self._eos = eos

    @classmethod
    async def of(cls, fleet: Fleet) -> Client:
        (model,) = await fleet.registry.models()
        card = model.card
        tokenizer = Tokenizer.from_json(await fleet.registry.blob(card.tokenizer_blob), card.tokenizer_config)
        template = ChatTemplate(card.chat_template, tokenizer.special_tokens, tokenizer.control_tokens)
        return cls(fleet, tokenizer, template, card.eos_token_ids)

    async def ask(self, text: str, **sampling: object) -> EngineRequest:
        prompt = self._template.render([{"role": "user", "content": text}])
        params = SamplingParams(**{"max_tokens": 200, "eos_token_ids": self._eos, "seed": 11, **sampling})
        return await self.fleet.submit_as_is(
            EngineRequest(
                request_id=new_request_id(self.fleet.client.keys.partitions),
                model="demo",
                prompts=(tuple(self._tokenizer.encode_rendered(prompt)),),
                sampling=params,
                arrival_s=time.time(),
            )
        )


async def start(fleet: Fleet, name: str, kv_cache_dtype: str) -> None:
    fleet.module = "engine_worker"
    flags = ("--model", str(demo_model_dir()), "--served-model-name", "demo", "--metrics-port", "0")
    flags += ("--kv-cache-dtype", kv_cache_dtype)
    await fleet.start(
        name, flags=(*flags, "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)), lease_ttl_s=2
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
async def test_a_killed_worker_changes_nothing_of_a_sampled_answer(fleet: Fleet, kv_cache_dtype: str) -> None:
    await start(fleet, "w1", kv_cache_dtype)
    client = await Client.of(fleet)
    alone = await client.ask("Tell me a story about a fox.", stop=("zebra",), logprobs=1)
    expected = fold(await fleet.events(alone)).choice(0)
    chosen = await client.ask("Tea or coffee?", grammar=Grammar(kind="choice", source='["tea", "coffee"]'))
    assert fold(await fleet.events(chosen)).choice(0).text in ("tea", "coffee")

    again = await client.ask("Tell me a story about a fox.", stop=("zebra",), logprobs=1)
    await fleet.until_length(again, 8)
    fleet.signal("w1", signal.SIGKILL)
    await start(fleet, "w2", kv_cache_dtype)
    events = await fleet.events(again)
    state = fold(events)
    assert [item.event.worker for item in events if isinstance(item.event, Started)] == ["w1", "w2"]
    assert (state.choice(0).token_ids, state.choice(0).text) == (expected.token_ids, expected.text)
    assert isinstance(events[-1].event, Ended)

    fleet.signal("w2", signal.SIGTERM)
    assert await asyncio.wait_for(fleet.exit_code("w2"), 120) == 0
