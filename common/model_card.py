"""What a worker registers about its model; all that an edge knows of it."""

from __future__ import annotations

from typing import Any

import msgspec


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling defaults from the model's generation_config.json; None = not given there."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Registered in Redis by each worker of a model. Blobs are named by the SHA-256 of their content."""

    name: str  # the queue's name; first of the served names
    served_names: tuple[str, ...]
    weights_fingerprint: str  # SHA-256 over weights, quantisation and whatever changes logits
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # size of the logits row
    eos_token_ids: tuple[int, ...]
    tokenizer_blob: str  # content hash of tokenizer.json
    tokenizer_config: dict[str, Any] = msgspec.field(default_factory=dict)  # special tokens, add_bos_token, ...
    chat_template: str = ""  # empty = the model has none: chat requests are refused
    generation_defaults: GenerationDefaults = GenerationDefaults()
    root: str = ""  # where the weights came from, shown in /v1/models (a name, never a path of the machine)
    architecture: str = ""
    dtype: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    kv_cache_tokens: int = 0  # capacity of one worker
    max_num_seqs: int = 0
    block_size: int = 0
    capabilities: tuple[str, ...] = ()  # "grammar", "logprobs", "prompt_logprobs", ...
    created_s: float = 0.0
    v: int = 1
