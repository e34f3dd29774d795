"""Any other causal language model: transformers' own modelling code over our paged attention and our linears.

Order of loading: the configuration is checked; transformers builds the model and reads the weights; one pass over it
finds what each attention layer asks for (`hf_trace`); a short text is computed both ways and compared
(`hf_verification`); then linears and norms are replaced (`hf_modules`) and it is computed once more. What fails on the
way is refused with its reason. transformers is imported here, not before.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from common.errors import UnsupportedModel
from engine_worker.kernels.ops import AttentionMetadata, KvCache, Ops
from engine_worker.models.hf_attention import IMPLEMENTATION, PagedPass, attending, no_rotation, register
from engine_worker.models.hf_fusion import watching
from engine_worker.models.hf_modules import Quantization, fuse_linears, swap_linears, swap_norms
from engine_worker.models.hf_refusals import Refused, check_class, check_config, model_length, refusal
from engine_worker.models.hf_trace import TracedAttention, Tracing
from engine_worker.models.hf_verification import PROBE_BLOCK, probe_tokens, tolerance, verify

# What transformers and torch raise for models that are not as they expect them.
_MODEL_ERRORS: Final = (
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    ImportError,
    OSError,
    SafetensorError,
)
_LONGEST_REASON: Final = 300


@dataclass(frozen=True, slots=True)
class HfConfig:
    """What the engine has to know of a model that transformers computes; see `registry.ModelShape`."""

    architecture: str
    vocab_size: int  # columns of the logits
    num_layers: int
    num_kv_heads: int
    head_size: int  # of the cache: keys and values may be smaller


@dataclass(frozen=True, slots=True)
class HfModel:
    """A model of transformers, weights read, its attention known and found to be one that ours computes."""

    lm: Any  # transformers' model for causal language modelling
    config: HfConfig
    dtype: torch.dtype
    attention: TracedAttention
    max_model_len: int


class HfDecoder:
    """`Decoder` over a model of transformers. Its hidden states are those after the final norm."""

    def __init__(self, model: HfModel, ops: Ops, device: torch.device) -> None:
        self.config = model.config
        self._ops = ops
        self._layers = model.attention.layers
        self._no_rotation = no_rotation(model.max_model_len, device)
        self._lm = model.lm
        self._backbone: nn.Module = model.lm.base_model
        self._dtype = model.dtype
        # What the model does after its backbone (head, scaling, soft caps) stays its own: the backbone's place is
        # taken by what hands over hidden states.
        self._given = _Given()
        setattr(self._lm, self._lm.base_model_prefix, self._given)

    def hidden(self, token_ids: Tensor, cache: KvCache, meta: AttentionMetadata) -> Tensor:
        """int [T] -> fp32 [T, D]; writes K and V of all T tokens."""
        with attending(PagedPass(self._ops, self._layers, self._no_rotation, cache, meta)):
            return backbone_hidden(self._backbone, token_ids, meta.positions).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, D], rows of `hidden` -> fp32 [R, V]."""
        self._given.hidden = hidden.to(self._dtype)[None]
        row = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        logits: Tensor = self._lm(input_ids=row, use_cache=False).logits[0].float()
        return logits.contiguous()


class _Given(nn.Module):
    """Answers in a backbone's place with hidden states that are there already."""

    hidden: Tensor

    @property
    def decoder(self) -> _Given:
        """Some heads (OPT's) ask the decoder within their backbone."""
        return self

    def forward(self, *_: object, **__: object) -> _Output:
        return _Output(self.hidden)


class _Output:
    """A backbone's result: hidden states, and None for whatever else a head may pass on."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        if index:
            raise IndexError(index)
        return self.last_hidden_state


def backbone_hidden(backbone: nn.Module, token_ids: Tensor, positions: Tensor) -> Tensor:
    """int [T], int [T] -> [T, D] in the model's dtype."""
    hidden: Tensor = backbone(
        input_ids=token_ids.long()[None], position_ids=positions.long()[None], use_cache=False
    ).last_hidden_state[0]
    return hidden


def load_model(directory: Path, dtype: torch.dtype, device: torch.device, asked_length: int) -> HfModel:
    """Read the model in ``directory``. ``asked_length``: of the longest sequence to serve, 0 = the model's own.

    Raises `UnsupportedModel` with the architecture and the reason.
    """
    register()
    config = _read_config(directory)
    try:
        check_config(config)
        max_model_len = model_length(config, asked_length)
        lm = _read_model(directory, config, dtype).to(device).eval().requires_grad_(False)
        attention = _trace(lm, max_model_len, device)
    except (Refused, *_MODEL_ERRORS) as error:
        raise refusal(config, _reason(error)) from error
    served = HfConfig(
        architecture=config.model_type,
        vocab_size=int(config.vocab_size),
        num_layers=len(attention.layers),
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
    )
    return HfModel(lm, served, dtype, attention, max_model_len)


def build_hf_decoder(model: HfModel, ops: Ops, device: torch.device, quantization: Quantization) -> HfDecoder:
    """Put our operators into ``model`` and check what comes out against transformers' eager attention.

    Raises `UnsupportedModel` when the two differ, and ValueError where ``ops`` cannot serve a shape.
    """
    config, backbone = model.lm.config, model.lm.base_model
    ops.kv_bytes_per_block(model.config.num_layers, PROBE_BLOCK, model.config.num_kv_heads, model.config.head_size)
    try:
        with torch.inference_mode():
            head = model.lm.get_output_embeddings()
            tokens = probe_tokens(model.config.vocab_size, device)
            with watching(backbone) as shared:
                expected = _own_hidden(model, "eager", tokens)
            again = _own_hidden(model, "sdpa", tokens) if getattr(model.lm, "_supports_sdpa", False) else None
            allowed = tolerance(model.dtype, expected, again)
            model.lm.set_attn_implementation(IMPLEMENTATION)
            decoder = HfDecoder(model, ops, device)
            verify(decoder, ops, tokens, expected, allowed)
            fuse_linears(shared, ops, quantization)
            for part in (model.lm, backbone):
                swap_norms(part, ops)
                swap_linears(part, ops, quantization, head)
            # Coarser weights differ by more than a mistake would: there it only has to compute.
            verify(decoder, ops, tokens, expected, allowed if quantization == "none" else math.inf)
    except (Refused, *_MODEL_ERRORS) as error:
        raise refusal(config, _reason(error)) from error
    return decoder


def _own_hidden(model: HfModel, implementation: str, tokens: Tensor) -> Tensor:
    """fp32 [T, D] of one text, by one of transformers' own attentions."""
    model.lm.set_attn_implementation(implementation)
    return backbone_hidden(model.lm.base_model, tokens, torch.arange(len(tokens), device=tokens.device)).float()


def transformers_version() -> str:
    """Of the library whose code computes the model."""
    import transformers

    return str(transformers.__version__)


def _read_config(directory: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (*_MODEL_ERRORS, StrictDataclassError) as error:  # the latter: a field of another kind than it should be
        raise UnsupportedModel(f"transformers cannot read config.json: {_in_a_line(error)}", param="model") from error


def _read_model(directory: Path, config: Any, dtype: torch.dtype) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Refused("transformers has no causal language model of this kind")
    check_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    logging.disable_progress_bar()
    lm, report = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would draw them at random
        raise Refused(f"its checkpoint lacks {len(missing)} tensors, such as {missing[0]}")
    if "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        raise Refused("it takes no positions, which a step of several sequences needs")
    return lm


def _trace(lm: Any, max_model_len: int, device: torch.device) -> TracedAttention:
    tracing = Tracing(max_model_len)
    tokens = probe_tokens(lm.config.vocab_size, device)
    with torch.inference_mode(), attending(tracing):
        backbone_hidden(lm.base_model, tokens, torch.arange(len(tokens), device=device))
    return tracing.traced(int(lm.config.num_hidden_layers))


def _reason(error: Exception) -> str:
    """As a refusal says it, or what transformers stumbled over."""
    if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
        return "it computes attention itself, not through transformers' attention interface"
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {_in_a_line(error)}"


def _in_a_line(error: Exception) -> str:
    """The first says what is wrong; one that ends with a colon is a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    count = next((n for n, line in enumerate(lines, start=1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count])[:_LONGEST_REASON]
