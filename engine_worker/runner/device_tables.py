"""The block tables on the model's device: only entries that have changed travel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine_worker.runner.step_buffer import Int32s


class DeviceTables:
    """A copy of the KV cache manager's tables, with one row more: all of it is the block for rows that pad a batch."""

    def __init__(self, tables: Int32s, device: torch.device, padding_block: int) -> None:
        """``tables``: int32 [max_num_seqs, max_blocks_per_seq], the manager's own array."""
        self._tables = tables
        self.padding_row = len(tables)
        self._known = np.full((len(tables) + 1, tables.shape[1]), padding_block, dtype=np.int32)  # what the device has
        self.tensor = torch.from_numpy(self._known.copy()).to(device)  # int32 [max_num_seqs + 1, max_blocks_per_seq]

    def changes(self, rows: Int32s, num_columns: int) -> tuple[Int32s, Int32s]:
        """(places in the flat table, values) of what differs in the first columns of some rows, now taken as sent."""
        current = self._tables[rows, :num_columns]
        which, column = np.nonzero(current != self._known[rows, :num_columns])
        values = current[which, column]
        self._known[rows[which], column] = values
        places = rows[which] * np.int32(self._tables.shape[1]) + column.astype(np.int32)
        return places, values

    def apply(self, places: Tensor, values: Tensor) -> None:
        """Bring what `changes` gave, int32 [K] each and on the device by now, into the table."""
        if len(places):
            self.tensor.view(-1).index_copy_(0, places.long(), values)
