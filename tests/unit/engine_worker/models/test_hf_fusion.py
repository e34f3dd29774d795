"""Linear modules that read the same tensor become one product; nothing else does."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from engine_worker.kernels.ops_torch import TorchOps
from engine_worker.models.hf_fusion import FusedPart, watching
from engine_worker.models.hf_modules import fuse_linears

OPS = TorchOps(torch.float32)


class Block(nn.Module):
    """q and k read x, v something else; gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 40), nn.Linear(32, 24, bias=False), nn.Linear(32, 8)
        self.gate, self.twice = nn.Linear(32, 4), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.q(x), self.v(x + 1), self.k(x), self.gate(x), self.twice(x) + self.twice(2 * x)]
        return torch.cat(outputs, dim=-1)


def fused(block: Block, x: Tensor) -> int:
    with torch.inference_mode():
        with watching(block) as shared:
            block(x)
        return fuse_linears(shared, OPS, "none")


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 3)])
def test_only_modules_that_read_one_tensor_are_fused_and_nothing_changes(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    block, x = Block(), torch.randn(*shape, 32)
    with torch.inference_mode():
        expected, other = block(x), block(-x)
        assert fused(block, x) == 1
        assert [name for name, child in block.named_children() if isinstance(child, FusedPart)] == ["q", "k"]
        torch.testing.assert_close(block(x), expected)
        torch.testing.assert_close(block(-x), other)


def test_a_part_called_with_another_tensor_is_computed_for_it() -> None:
    torch.manual_seed(2)
    block, x, y = Block(), torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    with torch.inference_mode():
        q, k = (cast("nn.Module", getattr(block, name)) for name in "qk")
        expected = q(x), k(y), q(y), q(x), k(x)
        assert fused(block, x) == 1
        parts = [block.q(x), block.k(y), block.q(y), block.q(x), block.k(x)]
    for found, wanted in zip(parts, expected, strict=True):
        torch.testing.assert_close(found, wanted)
