from __future__ import annotations

import numpy as np
import pytest

from engine_worker.sampling.rng import Stream, UniformTable, philox, uniforms


def _philox4x32_10(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Written from the paper with Python's integers; checked against the authors' known answers below."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_reference_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: list[int]
) -> None:
    assert _philox4x32_10(counter, key) == answer


def test_batched_philox_equals_the_reference() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 0x0123456789ABCDEF], dtype=np.uint64)
    positions = np.array([0, 77, 2**31, 5], dtype=np.uint64)
    choices = np.array([0, 3, 127, 1], dtype=np.uint64)
    c0, c1 = philox(seeds, positions, choices, Stream.RESIDUAL)
    for i, (seed, position, choice) in enumerate(
        zip(seeds.tolist(), positions.tolist(), choices.tolist(), strict=True)
    ):
        words = _philox4x32_10((position, choice, Stream.RESIDUAL, 0), (seed & 0xFFFFFFFF, seed >> 32))
        assert [int(c0[i]), int(c1[i])] == words[:2]


def test_uniforms_lie_inside_the_open_interval_and_are_flat() -> None:
    n = 200_000
    u = uniforms(np.full(n, 42, np.uint64), np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64))
    assert u.min() > 0
    assert u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi2 = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert chi2 < 99 + 5 * np.sqrt(2 * 99)


def test_seed_position_choice_and_stream_all_matter() -> None:
    def draw(seed: int = 1, position: int = 1, choice: int = 1, stream: int = 0) -> float:
        seeds, positions, choices = (np.array([x], dtype=np.uint64) for x in (seed, position, choice))
        return float(uniforms(seeds, positions, choices, stream)[0])

    draws = {draw(), draw(seed=2), draw(position=2), draw(choice=2), draw(stream=1), draw(seed=1 + 2**32)}
    assert len(draws) == 6


def test_table_gives_the_direct_draws_in_whatever_order_positions_come() -> None:
    table = UniformTable([5, 6], [0, 1], width=4)
    for positions in ([10, 3], [11, 4], [12, 5], [13, 6], [14, 7], [50, 7], [51, 8], [49, 8], [50, 2]):
        direct = uniforms(
            np.array([5, 6], np.uint64), np.array(positions, np.uint64), np.array([0, 1], np.uint64)
        ).tolist()
        assert table.take(positions).tolist() == direct
