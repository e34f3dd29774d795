"""The scheduler's view of the KV cache: which sequence holds which blocks. Integers only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_worker.sequence import Sequence


class KvCacheManager:
    """Block tables, prefix cache and block pool of one worker. Owned by the engine thread (`prepare` excepted).

    ``block_tables``: int32 [max_num_seqs, max_blocks_per_seq]; row ``sequence.block_table_row`` holds the physical
    block ids of a sequence that has blocks, entries beyond ``sequence.num_blocks`` are meaningless. The array is
    allocated once and only ever changed in place: runners keep a view of it.
    """

    block_tables: npt.NDArray[np.int32]

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None: ...

    def prepare(self, sequence: Sequence) -> None:
        """Hash the full blocks of a new sequence. Touches nothing but the sequence: call it on any thread, before add."""
        raise NotImplementedError
