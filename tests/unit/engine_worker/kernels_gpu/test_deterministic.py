"""With ``deterministic`` a token's numbers on the Triton operators do not depend on who else is in the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from common.errors import ConfigError
from engine_worker.config import ComputeSettings, ModelSettings
from engine_worker.kernels.gpu.launch import IS_INTERPRETED
from engine_worker.kernels.gpu.matmul import matmul
from engine_worker.kernels.triton_ops import TritonOps
from engine_worker.runner.backend import choose_backend
from engine_worker.runner.loading import load_engine_model
from tests.unit.engine_worker.kernels.native import needs_native
from tests.unit.engine_worker.models.tiny_models import VOCAB_SIZE, PagedModel, make_model

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def rows_of_a_tile_are_computed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where every row of a tile goes through the same instructions.

    The interpreter gives a tile to numpy's BLAS, which sums rows at different places in it in different orders.
    """
    if not IS_INTERPRETED:
        return

    def dot(_: object, a: Any, b: Any, d: Any, *__: object) -> interpreter.TensorHandle:
        total = d.data.copy()
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(("features", "width"), [(70, 96), (64, 64), (10, 200)])
def test_a_product_is_right_and_each_row_the_same_among_any_others(
    dtype: torch.dtype, features: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(75, width, generator=generator).to(DEVICE, dtype)
    weight, bias = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in ((features, width), features))
    whole = matmul(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    error = (whole.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for rows in (slice(0, 1), slice(7, 9), slice(30, 47), slice(31, 75)):
        assert torch.equal(matmul(x[rows], weight, bias), whole[rows])
    assert torch.equal(matmul(x.flip(0), weight, bias).flip(0), whole)
    assert matmul(x[:0], weight, None).shape == (0, features)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_same_bits_whole_in_chunks_and_in_company(dtype: torch.dtype, tmp_path: Path) -> None:
    make_model("llama_3", tmp_path)
    ops = TritonOps(dtype, DEVICE, deterministic=True)
    tokens = torch.randint(0, VOCAB_SIZE, (41,), generator=torch.Generator().manual_seed(5)).tolist()
    other = tokens[::-1]
    alone = PagedModel(tmp_path, ops).step([(0, 0, tokens)])
    paged = PagedModel(tmp_path, ops)
    parts = [
        paged.step([(0, 0, tokens[:17]), (1, 0, other[:30])])[:17],
        paged.step([(1, 30, other[30:31]), (2, 0, other[:3]), (0, 17, tokens[17:39])])[4:],
        paged.step([(0, 39, tokens[39:40])]),
        paged.step([(2, 3, other[3:4]), (0, 40, tokens[40:]), (1, 31, other[31:32])])[1:2],
    ]
    assert torch.equal(torch.cat(parts), alone)


@needs_native
def test_the_setting_promises_only_what_holds(tmp_path: Path) -> None:
    make_model("llama_3", tmp_path)

    def loaded(**compute: object) -> bool:
        settings = ComputeSettings(num_threads=1, device="cpu", **compute)
        return load_engine_model(ModelSettings(model=str(tmp_path)), settings).is_batch_invariant

    assert loaded(backend="native")
    assert loaded(backend="native", deterministic=True)
    assert not loaded(backend="torch")
    with pytest.raises(ConfigError, match="deterministic: plain torch") as raised:
        loaded(backend="torch", deterministic=True)
    assert raised.value.param == "deterministic"
    with pytest.raises(ConfigError, match="deterministic: of a model that transformers computes"):
        load_engine_model(
            ModelSettings(model=str(tmp_path), model_impl="transformers"),
            ComputeSettings(num_threads=1, deterministic=True),
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_triton_it_has_to_be_asked_for(deterministic: bool) -> None:
    settings = ComputeSettings(backend="triton", device=str(DEVICE), deterministic=deterministic)
    assert choose_backend(settings, "float32", None).is_batch_invariant is deterministic
