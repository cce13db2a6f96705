from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling import PagePool, PrefixIndex


def make_pool(num_pages: int) -> tuple[PagePool, PrefixIndex]:
    index = PrefixIndex()
    return PagePool(num_pages, index), index


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.num_free, pool.num_cached, pool.num_held


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_page_is_free_again_after_its_last_holder():
    pool, _ = make_pool(2)
    page = pool.allocate()
    pool.hold(page)
    assert counts(pool) == (1, 0, 1)
    pool.release(page)
    assert counts(pool) == (1, 0, 1)
    pool.release(page)
    assert counts(pool) == (2, 0, 0)


def test_an_indexed_page_is_cached_after_its_last_holder_and_can_be_held_again():
    pool, index = make_pool(2)
    page = pool.allocate()
    index.register(key(1), page)
    pool.release(page)
    assert counts(pool) == (1, 1, 0)
    assert pool.is_cached(page)
    pool.hold(page)
    assert counts(pool) == (1, 0, 1)
    assert not pool.is_cached(page)


def test_free_pages_go_before_cached_ones():
    pool, index = make_pool(2)
    page = pool.allocate()
    index.register(key(1), page)
    pool.release(page)
    assert pool.allocate() != page
    assert page in index
    assert pool.allocate() == page
    assert page not in index


def test_the_least_recently_used_page_is_evicted_and_forgotten():
    pool, index = make_pool(3)
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        index.register(key(page), page)
        pool.release(page)
    pool.hold(pages[0])
    pool.release(pages[0])
    assert [pool.allocate() for _ in range(3)] == [pages[1], pages[2], pages[0]]
    assert len(index) == 0


def test_of_a_released_chain_children_are_evicted_before_their_parents():
    pool, index = make_pool(3)
    chain = [pool.allocate() for _ in range(3)]
    for page in chain:
        index.register(key(page), page)
    pool.release_all(chain)
    assert [pool.allocate() for _ in range(3)] == chain[::-1]


def test_a_shared_parent_outlives_the_child_of_an_earlier_release():
    pool, index = make_pool(4)
    parent, child, other_child = (pool.allocate() for _ in range(3))
    pool.hold(parent)
    for page in (parent, child, other_child):
        index.register(key(page), page)
    pool.release_all([parent, child])
    pool.release_all([parent, other_child])
    pool.allocate()
    assert [pool.allocate() for _ in range(3)] == [child, other_child, parent]


def test_a_full_pool_hands_out_nothing():
    pool, _ = make_pool(1)
    pool.allocate()
    assert pool.num_available == 0
    with pytest.raises(AssertionError, match="all 1 pages are held"):
        pool.allocate()


def test_a_free_page_can_be_neither_held_nor_released():
    pool, _ = make_pool(2)
    page = pool.allocate()
    pool.release(page)
    with pytest.raises(AssertionError, match="nothing to share"):
        pool.hold(page)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(page)


def test_a_pool_has_at_least_one_page():
    with pytest.raises(AssertionError):
        make_pool(0)
    make_pool(1)


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from("ahri"), st.integers(0, 9)), max_size=60))
def test_pages_add_up_after_any_calls(num_pages, calls):
    """Against a model in which a page is no more than its number of holders and whether it is indexed."""
    pool, index = make_pool(num_pages)
    holders = [0] * num_pages
    next_key = 0
    for call, number in calls:
        page = number % num_pages
        if call == "a" and 0 in holders:
            holders[pool.allocate()] += 1
        elif call == "h" and (holders[page] or page in index):
            pool.hold(page)
            holders[page] += 1
        elif call == "r" and holders[page]:
            pool.release(page)
            holders[page] -= 1
        elif call == "i" and holders[page] and page not in index:
            index.register(key(next_key), page)
            next_key += 1
        assert [pool.num_holders(p) for p in range(num_pages)] == holders
        cached = sum(1 for p in range(num_pages) if not holders[p] and p in index)
        assert counts(pool) == (holders.count(0) - cached, cached, num_pages - holders.count(0))
