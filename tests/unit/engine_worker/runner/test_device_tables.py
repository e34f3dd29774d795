"""Only entries that changed travel to the device."""

from __future__ import annotations

import numpy as np
import torch

from engine_worker.runner.device_tables import DeviceTables


def _send(mirror: DeviceTables, rows: list[int], columns: int) -> int:
    places, values = mirror.changes(np.array(rows, dtype=np.int32), columns)
    mirror.apply(torch.from_numpy(places), torch.from_numpy(values))
    return len(places)


def test_the_device_follows_the_tables_entry_by_entry() -> None:
    tables = np.zeros((3, 4), dtype=np.int32)
    mirror = DeviceTables(tables, torch.device("cpu"), padding_block=9)
    tables[1, :2] = (5, 6)
    assert _send(mirror, [1], 2) == 2
    assert mirror.tensor[1, :2].tolist() == [5, 6]
    assert _send(mirror, [1], 2) == 0
    tables[1, 2] = 7
    tables[0] = (1, 2, 3, 4)
    assert _send(mirror, [0, 1], 3) == 4
    assert mirror.tensor[0, :3].tolist() == [1, 2, 3]
    assert mirror.tensor[1, :3].tolist() == [5, 6, 7]


def test_the_row_for_padding_is_all_of_one_block() -> None:
    mirror = DeviceTables(np.zeros((3, 4), dtype=np.int32), torch.device("cpu"), padding_block=9)
    assert mirror.tensor[mirror.padding_row].tolist() == [9] * 4
