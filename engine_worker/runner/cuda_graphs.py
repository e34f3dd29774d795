"""Decode steps recorded once and replayed: a launch from Python for each kernel costs more than the kernel computes.

A graph replays kernels on fixed addresses and sizes, so there is one for each bucket: a number of rows (powers of two,
batches are padded to the next) and a longest sequence (likewise), which bounds the chunks that attention splits its
keys into; chunks behind a sequence's end do nothing and change no bit. Inputs are sections of `StepInputs`' buffer,
which stand at the same place for equal sizes; results are copied into one pair of buffers that all buckets share.

The first step of a bucket is computed kernel by kernel, which compiles what has to be compiled, and then recorded.
Steps with several tokens for a sequence, or more rows than the largest bucket, are never recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, Protocol

import structlog
import torch
from torch import Tensor

from engine_worker.kernels.ops import AttentionMetadata, KvCache
from engine_worker.models.registry import Decoder
from engine_worker.runner.loading import LoadedModel
from engine_worker.step import StepPlan

log = structlog.get_logger(__name__)

_MOST_ROWS: Final = 256  # beyond, the kernels keep the GPU busy for longer than their launches take
_SHORTEST: Final = 512  # keys; one chunk of attention


class Capture(Protocol):
    """How a computation over fixed buffers is recorded."""

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What repeats ``compute``, which has run before. Raises RuntimeError if it cannot be recorded."""
        ...


def cuda_capture(model: LoadedModel) -> Capture | None:
    """For models whose every operation can be recorded: our own decoders on our own GPU operators."""
    is_recordable = model.device.type == "cuda" and model.backend == "triton" and model.model_impl == "native"
    return CudaGraphCapture() if is_recordable else None


def no_graph(compute: Callable[[], None]) -> Callable[[], None]:
    """A `Capture` for any device: nothing is recorded, the computation itself is run again."""
    return compute


class CudaGraphCapture:
    """A `Capture` whose graphs share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are recorded, and only its mistakes end the recording.
        pool = None if self._first is None else self._first.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            compute()
        self._first = self._first or graph
        replay: Callable[[], None] = graph.replay
        return replay


@dataclasses.dataclass(slots=True)
class _Results:
    """Where recorded steps leave their results, for the largest bucket."""

    hidden: Tensor  # fp32 [rows, D]
    logits: Tensor  # fp32 [rows, V]

    @classmethod
    def like(cls, rows: int, hidden: Tensor, logits: Tensor) -> _Results:
        return cls(hidden.new_empty(rows, hidden.shape[1]), logits.new_empty(rows, logits.shape[1]))


class DecodeGraphs:
    """The recorded steps of one decoder over one cache. Used by the engine thread alone."""

    def __init__(self, decoder: Decoder, cache: KvCache, max_sequences: int, capture: Capture) -> None:
        self._decoder = decoder
        self._cache = cache
        self._capture = capture
        self._most_rows = min(_power_of_two(max_sequences), _MOST_ROWS)
        self._results: _Results | None = None
        self._graphs: dict[tuple[int, int], tuple[int, Callable[[], None]]] = {}
        self._is_off = False

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """(rows, longest sequence) of all that is recorded."""
        return tuple(self._graphs)

    def num_rows(self, plan: StepPlan) -> int | None:
        """Rows to which ``plan``'s batch has to be padded for `run`; None: it is not one for a graph."""
        count = len(plan.scheduled)
        if self._is_off or plan.num_tokens != count or count > self._most_rows:
            return None
        return _power_of_two(count)

    def run(self, token_ids: Tensor, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Hidden states fp32 [rows, D] and logits fp32 [rows, V] of a padded batch, valid until the next run.

        The tensors must be those of `StepInputs.build` padded to `num_rows`.
        """
        bucket = len(token_ids), max(_SHORTEST, _power_of_two(meta.max_seq_len))
        recorded = self._graphs.get(bucket)
        if recorded is None:
            return self._record(bucket, token_ids, dataclasses.replace(meta, max_seq_len=bucket[1]))
        address, replay = recorded
        assert address == token_ids.data_ptr(), "inputs of a bucket have moved"
        assert self._results is not None
        replay()
        return self._results.hidden[: bucket[0]], self._results.logits[: bucket[0]]

    def _record(self, bucket: tuple[int, int], token_ids: Tensor, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Compute this step, then record it. Where that fails, nothing is recorded any more."""
        rows = bucket[0]
        hidden, logits = self._forward(token_ids, meta)
        results = self._results = self._results or _Results.like(self._most_rows, hidden, logits)

        def compute() -> None:
            again, scores = self._forward(token_ids, meta)
            results.hidden[:rows].copy_(again)
            results.logits[:rows].copy_(scores)

        try:
            self._graphs[bucket] = token_ids.data_ptr(), self._capture(compute)
        except RuntimeError as error:
            self._is_off = True
            log.warning("cuda_graphs_off", rows=rows, max_seq_len=bucket[1], reason=str(error))
        return hidden, logits

    def _forward(self, token_ids: Tensor, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        hidden = self._decoder.hidden(token_ids, self._cache, meta)
        return hidden, self._decoder.logits(hidden)


def _power_of_two(number: int) -> int:
    """The smallest that is not below ``number``."""
    return 1 << (number - 1).bit_length()
