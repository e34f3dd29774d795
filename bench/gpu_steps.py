"""Whole steps of the runner over models of random weights. Used by `bench.gpu`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from common.events import SamplingParams
from engine_worker.config import ComputeSettings, ModelSettings, SchedulerSettings
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.runner.cuda_graphs import Capture, cuda_capture
from engine_worker.runner.kv_tensors import KvCachePlan
from engine_worker.runner.loading import LoadedModel, load_engine_model
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.sampling.sampler import Sampler
from engine_worker.sequence import Sequence
from engine_worker.step import ScheduledSequence, StepPlan

BLOCK_SIZE: Final = 32
_STEPS: Final = 256  # tokens that each sequence may draw


def random_model(config: Mapping[str, Any], directory: Path, **compute: Any) -> LoadedModel:
    """A Llama with tied embeddings of ``config``'s shape, written to ``directory`` and loaded as a worker does it."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) * 0.02).bfloat16().cpu()

    norm = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], hidden), "model.norm.weight": norm}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        tensors |= {
            f"{prefix}input_layernorm.weight": norm.clone(),
            f"{prefix}post_attention_layernorm.weight": norm.clone(),
            f"{prefix}self_attn.q_proj.weight": random(hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": random(kv, hidden),
            f"{prefix}self_attn.v_proj.weight": random(kv, hidden),
            f"{prefix}self_attn.o_proj.weight": random(hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": random(inner, hidden),
            f"{prefix}mlp.up_proj.weight": random(inner, hidden),
            f"{prefix}mlp.down_proj.weight": random(hidden, inner),
        }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return load_engine_model(ModelSettings(model=str(directory)), ComputeSettings(**compute))


class Steps:
    """``batch`` sequences of ``context`` tokens, stepped without a scheduler, greedily."""

    def __init__(
        self, model: LoadedModel, batch: int, context: int, *, graphs: bool, capture: Capture | None = None
    ) -> None:
        """``capture``: how steps are recorded with ``graphs``, if not as on a GPU."""
        length = context + _STEPS
        num_blocks = batch * -(-length // BLOCK_SIZE)
        scheduler = SchedulerSettings(max_num_seqs=batch, max_num_batched_tokens=max(batch, context))
        self._kv_cache = KvCacheManager(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=batch,
            max_model_len=length,
            enable_prefix_caching=False,
        )
        plan = KvCachePlan(num_blocks, BLOCK_SIZE, 0, num_blocks * BLOCK_SIZE, length)
        tables, sampler = self._kv_cache.block_tables, Sampler(model.vocab_size)
        chosen = (capture or cuda_capture(model)) if graphs else None
        self._runner = ModelRunner(model, plan, scheduler, tables, sampler, capture=chosen)
        self._sequences = [self._sequence(number, context, length) for number in range(batch)]
        for sequence in self._sequences:
            assert self._kv_cache.admit(sequence)

    def decode(self) -> None:
        """One more token for each sequence; at most 256 times."""
        self._execute([ScheduledSequence(s, s.num_tokens - 1, 1, samples=True) for s in self._sequences])
        assert all(map(self._kv_cache.grow, self._sequences))

    def prefill(self) -> None:
        """All tokens of the first sequence, again and again."""
        sequence = self._sequences[0]
        self._execute([ScheduledSequence(sequence, 0, sequence.num_prompt_tokens, samples=True)], appends=False)

    def tokens(self) -> list[tuple[int, ...]]:
        """What each sequence has drawn."""
        return [sequence.output_token_ids() for sequence in self._sequences]

    def _execute(self, scheduled: list[ScheduledSequence], *, appends: bool = True) -> None:
        output = self._runner.execute(StepPlan(1, tuple(scheduled), sum(item.num_tokens for item in scheduled)))
        assert not output.failed, output.failed[0][1]
        if appends:
            for token in output.sampled:
                token.sequence.append(token.token_id)

    @staticmethod
    def _sequence(number: int, context: int, length: int) -> Sequence:
        return Sequence(
            seq_id=number,
            request_id=str(number),
            choice=0,
            prompt_token_ids=tuple((31 * number + i) % 1000 for i in range(context)),
            sampling=SamplingParams(max_tokens=_STEPS, temperature=0.0),
            max_model_len=length,
        )
