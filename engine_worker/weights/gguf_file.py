"""The container: a GGUF file's metadata and where its tensors lie. Read in one pass, tensor data is only mapped.

Written for start-up time: the whole header of a 49,000 token vocabulary takes some 50 ms.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from common.errors import CheckpointMismatch, ModelFileMissing, UnsupportedModel

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMS: Final = 4

# Value types of the metadata, by number.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9

# Tensor types, by number: name, values in a block, bytes of a block. The others are looked up in the gguf package.
_PLAIN_TYPES: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is outermost first ([rows, columns]), as torch has it."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    row_bytes: int  # of the innermost dimension
    start: int  # in the file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """An open GGUF file. The mapping lives as long as something that was read from it."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelFileMissing`, `CheckpointMismatch` (not GGUF, cut short) and `UnsupportedModel`."""
        self.path = path
        if not path.is_file():
            raise ModelFileMissing(f"there is no file {path}", param="model")
        try:
            with path.open("rb") as file:
                # Copy on write: torch wants writable memory behind its tensors. Nobody writes.
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:  # an empty file cannot be mapped
            raise CheckpointMismatch(f"{path.name} is not a GGUF file: {error}", param="model") from error
        mapping.madvise(mmap.MADV_WILLNEED)  # read ahead while the header is parsed
        self.metadata, self.tensors = _Reader(path.name, mapping).read()
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)

    def rows(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, mapped: uint8 [rows, row_bytes]."""
        return self._bytes[tensor.start : tensor.start + tensor.num_bytes].reshape(-1, tensor.row_bytes)


class _Reader:
    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self._name = name
        self._map = mapping
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        try:
            return self._read()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointMismatch(f"{self._name} is cut short or damaged: {error}", param="model") from error

    def _read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._map[:4] != MAGIC:
            raise CheckpointMismatch(f"{self._name} is not a GGUF file", param="model")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise UnsupportedModel(f"{self._name}: GGUF version {version} is not served, only 2 and 3", param="model")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        if int(metadata.get("split.count", 1)) > 1:
            raise UnsupportedModel(f"{self._name} is one part of a split model; merge the parts first", param="model")
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        data_start = -(-self._at // alignment) * alignment
        tensors = [self._tensor(data_start, *header) for header in headers]
        return metadata, {tensor.name: tensor for tensor in tensors}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._map[self._at : self._at + length]
        if len(raw) != length:
            raise struct.error(f"a text of {length} bytes ends beyond the file")
        self._at += length
        return raw.decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointMismatch(f"{self._name}: metadata of unknown type {kind}", param="model")
        item_kind, length = self._scalar("I"), self._scalar("Q")
        if item_kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[item_kind])
            raw = self._map[self._at : self._at + length * dtype.itemsize]
            if len(raw) != length * dtype.itemsize:
                raise struct.error(f"an array of {length} values ends beyond the file")
            self._at += len(raw)
            return np.frombuffer(raw, dtype=dtype).tolist()
        return [self._value(item_kind) for _ in range(length)]

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointMismatch(f"{self._name}: tensor {name} has {num_dims} dimensions", param="model")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _tensor(self, data_start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        type_name, block_values, block_bytes = _tensor_type(kind, name)
        if shape[-1] % block_values:
            raise CheckpointMismatch(f"{name}: rows of {shape[-1]} do not divide into blocks of {type_name}")
        tensor = GgufTensor(name, shape, type_name, shape[-1] // block_values * block_bytes, data_start + offset)
        if tensor.start + tensor.num_bytes > len(self._map):
            raise CheckpointMismatch(f"{self._name} is cut short: {name} ends beyond the file", param="model")
        return tensor


def _tensor_type(kind: int, tensor_name: str) -> tuple[str, int, int]:
    if kind in _PLAIN_TYPES:
        return _PLAIN_TYPES[kind]
    import gguf  # only now: most files need no more than the types above

    try:
        known = gguf.GGMLQuantizationType(kind)
        return (str(known.name), *gguf.GGML_QUANT_SIZES[known])
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{tensor_name}: tensor type {kind} is not served", param="model") from error
