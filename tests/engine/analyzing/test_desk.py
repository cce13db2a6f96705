"""Analyses take turns between passes, and end with those who asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future

import pytest

from engine import InvalidValue, QueueFull
from engine.analyzing import AnalysisDesk
from tests.checkpoints import EOT


def count_to(number: int, seen: list[int]) -> Generator[None, None, int]:
    for i in range(number):
        seen.append(i)
        yield
    return number


def test_slices_of_several_analyses_alternate():
    seen: list[int] = []
    desk = AnalysisDesk(2)
    first, second = desk.add(count_to(2, seen)), desk.add(count_to(1, seen))
    while desk.has_work:
        desk.advance()
    assert (first.result(), second.result()) == (2, 1)
    assert seen == [0, 0, 1]


def test_an_error_is_its_analysis_own():
    def fail() -> Generator[None, None, int]:
        yield
        raise ValueError("a defect")

    desk = AnalysisDesk(2)
    failing, other = desk.add(fail()), desk.add(count_to(3, []))
    while desk.has_work:
        desk.advance()
    with pytest.raises(ValueError, match="a defect"):
        failing.result()
    assert other.result() == 3


def test_a_cancelled_analysis_does_no_other_slice_and_frees_what_it_holds():
    is_closed = []

    def hold() -> Generator[None, None, int]:
        try:
            while True:
                yield
        finally:
            is_closed.append(True)

    desk = AnalysisDesk(1)
    result: Future[int] = desk.add(hold())
    desk.advance()
    result.cancel()
    desk.advance()
    assert is_closed == [True] and not desk.has_work


def test_one_analysis_too_many_is_refused():
    desk = AnalysisDesk(1)
    desk.add(count_to(1, []))
    with pytest.raises(QueueFull, match="max_analyses is 1"):
        desk.add(count_to(1, []))


def test_closing_answers_all_who_wait():
    desk = AnalysisDesk(2)
    waiting = [desk.add(count_to(5, [])) for _ in range(2)]
    desk.advance()
    desk.close(RuntimeError("stopped"))
    assert all(isinstance(result.exception(), RuntimeError) for result in waiting)


def test_a_result_for_nobody_is_dropped():
    async def ask() -> None:
        desk = AnalysisDesk(1)
        waiting = asyncio.wrap_future(desk.add(count_to(0, [])))
        waiting.cancel()
        await asyncio.sleep(0)
        desk.advance()
        assert not desk.has_work

    asyncio.run(ask())


def test_what_is_no_analysis_is_refused_by_its_value(make_engine):
    engine = make_engine(EOT)
    with pytest.raises(InvalidValue, match="the analysis is 7; it must be one of"):
        engine.begin_analysis(7)
    assert not engine.has_work
