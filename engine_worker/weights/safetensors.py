"""A Hugging Face directory as a checkpoint: one .safetensors file, or shards with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from common.errors import CheckpointMismatch, ModelFileMissing, UnsupportedModel
from engine_worker.kernels.ops import DenseWeight, Weight
from engine_worker.weights.checkpoint import StoredFormat

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsCheckpoint:
    """`Checkpoint` over the .safetensors files of one directory. Files are mapped, tensors read when asked for."""

    def __init__(self, directory: Path) -> None:
        """Raises `ModelFileMissing` (naming the shard) and `CheckpointMismatch` (damaged file or index)."""
        import safetensors

        self._directory = directory
        self.paths = weight_paths(directory)
        self._files: dict[str, Any] = {}  # by tensor name
        for path in self.paths:
            try:
                file: Any = safetensors.safe_open(path, framework="pt", device="cpu")
            except safetensors.SafetensorError as error:
                raise CheckpointMismatch(f"{path.name} is damaged: {error}", param="model") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def stored_format(self, name: str) -> StoredFormat:
        return "none"

    def weight(self, name: str) -> Weight:
        return DenseWeight(self._tensor(name))

    def vector(self, name: str) -> Tensor:
        return self._tensor(name).float().clone()

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise CheckpointMismatch(f"{self._directory.name}: tensor {name} is missing", param="model")
        return self._files[name]

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModel(f"{name}: dtype {tensor.dtype} is not served; served: fp32, bf16, fp16")
        return tensor


def has_safetensors(directory: Path) -> bool:
    """Whether the directory holds weights of this kind."""
    return (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file()


def weight_paths(directory: Path) -> tuple[Path, ...]:
    """The weight files, all present. Raises `ModelFileMissing` and `CheckpointMismatch`."""
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ModelFileMissing(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}", param="model")
        return (directory / SINGLE_FILE,)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(f"{INDEX_FILE} is malformed: {error!r}", param="model") from error
    # Only file names: an index must not lead out of its directory.
    paths = tuple(directory / Path(name).name for name in names)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelFileMissing(f"{directory} lacks {', '.join(missing)}, which its index names", param="model")
    return paths
