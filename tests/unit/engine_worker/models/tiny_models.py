"""Small random models of every family, made with transformers, and our decoder stepped over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_worker.kernels.ops import AttentionMetadata, Ops
from engine_worker.models.config import parse_config
from engine_worker.models.registry import build_decoder
from engine_worker.weights.checkpoint import FormattedWeights
from engine_worker.weights.model_files import open_model

VOCAB_SIZE = 96
BLOCK_SIZE = 32

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# family or variant: (name of transformers' configuration, of its model, what differs from the shape above)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smollm2": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama_3": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "llama_biased": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 24},
    ),
}


def make_model(family: str, directory: Path, **save: Any) -> Any:
    """A random model of ``family``, saved to ``directory``; returns transformers' own, in fp32 with eager attention."""
    import transformers

    config_name, model_name, changes = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_SHAPE, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(17)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(0.0, 0.1 if is_norm or "bias" in name else parameter.shape[-1] ** -0.5)
            if is_norm and not family.startswith("gemma"):  # gemma adds the 1 itself
                parameter += 1.0
    model.save_pretrained(directory, **save)
    (directory / "tokenizer.json").write_text("{}")
    return model


def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """fp32 [tokens, V] of one whole sequence, by transformers."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return logits


class PagedModel:
    """Our decoder over a cache whose blocks are handed out in random order."""

    def __init__(self, directory: Path, ops: Ops, *, num_blocks: int = 40, max_len: int = 256) -> None:
        files = open_model(str(directory))
        self.config = parse_config(files.config)
        weights = FormattedWeights(files.checkpoint, "none")
        self.decoder = build_decoder(self.config, ops, weights, max_len, torch.device("cpu"))
        self._cache = ops.allocate_kv(
            self.config.num_layers, num_blocks, BLOCK_SIZE, self.config.num_kv_heads, self.config.head_size
        )
        blocks_each = -(-max_len // BLOCK_SIZE)
        order = np.random.default_rng(5).permutation(num_blocks).astype(np.int32)
        self._tables = torch.from_numpy(
            order[: num_blocks // blocks_each * blocks_each].reshape(-1, blocks_each).copy()
        )

    def step(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """``chunks``: (sequence, start, token ids) -> fp32 logits of all these tokens, one chunk after the other."""
        meta = self._metadata([(row, start, len(ids)) for row, start, ids in chunks])
        token_ids = torch.tensor([token for _, _, ids in chunks for token in ids], dtype=torch.int32)
        with torch.inference_mode():
            return self.decoder.logits(self.decoder.hidden(token_ids, self._cache, meta))

    def _metadata(self, chunks: Sequence[tuple[int, int, int]]) -> AttentionMetadata:
        rows = torch.tensor([row for row, _, _ in chunks], dtype=torch.int32)
        lengths = [length for _, _, length in chunks]
        positions = torch.cat([torch.arange(start, start + length) for _, start, length in chunks]).int()
        of_token = rows.repeat_interleave(torch.tensor(lengths)).long()
        slots = self._tables[of_token, (positions // BLOCK_SIZE).long()] * BLOCK_SIZE + positions % BLOCK_SIZE
        return AttentionMetadata(
            query_start=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
            seq_lens=torch.tensor([start + length for _, start, length in chunks], dtype=torch.int32),
            block_table_rows=rows,
            block_tables=self._tables,
            slot_mapping=slots.int().contiguous(),
            positions=positions,
            max_query_len=max(lengths),
            max_seq_len=max(start + length for _, start, length in chunks),
        )
