"""Small random models that are computed by transformers' code, and their answers through the whole engine."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from common.events import SamplingParams
from engine_worker.config import ComputeSettings, ModelSettings, SchedulerSettings
from engine_worker.engine import Engine
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.runner.kv_tensors import KvCachePlan
from engine_worker.runner.loading import LoadedModel, load_engine_model
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sampling.sampler import Sampler
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.sequence import Sequence

VOCAB_SIZE: Final = 96
MAX_MODEL_LEN: Final = 128
_BLOCK_SIZE: Final = 32

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # a random model with one matrix for both ends repeats its last token for ever
}
_ALTERNATING: Final = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA: Final = {
    **_EXPERTS,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}

# model_type: what differs from the shape above
SERVED: Final[dict[str, dict[str, Any]]] = {
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, **_ALTERNATING},
    "cohere": {},
    "cohere2": _ALTERNATING,
    "deepseek_v3": _MLA,
    "glm4": {"head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_MODEL_LEN},
    "gpt_neox": {},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "mixtral": {"num_local_experts": 4, "sliding_window": 24},
    "olmo2": {},
    "olmo3": _ALTERNATING,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 16},
    "stablelm": {},
    "starcoder2": {"sliding_window": 24},
}

# model_type: what differs, and what the refusal says
REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "bert": ({}, "mask is neither causal"),
    "bloom": ({}, "takes no positions"),
    "diffllama": ({}, "computed twice"),
    "falcon": ({"alibi": True}, "ALiBi"),
    "gpt_oss": ({"head_dim": 16, "num_local_experts": 4, "sliding_window": 20}, "attention sinks"),
    "llama4_text": ({"num_local_experts": 2, "intermediate_size_mlp": 96, "head_dim": 16}, "chunked_attention"),
    "mamba": ({}, "linear_attention"),
}


@dataclass(frozen=True)
class Answer:
    """A continuation and the log probability of each of its tokens."""

    tokens: list[int]
    logprobs: list[float]


def save_model(model_type: str, changes: dict[str, Any], directory: Path) -> Any:
    """A random causal language model in ``directory``; returns transformers' own, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **changes})
    torch.manual_seed(23)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer_json())
    return model


def tokenizer_json() -> str:
    """A byte-level tokenizer that knows a few letters: nothing is encoded here, but a file is asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(26)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text


def load(directory: Path, *, backend: str = "torch", dtype: str = "float32", **model: Any) -> LoadedModel:
    """As a worker does it."""
    settings = ModelSettings(model=str(directory), dtype=dtype, **model)
    return load_engine_model(settings, ComputeSettings(backend=backend, num_threads=1))


def prompts() -> list[list[int]]:
    """Of 60, 3, 41 and 60 tokens; the last shares its beginning with the first."""
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(4)).tolist()
    return [ids[:60], ids[60:63], ids[63:104], ids[:40] + ids[104:124]]


def engine_answers(model: LoadedModel, asked: Ordered[Ordered[int]], num_tokens: int) -> list[Answer]:
    """Greedy continuations, all at once: prompts in chunks of 12 tokens beside the decodes of the others."""
    scheduler = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=16, max_prefill_tokens_beside_decodes=12)
    kv_cache = KvCacheManager(
        num_blocks=16,
        block_size=_BLOCK_SIZE,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=True,
    )
    plan = KvCachePlan(16, _BLOCK_SIZE, 0, 16 * _BLOCK_SIZE, MAX_MODEL_LEN)
    sampler = Sampler(model.vocab_size, GrammarCompiler(model.tokenizer_json, model.vocab_size, ()))
    runner = ModelRunner(model, plan, scheduler, kv_cache.block_tables, sampler)
    engine = Engine(Scheduler(scheduler, kv_cache, MAX_MODEL_LEN), kv_cache, runner)
    sequences = [_sequence(number, tokens, num_tokens) for number, tokens in enumerate(asked)]
    scores: list[list[float]] = [[] for _ in sequences]
    engine.add(sequences)
    while engine.has_work:
        result = engine.step(0.0)
        assert result.failed == ()
        engine.check_invariants()
        for token in result.sampled:
            assert token.logprobs is not None
            scores[token.sequence.seq_id].append(token.logprobs.logprob)
    return [Answer(list(s.output_token_ids()), scores[s.seq_id]) for s in sequences]


def reference_answers(model: Any, asked: Ordered[Ordered[int]], num_tokens: int) -> list[Answer]:
    """The same by transformers' generate, one after the other."""
    answers = []
    for prompt in asked:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = torch.cat(out.logits).float().log_softmax(-1)
        answers.append(Answer(tokens, [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]))
    return answers


def assert_same(ours: Ordered[Answer], theirs: Ordered[Answer]) -> None:
    """The same tokens, with the same probabilities: a random model may well say one thing for many reasons."""
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.logprobs, other.logprobs, atol=1e-3, rtol=0)


def _sequence(number: int, tokens: Ordered[int], num_tokens: int) -> Sequence:
    return Sequence(
        seq_id=number,
        request_id=f"r{number}",
        choice=0,
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=0),
        max_model_len=MAX_MODEL_LEN,
        arrival_s=float(number),
    )
