"""GGUF as a checkpoint: tensors under the names that transformers gives them, quantised ones bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.errors import CheckpointMismatch, UnsupportedModel
from engine_worker.kernels.ops import DenseWeight, QuantizedWeight, Weight
from engine_worker.weights.checkpoint import StoredFormat
from engine_worker.weights.gguf_file import GgufFile, GgufTensor

_GROUP: Final = 32
_DENSE: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INT4_LIKE: Final = re.compile(r"Q[234]|IQ[1234]|TQ|MXFP4|NVFP4")

_TOP: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_WITH_POST_NORMS: Final = {
    **_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER_NAME: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufCheckpoint:
    """`Checkpoint` over one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Raises what `GgufFile` raises."""
        self.file = GgufFile(path)
        self.paths: tuple[Path, ...] = (path,)
        self._architecture = str(self.file.metadata.get("general.architecture", ""))
        self._layer_names = _LAYER_WITH_POST_NORMS if self._architecture in ("gemma2", "gemma3") else _LAYER

    def has(self, name: str) -> bool:
        return self._gguf_name(name) in self.file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def stored_format(self, name: str) -> StoredFormat:
        type_name = self._tensor(name).type_name
        if type_name in _DENSE:
            return "none"
        return "int4" if _INT4_LIKE.match(type_name) else "int8"

    def weight(self, name: str) -> Weight:
        """Q8_0, Q4_0 and Q4_1 keep their bits; the other quantised types are dequantised to fp32."""
        tensor = self._tensor(name)
        rows: npt.NDArray[np.uint8] = self.file.rows(tensor)
        order = self._row_order(name, tensor.shape[0])
        if order is not None:
            rows = rows[order] if len(tensor.shape) > 1 else rows.reshape(tensor.shape[0], -1)[order]
        return _decode(tensor, torch.from_numpy(rows))

    def vector(self, name: str) -> Tensor:
        weight = self.weight(name)
        if not isinstance(weight, DenseWeight):
            raise CheckpointMismatch(f"{name} is quantised, which nothing but a matrix can be")
        values = weight.values.float().flatten()
        # The converters of Gemma write 1 + weight into the file, transformers adds the 1 when it computes.
        is_norm = name.endswith("norm.weight")
        return values - 1.0 if is_norm and self._architecture.startswith("gemma") else values.clone()

    def _gguf_name(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        found = _LAYER_NAME.fullmatch(name)
        if found is None or found[2] not in self._layer_names:
            return name
        return f"blk.{found[1]}.{self._layer_names[found[2]]}.{found[3]}"

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self.file.tensors.get(self._gguf_name(name))
        if tensor is None:
            raise CheckpointMismatch(
                f"{self.file.path.name}: tensor {self._gguf_name(name)} ({name}) is missing", param="model"
            )
        return tensor

    def _row_order(self, name: str, num_rows: int) -> npt.NDArray[np.int64] | None:
        """llama.cpp interleaves the two rotated halves of each head of Q and K for its Llama; this puts them back."""
        if self._architecture != "llama" or not re.search(r"\.(q|k)_proj\.", name):
            return None
        key = "llama.attention.head_count" + ("_kv" if ".k_proj." in name else "")
        num_heads = self.file.metadata.get(key) or self.file.metadata.get("llama.attention.head_count")
        if not isinstance(num_heads, int) or num_rows % (2 * num_heads):
            raise CheckpointMismatch(f"{name}: {num_rows} rows cannot be split into {num_heads} heads", param="model")
        half = num_rows // num_heads // 2
        return np.arange(num_rows).reshape(num_heads, half, 2).swapaxes(1, 2).reshape(-1)


def _decode(tensor: GgufTensor, rows: Tensor) -> Weight:
    """rows: uint8, all bytes of the tensor."""
    name = tensor.type_name
    if name in _DENSE:
        return DenseWeight(rows.contiguous().view(_DENSE[name]).view(tensor.shape))
    if name in ("Q8_0", "Q4_0", "Q4_1"):
        return _decode_groups(name, rows.view(tensor.shape[0], tensor.shape[-1] // _GROUP, -1))
    return DenseWeight(_dequantize(tensor, rows))


def _decode_groups(name: str, blocks: Tensor) -> QuantizedWeight:
    """blocks: uint8 [N, K / 32, bytes]: fp16 scale, for Q4_1 fp16 minimum, then the values."""
    num_rows = blocks.shape[0]
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    if name == "Q8_0":
        return QuantizedWeight(blocks[..., 2:].reshape(num_rows, -1).view(torch.int8), scales, None)
    if name == "Q4_1":
        mins, packed = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(-1), blocks[..., 4:]
    else:
        mins, packed = scales * -8.0, blocks[..., 2:]
    # Byte j of a group holds value j in its low half and value j + 16 in its high half.
    values = torch.empty((*packed.shape[:2], 2, _GROUP // 2), dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=values[:, :, 0])
    torch.bitwise_right_shift(packed, 4, out=values[:, :, 1])
    return QuantizedWeight(values.view(num_rows, -1), scales, mins)


def _dequantize(tensor: GgufTensor, rows: Tensor) -> Tensor:
    import gguf

    kind = gguf.GGMLQuantizationType[tensor.type_name]
    try:
        values = gguf.dequantize(rows.numpy(), kind)
    except NotImplementedError as error:
        raise UnsupportedModel(f"{tensor.name}: tensor type {tensor.type_name} is not served", param="model") from error
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(tensor.shape)
