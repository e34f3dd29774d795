from __future__ import annotations

from engine_worker.kv_cache.block_pool import BlockPool


def pool_of(num_blocks: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def test_blocks_without_content_are_taken_before_cached_ones() -> None:
    pool, evicted = pool_of(4)
    first, second, third, fourth = pool.allocate(4)
    pool.release(first, is_cached=True)
    pool.release(second, is_cached=False)
    assert pool.allocate(1) == [second]
    assert evicted == []
    assert pool.allocate(1) == [first]
    assert evicted == [first]
    assert {third, fourth} == {2, 3}


def test_cached_blocks_are_evicted_oldest_first() -> None:
    pool, evicted = pool_of(3)
    blocks = pool.allocate(3)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block, is_cached=True)
    pool.share([blocks[1]])
    pool.release(blocks[1], is_cached=True)  # used again: the youngest now
    assert pool.allocate(3) == [blocks[0], blocks[2], blocks[1]]
    assert evicted == [blocks[0], blocks[2], blocks[1]]


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool, _ = pool_of(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release(block, is_cached=False)
    assert pool.num_available == 1
    pool.check_integrity()
    pool.release(block, is_cached=False)
    assert pool.num_available == 2
    pool.check_integrity()
