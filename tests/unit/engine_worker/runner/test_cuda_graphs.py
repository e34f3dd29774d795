"""Padding, buckets and fixed buffers of recorded decode steps, on the CPU: what is recorded there is run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.events import SamplingParams
from engine_worker.kernels.ops import AttentionMetadata, KvCache, Ops
from engine_worker.models.config import parse_config
from engine_worker.models.registry import Decoder, build_decoder
from engine_worker.runner.cuda_graphs import Capture, DecodeGraphs, no_graph
from engine_worker.runner.inputs import StepInputs
from engine_worker.sequence import Sequence
from engine_worker.step import ScheduledSequence, StepPlan
from engine_worker.weights.checkpoint import FormattedWeights
from engine_worker.weights.model_files import open_model
from tests.unit.engine_worker.kernels.native import native_ops, needs_native
from tests.unit.engine_worker.models.tiny_models import BLOCK_SIZE, VOCAB_SIZE, make_model

MAX_SEQUENCES, BLOCKS_EACH = 9, 3
NUM_BLOCKS = MAX_SEQUENCES * BLOCKS_EACH
CPU = torch.device("cpu")


class Counting:
    """A decoder that knows how often it was asked."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.asked: list[tuple[int, int]] = []  # (rows, max_seq_len)

    def hidden(self, token_ids: Tensor, cache: KvCache, meta: AttentionMetadata) -> Tensor:
        self.asked.append((len(token_ids), meta.max_seq_len))
        return self._decoder.hidden(token_ids, cache, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


class World:
    """A small model, its cache and its inputs, with recorded steps or without."""

    def __init__(self, directory: Path, ops: Ops, capture: Capture | None) -> None:
        files = open_model(str(directory))
        config = parse_config(files.config)
        weights = FormattedWeights(files.checkpoint, "none")
        self.decoder = Counting(build_decoder(config, ops, weights, 256, CPU))
        self.cache = ops.allocate_kv(
            config.num_layers, NUM_BLOCKS + 1, BLOCK_SIZE, config.num_kv_heads, config.head_size
        )
        self.tables = np.random.default_rng(1).permutation(NUM_BLOCKS).astype(np.int32).reshape(MAX_SEQUENCES, -1)
        self.inputs = StepInputs(
            max_tokens=256,
            max_sequences=MAX_SEQUENCES,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            block_tables=self.tables,
            device=CPU,
            padding_block=None if capture is None else NUM_BLOCKS,
        )
        self.graphs = None if capture is None else DecodeGraphs(self.decoder, self.cache, MAX_SEQUENCES, capture)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Tensor:
        rows = self.graphs.num_rows(plan) if self.graphs else None
        inputs = self.inputs.build(plan, rows)
        if self.graphs is not None and rows is not None:
            return self.graphs.run(inputs.token_ids, inputs.meta)[1][: plan.num_tokens].clone()
        return self.decoder.logits(self.decoder.hidden(inputs.token_ids, self.cache, inputs.meta))


def sequences() -> list[Sequence]:
    """Of different lengths, one a row of the tables, none with room for more than its blocks."""
    random = np.random.default_rng(7)
    made = []
    for row in range(MAX_SEQUENCES):
        length = int(random.integers(20, BLOCKS_EACH * BLOCK_SIZE - 12))
        made.append(
            Sequence(
                seq_id=row,
                request_id=str(row),
                choice=0,
                prompt_token_ids=tuple(random.integers(0, VOCAB_SIZE, length).tolist()),
                sampling=SamplingParams(max_tokens=50),
                max_model_len=BLOCKS_EACH * BLOCK_SIZE,
            )
        )
        made[-1].block_table_row = row
    return made


def plan(*items: tuple[Sequence, int, int]) -> StepPlan:
    scheduled = tuple(ScheduledSequence(s, start, count, start + count == s.num_tokens) for s, start, count in items)
    return StepPlan(1, scheduled, sum(count for _, _, count in items))


def prompts(known: list[Sequence]) -> StepPlan:
    """Few at a time fit: here all of them without the last token."""
    return plan(*((s, 0, s.num_tokens - 1) for s in known))


def decode(known: list[Sequence]) -> StepPlan:
    return plan(*((s, s.num_tokens - 1, 1) for s in known))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    make_model("smollm2", path)
    return path


def fill(world: World, known: list[Sequence]) -> None:
    for sequence in known:
        world.step(prompts([sequence]))


@needs_native
def test_a_padded_bucket_equals_the_plain_batch_bit_for_bit(directory: Path) -> None:
    known = sequences()
    plain = World(directory, native_ops("bf16"), None)
    recorded = World(directory, native_ops("bf16"), no_graph)
    fill(plain, known)
    fill(recorded, known)
    random = np.random.default_rng(3)
    for _ in range(10):
        batch = [known[i] for i in random.permutation(MAX_SEQUENCES)[: random.integers(1, MAX_SEQUENCES + 1)]]
        want = plain.step(decode(batch))
        assert torch.equal(recorded.step(decode(batch)), want)
        for sequence, row in zip(batch, want, strict=True):
            sequence.append(int(row.argmax()))
    assert recorded.graphs is not None
    assert {rows for rows, _ in recorded.graphs.buckets} <= {1, 2, 4, 8, 16}


@needs_native
def test_padding_touches_no_block_of_a_sequence(directory: Path) -> None:
    known = sequences()
    world = World(directory, native_ops("bf16"), no_graph)
    fill(world, known)
    before = world.step(decode(known[:1]))
    for count in (3, 5, 7):
        world.step(decode(known[2 : 2 + count]))
    assert torch.equal(world.step(decode(known[:1])), before)


@needs_native
def test_a_bucket_is_recorded_once_and_replayed_on_the_same_buffers(directory: Path) -> None:
    known = sequences()
    computations: list[Callable[[], None]] = []

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        computations.append(compute)
        return compute

    world = World(directory, native_ops("bf16"), capture)
    fill(world, known)
    world.decoder.asked.clear()
    for count in (5, 6, 7, 8, 5, 3):
        world.step(decode(known[:count]))
    assert world.graphs is not None
    assert world.graphs.buckets == ((8, 512), (4, 512))
    assert len(computations) == 2
    assert world.decoder.asked == [(8, 512)] * 5 + [(4, 512)]


@needs_native
def test_mixed_and_too_large_batches_are_not_for_a_graph(directory: Path) -> None:
    known = sequences()
    world = World(directory, native_ops("bf16"), no_graph)
    graphs = DecodeGraphs(world.decoder, world.cache, 4, no_graph)
    assert graphs.num_rows(plan((known[0], 0, 2), (known[1], 5, 1))) is None
    assert graphs.num_rows(decode(known[:3])) == 4
    assert graphs.num_rows(decode(known[:5])) is None


@needs_native
def test_what_cannot_be_recorded_is_computed_plainly_from_then_on(directory: Path) -> None:
    known = sequences()

    def refuse(compute: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    plain, world = World(directory, native_ops("bf16"), None), World(directory, native_ops("bf16"), refuse)
    fill(plain, known[:3])
    fill(world, known[:3])
    assert world.graphs is not None
    for _ in range(2):
        assert torch.equal(world.step(decode(known[:3])), plain.step(decode(known[:3])))
    assert world.graphs.num_rows(decode(known[:3])) is None
    assert world.graphs.buckets == ()


@needs_native
def test_blocks_that_change_hands_reach_the_device(directory: Path) -> None:
    known = sequences()
    plain, world = World(directory, native_ops("bf16"), None), World(directory, native_ops("bf16"), no_graph)
    random = np.random.default_rng(9)
    for _ in range(3):
        order = random.permutation(NUM_BLOCKS).astype(np.int32).reshape(MAX_SEQUENCES, -1)
        for each in (plain, world):
            each.tables[:] = order
            fill(each, known)
        assert torch.equal(world.step(decode(known)), plain.step(decode(known)))
