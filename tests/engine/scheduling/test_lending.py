"""Pages lent to analyses beside sequences: exact accounts, shared prefixes, and nobody who waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestTooLarge
from engine.scheduling import PageLease, prefix_keys
from tests.engine.scheduling.driver import Driver, Spec, generate_alone, prompt_of


@dataclass(frozen=True, kw_only=True)
class Borrowing:
    """An analysis as the scheduler sees it: a text, scratch pages, and for how many slices."""

    text: tuple[int, ...]
    scratch: int = 1
    most_scratch: int = 1
    num_slices: int = 1
    fails: bool = False


def borrow(driver: Driver, wish: Borrowing) -> Generator[None, None, PageLease]:
    """Does what an analysis does, on the pretended device."""
    lending, written = driver.scheduler.lending, driver.device.written
    keys = prefix_keys(wish.text, driver.block_size)
    lease = yield from lending.borrow(
        keys, least_scratch=wish.scratch, most_scratch=max(wish.scratch, wish.most_scratch)
    )
    try:
        assert wish.scratch <= len(lease.scratch_page_ids) <= max(wish.scratch, wish.most_scratch)
        for _ in range(wish.num_slices):
            for block in range(lease.num_sealed, len(keys)):
                written[lease.page_ids[block]] = (wish.text[: (block + 1) * driver.block_size], 0)
                lease.seal(block)
            for page_id in lease.scratch_page_ids:
                written[page_id] = ((), 0)
            for block, page_id in enumerate(lease.page_ids):
                assert written[page_id] == (wish.text[: (block + 1) * driver.block_size], 0)
            driver.check()
            yield
        if wish.fails:
            lease.spoil()
    finally:
        lease.give_back()
    return lease


def drive(driver: Driver, borrowers: list[Generator[None, None, PageLease]], max_steps: int = 2000) -> int:
    """A step, then a slice of the borrower whose turn it is, until all is done; how many steps that took."""
    line = deque(borrowers)
    for step in range(max_steps):
        if not line and not driver.scheduler.has_work:
            return step
        if driver.scheduler.has_work:
            driver.step()
        if line:
            borrower = line.popleft()
            try:
                next(borrower)
                line.append(borrower)
            except StopIteration:
                pass
            driver.check()
    raise AssertionError(f"work is left after {max_steps} steps")


def test_a_lease_counts_as_held_and_gives_everything_back():
    driver = Driver(num_pages=6)
    borrower = borrow(driver, Borrowing(text=prompt_of(0, 9), scratch=2))
    next(borrower)
    assert driver.scheduler.num_held_pages == 4
    borrower.close()
    driver.check()
    assert driver.scheduler.num_held_pages == 0
    assert (driver.scheduler.num_cached_pages, driver.scheduler.num_free_pages) == (2, 4)


def test_blocks_that_a_lease_sealed_are_found_by_sequences_and_by_other_leases():
    driver = Driver(num_pages=12)
    drive(driver, [borrow(driver, Borrowing(text=prompt_of(0, 8)))])
    driver.add(Spec(id="a", prompt=prompt_of(0, 10)))
    plan = driver.step()
    assert plan.admitted[0].num_cached_tokens == 8
    other = borrow(driver, Borrowing(text=prompt_of(0, 8)))
    next(other)
    assert driver.scheduler.num_held_pages == 4  # three of the sequence, two of these shared, and scratch
    drive(driver, [other])


def test_a_lease_finds_the_blocks_that_a_sequence_sealed():
    driver = Driver(num_pages=12)
    driver.add(Spec(id="a", prompt=prompt_of(0, 10), max_tokens=30))
    driver.step()
    driver.step()
    before = driver.scheduler.num_held_pages
    borrower = borrow(driver, Borrowing(text=prompt_of(0, 8)))
    next(borrower)
    assert driver.scheduler.num_held_pages == before + 1
    drive(driver, [borrower])


def test_without_shared_prefixes_nothing_is_found_or_offered():
    driver = Driver(num_pages=12, share_prefixes=False)
    wish = Borrowing(text=prompt_of(0, 8))
    first, second = borrow(driver, wish), borrow(driver, wish)
    next(first)
    next(second)
    assert driver.scheduler.num_held_pages == 6
    drive(driver, [first, second])
    assert driver.scheduler.num_free_pages == 12


def test_two_leases_that_write_one_prefix_end_on_one_page():
    driver = Driver(num_pages=12)
    keys = prefix_keys(prompt_of(0, 4), 4)
    leases = [_take(driver, keys) for _ in range(2)]
    for lease in leases:
        lease.seal(0)
        driver.check()
    assert leases[0].page_ids == leases[1].page_ids
    for lease in leases:
        lease.give_back()
    driver.check()
    assert (driver.scheduler.num_cached_pages, driver.scheduler.num_free_pages) == (1, 11)


def _take(driver: Driver, keys: list[bytes], scratch: int = 1) -> PageLease:
    borrowing = driver.scheduler.lending.borrow(keys, least_scratch=scratch, most_scratch=scratch)
    with pytest.raises(StopIteration) as taken:
        next(borrowing)
    return taken.value.value


def test_pages_of_a_spoilt_lease_are_found_by_nobody():
    driver = Driver(num_pages=6)
    drive(driver, [borrow(driver, Borrowing(text=prompt_of(0, 8), fails=True))])
    assert driver.scheduler.num_cached_pages == 0


def test_a_lease_takes_all_pages_at_once_or_none():
    """Two that each hold half of what they need would wait for each other for ever."""
    driver = Driver(num_pages=4)
    first, second = (borrow(driver, Borrowing(text=prompt_of(i, 8), num_slices=3)) for i in range(2))
    next(first)
    next(second)
    assert driver.scheduler.num_held_pages == 3
    assert driver.scheduler.lending.is_in_use
    drive(driver, [first, second])
    assert not driver.scheduler.lending.is_in_use


def test_who_asks_for_pages_first_gets_them_first():
    driver = Driver(num_pages=4)
    holder = borrow(driver, Borrowing(text=prompt_of(0, 8)))
    large = borrow(driver, Borrowing(text=prompt_of(1, 12)))
    small = borrow(driver, Borrowing(text=()))
    for borrower in (holder, large, small):
        next(borrower)
    assert driver.scheduler.num_held_pages == 3, "the small one overtook the large one"
    with pytest.raises(StopIteration):
        next(holder)
    next(small)
    assert driver.scheduler.num_held_pages == 0
    next(large)
    assert driver.scheduler.num_held_pages == 4
    drive(driver, [large, small])


def test_a_borrower_that_leaves_makes_room_in_the_line():
    driver = Driver(num_pages=4)
    holder, large, small = (borrow(driver, Borrowing(text=prompt_of(i, n))) for i, n in enumerate((8, 12, 0)))
    for borrower in (holder, large, small):
        next(borrower)
    large.close()
    next(small)
    assert driver.scheduler.num_held_pages == 4
    drive(driver, [holder, small])


def test_a_sequence_held_up_by_leases_comes_before_the_next_one():
    """A stream of analyses that overlap would otherwise keep a large request out for ever."""
    driver = Driver(num_pages=4)
    line = deque([borrow(driver, Borrowing(text=prompt_of(0, 8), num_slices=2))])
    next(line[0])
    driver.add(Spec(id="large", prompt=prompt_of(9, 12)))
    for number in range(1, 20):
        if driver.sequences["large"].is_running:
            break
        line.append(borrow(driver, Borrowing(text=prompt_of(number, 4), num_slices=2)))
        driver.step()
        for borrower in list(line):
            if next(borrower, "ended") == "ended":
                line.remove(borrower)
    assert driver.sequences["large"].is_running
    drive(driver, list(line))


def test_a_borrower_held_up_by_sequences_comes_before_the_next_one():
    """Of four requests one ends in each pass: others would take each page that comes free, and three never would."""
    driver = Driver(num_pages=4)
    driver.add(*(Spec(id=f"{i}", max_tokens=min(i + 1, 4)) for i in range(40)))
    driver.step()
    borrower = borrow(driver, Borrowing(text=prompt_of(0, 8)))
    for _ in range(20):
        next(borrower)
        if list(driver.scheduler.lending.page_ids):
            break
        driver.step()
    assert list(driver.scheduler.lending.page_ids), "it still waits"
    assert driver.scheduler.num_waiting > 20
    drive(driver, [borrower])


def test_a_borrower_is_not_held_up_by_a_sequence_that_has_gone():
    driver = Driver(num_pages=4)
    holder = borrow(driver, Borrowing(text=prompt_of(0, 8)))
    next(holder)
    driver.add(Spec(id="large", prompt=prompt_of(9, 12)))
    driver.step()
    waiting = borrow(driver, Borrowing(text=()))
    next(waiting)
    assert driver.scheduler.num_held_pages == 3
    driver.abort("large")
    next(waiting)
    assert driver.scheduler.num_held_pages == 4
    drive(driver, [holder, waiting])


def test_what_can_never_fit_is_refused_with_the_numbers():
    lending = Driver(num_pages=4).scheduler.lending
    lending.check_fits(3, 1, "token_ids")
    with pytest.raises(RequestTooLarge, match="needs 5 pages at once and the engine has 4") as refused:
        lending.check_fits(3, 2, "token_ids")
    assert refused.value.param == "token_ids"


BORROWINGS = st.builds(
    Borrowing,
    text=st.builds(prompt_of, st.integers(0, 2), st.integers(0, 20)),
    scratch=st.integers(1, 1),
    most_scratch=st.integers(1, 4),
    num_slices=st.integers(1, 4),
    fails=st.booleans(),
)
SPECS = st.tuples(st.integers(0, 2), st.integers(0, 14), st.integers(1, 10), st.integers(1, 4), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SPECS, min_size=1, max_size=6), st.lists(BORROWINGS, min_size=1, max_size=6), st.booleans(), st.booleans()
)
def test_sequences_and_leases_all_end_and_texts_are_what_they_are_alone(wishes, borrowings, is_late, shares):
    """Six pages: the largest of either kind fits alone, so most have to wait or go."""
    driver = Driver(num_pages=6, max_rows=4, max_lanes=3, is_late=is_late, share_prefixes=shares)
    for number, (family, length, max_tokens, tokens_per_step, priority) in enumerate(wishes):
        prompt = prompt_of(family, length)
        spec = Spec(
            id=f"{number}",
            prompt=prompt,
            max_tokens=max_tokens,
            tokens_per_step=tokens_per_step,
            priority=priority,
        )
        driver.add(spec)
    drive(driver, [borrow(driver, wish) for wish in borrowings])
    driver.finish()
    assert driver.scheduler.num_held_pages == 0
    for spec in driver.specs.values():
        assert driver.sequences[spec.id].text_token_ids == generate_alone(spec, driver.block_size)[0]
