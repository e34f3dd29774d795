from __future__ import annotations

import numpy as np

from engine_worker.kv_cache.prefix_cache import PrefixCache, extend_hashes, root_hash


def hashes(tokens: list[int], *, block_size: int = 2, adapter: str = "", salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, root_hash(adapter, salt), np.array(tokens, dtype=np.int32), block_size, len(tokens))
    return found


def test_only_full_blocks_have_names() -> None:
    assert [len(hashes([1, 2, 3, 4, 5][:n])) for n in range(6)] == [0, 0, 1, 1, 2, 2]


def test_a_name_covers_everything_before_it() -> None:
    assert hashes([1, 2, 3, 4])[1] != hashes([9, 2, 3, 4])[1]
    assert hashes([1, 2, 3, 4])[0] == hashes([1, 2, 9, 9])[0]


def test_names_depend_on_adapter_and_salt_and_not_on_how_they_are_split() -> None:
    names = [hashes([1, 2], adapter=a, salt=s)[0] for a, s in (("", ""), ("ab", ""), ("", "ab"), ("a", "b"))]
    assert len(set(names)) == 4


def test_names_are_the_same_in_every_process() -> None:
    assert hashes([1, 2, 3, 4])[1].hex() == "02c632d5aaef0a92cc9792cfaaf9816f"


def test_extending_gives_what_hashing_at_once_gives() -> None:
    tokens = np.arange(10, dtype=np.int32)
    grown: list[bytes] = []
    for upto in (3, 4, 7, 10):
        extend_hashes(grown, root_hash("", ""), tokens, 2, upto)
    assert grown == hashes(list(range(10)))


def test_match_stops_at_the_first_gap_and_at_the_limit() -> None:
    cache, names = PrefixCache(), hashes(list(range(10)))
    for index in (0, 1, 2, 4):
        cache.insert(names[index], index + 100)
    assert cache.match(names, 5) == [100, 101, 102]
    assert cache.match(names, 2) == [100, 101]
    cache.forget(100)
    assert cache.match(names, 5) == []
    cache.check_integrity()


def test_the_first_block_of_a_content_keeps_its_name() -> None:
    cache, names = PrefixCache(), hashes([1, 2])
    cache.insert(names[0], 7)
    cache.insert(names[0], 8)
    assert cache.match(names, 1) == [7]
    assert not cache.holds(8)
    cache.check_integrity()
