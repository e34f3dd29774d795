from __future__ import annotations

import itertools

import pytest

from common.events import SamplingParams
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.sequence import Sequence

_ids = itertools.count()


def manager(num_blocks: int = 8, *, prefix_caching: bool = True) -> KvCacheManager:
    return KvCacheManager(
        num_blocks=num_blocks, block_size=4, max_num_seqs=3, max_model_len=32, enable_prefix_caching=prefix_caching
    )


def sequence(num_prompt: int, *, base: int = 0, scores: bool = False) -> Sequence:
    return Sequence(
        seq_id=next(_ids),
        request_id="r",
        choice=0,
        prompt_token_ids=tuple(range(base, base + num_prompt)),
        sampling=SamplingParams(max_tokens=16, prompt_logprobs=0 if scores else None),
        max_model_len=32,
    )


def admitted(kv_cache: KvCacheManager, item: Sequence) -> Sequence:
    assert kv_cache.admit(item)
    return item


def compute(kv_cache: KvCacheManager, item: Sequence) -> None:
    """As if the runner had computed every known token."""
    item.num_computed_tokens = item.num_tokens
    kv_cache.commit(item)
    kv_cache.check_integrity()


def blocks_of(kv_cache: KvCacheManager, item: Sequence) -> list[int]:
    row: list[int] = kv_cache.block_tables[item.block_table_row, : item.num_blocks].tolist()
    return row


@pytest.mark.parametrize(("num_prompt", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_an_equal_prompt_leaves_at_least_one_token_to_compute(num_prompt: int, cached: int) -> None:
    kv_cache = manager()
    first, second = sequence(num_prompt), sequence(num_prompt)
    assert kv_cache.admit(first)
    compute(kv_cache, first)
    assert kv_cache.num_cached_tokens(second) == cached
    assert kv_cache.admit(second)
    assert second.num_computed_tokens == cached
    shared = cached // 4
    assert blocks_of(kv_cache, second)[:shared] == blocks_of(kv_cache, first)[:shared]
    assert not set(blocks_of(kv_cache, second)[shared:]) & set(blocks_of(kv_cache, first))
    kv_cache.check_integrity()


def test_blocks_outlive_their_sequence_until_they_are_needed() -> None:
    kv_cache = manager(num_blocks=4)
    first = sequence(9)
    assert kv_cache.admit(first)
    compute(kv_cache, first)
    kv_cache.free(first)
    usage = kv_cache.usage()
    assert (usage.used, usage.cached) == (0, 2)
    again = sequence(9)
    assert kv_cache.admit(again)
    assert again.num_computed_tokens == 8
    kv_cache.free(again)
    other = admitted(kv_cache, sequence(16, base=100))  # takes all four blocks
    kv_cache.check_integrity()
    kv_cache.free(other)
    assert kv_cache.num_cached_tokens(sequence(9)) == 0


def test_the_beginning_of_a_prefix_is_evicted_last() -> None:
    kv_cache = manager(num_blocks=4)
    first = admitted(kv_cache, sequence(13))
    compute(kv_cache, first)
    kv_cache.free(first)
    other = admitted(kv_cache, sequence(8, base=100))
    kv_cache.free(other)
    assert kv_cache.num_cached_tokens(sequence(13)) == 8


def test_admission_that_does_not_fit_changes_nothing() -> None:
    kv_cache = manager(num_blocks=4)
    first = admitted(kv_cache, sequence(9))
    compute(kv_cache, first)
    too_big = sequence(17)  # shares two blocks, but needs three more
    assert not kv_cache.admit(too_big)
    assert (too_big.block_table_row, too_big.num_blocks, too_big.num_computed_tokens) == (None, 0, 0)
    assert not kv_cache.admit(sequence(4, base=50), reserve=1)
    assert kv_cache.admit(sequence(4, base=50))
    kv_cache.check_integrity()


def test_a_cached_free_prefix_counts_as_taken_when_admission_is_weighed() -> None:
    kv_cache = manager(num_blocks=3)
    first = admitted(kv_cache, sequence(9))
    compute(kv_cache, first)
    kv_cache.free(first)
    assert not kv_cache.admit(sequence(13))
    assert kv_cache.admit(sequence(12))
    kv_cache.check_integrity()


def test_rows_are_recycled_and_bounded() -> None:
    kv_cache = manager()
    held = [sequence(1, base=i) for i in range(3)]
    assert all(kv_cache.admit(item) for item in held)
    assert {item.block_table_row for item in held} == {0, 1, 2}
    assert not kv_cache.admit(sequence(1))
    kv_cache.free(held[1])
    kv_cache.free(held[1])  # no-op
    late = admitted(kv_cache, sequence(1))
    assert late.block_table_row == 1
    kv_cache.check_integrity()


def test_growing_takes_a_block_only_at_its_boundary() -> None:
    kv_cache = manager(num_blocks=2)
    item = admitted(kv_cache, sequence(3))
    held = []
    for token in range(6):
        item.append(token)
        assert kv_cache.grow(item) is (item.num_tokens <= 8)
        held.append(item.num_blocks)
    assert held == [1, 2, 2, 2, 2, 2]


def test_blocks_of_generated_tokens_are_found_too() -> None:
    kv_cache = manager()
    item = admitted(kv_cache, sequence(3))
    for token in (3, 4, 5, 6, 7, 8):
        item.append(token)
        assert kv_cache.grow(item)
        compute(kv_cache, item)
    assert kv_cache.num_cached_tokens(sequence(9)) == 8


def test_two_that_compute_the_same_content_keep_their_own_blocks() -> None:
    kv_cache = manager()
    first, second = sequence(9), sequence(9)
    assert kv_cache.admit(first)
    assert kv_cache.admit(second)
    compute(kv_cache, first)
    compute(kv_cache, second)
    kv_cache.free(second)
    assert kv_cache.usage().cached == 0
    kv_cache.free(first)
    assert kv_cache.usage().cached == 2
    kv_cache.check_integrity()


def test_a_sequence_that_scores_its_prompt_reads_only_what_it_has_scored() -> None:
    kv_cache = manager()
    warm = admitted(kv_cache, sequence(13))
    compute(kv_cache, warm)
    scorer = sequence(13, scores=True)
    cached = []
    for scored in (1, 4, 5, 8, 9, 12, 13):
        scorer.num_scored_tokens = scored
        cached.append(kv_cache.num_cached_tokens(scorer))
    assert cached == [0, 0, 4, 4, 8, 8, 12]


def test_without_prefix_cache_nothing_is_found_or_hashed() -> None:
    kv_cache = manager(prefix_caching=False)
    first = admitted(kv_cache, sequence(9))
    compute(kv_cache, first)
    assert first.block_hashes == []
    assert kv_cache.num_cached_tokens(sequence(9)) == 0
    kv_cache.free(first)
    assert kv_cache.usage() == type(kv_cache.usage())(total=8, used=0, cached=0, queries=0, hits=0)


def test_integrity_check_notices_a_leak_and_a_wrong_table() -> None:
    kv_cache = manager()
    item = admitted(kv_cache, sequence(9))
    kv_cache.block_tables[item.block_table_row, 1] = kv_cache.block_tables[item.block_table_row, 0]
    with pytest.raises(AssertionError, match="twice"):
        kv_cache.check_integrity()
    kv_cache.block_tables[item.block_table_row, 1] = 7
    with pytest.raises(AssertionError, match="differ"):
        kv_cache.check_integrity()
