"""A model that Headrace serves as a directory of bf16 safetensors, for peers that read nothing else.

    python -m bench.safetensors_copy SOURCE DEST

SOURCE is what `headrace serve` takes: a model directory, a .gguf file or "demo". Quantised weights are written as
what they stand for, so that a peer computes with the same rounded numbers as Headrace's bf16 does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine_worker.kernels.ops import DenseWeight
from engine_worker.weights.checkpoint import Checkpoint, convert
from engine_worker.weights.model_files import open_model


def copy(source: str, dest: Path) -> None:
    """Write the whole directory. Raises what `open_model` raises, and `CheckpointMismatch` for a missing tensor."""
    files = open_model(source)
    dest.mkdir(parents=True, exist_ok=True)
    _write_json(dest / "config.json", {**files.config, "torch_dtype": "bfloat16"})
    _write_json(dest / "generation_config.json", dict(files.generation_config))
    _write_json(dest / "tokenizer_config.json", dict(files.tokenizer_config))
    (dest / "tokenizer.json").write_bytes(files.tokenizer_json)
    (dest / "chat_template.jinja").write_text(files.chat_template, encoding="utf-8")
    names = _parameters(dest)
    tensors = {name: _tensor(files.checkpoint, name, num_dims) for name, num_dims in names.items()}
    save_file(tensors, dest / "model.safetensors", metadata={"format": "pt"})


def _parameters(directory: Path) -> dict[str, int]:
    """Names as transformers has them, each with its number of dimensions; what is tied to another is left out."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return {name: parameter.dim() for name, parameter in model.named_parameters()}


def _tensor(checkpoint: Checkpoint, name: str, num_dims: int) -> Tensor:
    if num_dims == 1:
        return checkpoint.vector(name).to(torch.bfloat16)
    dense = convert(checkpoint.weight(name), "none")
    assert isinstance(dense, DenseWeight)
    return dense.values.to(torch.bfloat16).contiguous()


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source")
    parser.add_argument("dest", type=Path)
    arguments = parser.parse_args()
    copy(arguments.source, arguments.dest)


if __name__ == "__main__":
    main()
