from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Commit
from serve_app.text_assembly import StopFinder, TextAssembler


def commit(position: int, token_id: int) -> Commit:
    return Commit(position, token_id, 0, 1.0, 0.0, 0.0)


@st.composite
def commits_in_any_order(draw):
    """(ids, the order they are committed in, sizes of the batches they come in)."""
    ids = draw(st.lists(st.integers(0, 271), max_size=40))
    order = draw(st.permutations(range(len(ids))))
    sizes = draw(st.lists(st.integers(1, 5), min_size=len(ids)))
    return ids, order, sizes


@given(case=commits_in_any_order(), start=st.integers(0, 100), end_id=st.integers(0, 271))
def test_streamed_text_equals_plain_text_whatever_the_order(served, case, start, end_id):
    ids, order, sizes = case
    text_ids = ids[: ids.index(end_id)] if end_id in ids else ids
    text = served.tokenizer.decode(text_ids)
    assembler = TextAssembler(served.tokenizer, start=start, end_ids=[end_id])
    streamed = ""
    for size in sizes:
        batch, order = order[:size], order[size:]
        streamed += assembler.add([commit(start + i, ids[i]) for i in batch])
        assert text.startswith(streamed)
    assert streamed + assembler.finish() == text
    assert assembler.token_ids == text_ids


def test_a_token_waits_for_its_left_neighbours(served):
    a, b = served.tokenizer.encode("a")[0], served.tokenizer.encode("b")[0]
    assembler = TextAssembler(served.tokenizer, start=5, end_ids=[])
    assert assembler.add([commit(6, b)]) == ""
    assert assembler.add([commit(5, a)]) == "ab"


def test_half_a_character_is_held_back_and_replaced_at_the_end(served):
    first, second = (byte_token(served, byte) for byte in "é".encode())
    assembler = TextAssembler(served.tokenizer, start=0, end_ids=[])
    assert assembler.add([commit(0, first)]) == ""
    assert assembler.add([commit(1, second), commit(2, first)]) == "é"
    assert assembler.finish() == "�"


def test_nothing_right_of_an_end_token_leaves_even_if_it_was_committed_first(served):
    a, end = served.tokenizer.encode("a")[0], served.config.eot_id
    assembler = TextAssembler(served.tokenizer, start=0, end_ids=[end])
    assert assembler.add([commit(2, a), commit(1, end)]) == ""
    assert assembler.add([commit(0, a)]) == "a"
    assert assembler.add([commit(3, a)]) == ""
    assert assembler.token_ids == [a]


def byte_token(served, byte: int) -> int:
    return next(i for i in range(272) if served.tokenizer.text_bytes(i) == bytes([byte]))


def first_stop(text: str, stops: list[str], ends: list[int], min_tokens: int) -> tuple[int, str] | None:
    """(end, stop string) of the one that is complete first, the longest of those; found by looking everywhere.

    `ends` are where each token's text ends; within the first `min_tokens` nothing counts.
    """
    allowed_from = ends[min_tokens - 1] if min_tokens else 0
    found = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[end - len(stop) : end] == stop and end > allowed_from
    ]
    return (min(found)[0], min(found)[2]) if found else None


LETTERS = "ab\u00e9"


@st.composite
def texts_with_stops(draw):
    """(byte tokens of a text, stop strings that may be in it, order of commits, batch sizes, min_tokens)."""
    text = draw(st.text(LETTERS, max_size=24))
    data = text.encode() + draw(st.sampled_from([b"", b"\xc3"]))
    stops = draw(st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(data))))
    sizes = draw(st.lists(st.integers(1, 6), min_size=len(data)))
    return data, stops, order, sizes, draw(st.integers(0, len(data)))


@given(case=texts_with_stops(), keeps_stop=st.booleans())
def test_the_text_ends_at_the_first_stop_string_however_it_comes(served, case, keeps_stop):
    data, stops, order, sizes, min_tokens = case
    ids = [byte_token(served, byte) for byte in data]
    text = data.decode("utf-8", "replace")
    # A character is there with the last of its bytes.
    ends = [len(data[: i + 1].decode("utf-8", "ignore")) for i in range(len(data))]
    found = first_stop(data.decode("utf-8", "ignore"), stops, ends, min_tokens)
    expected = text
    if found is not None:
        expected = text[: found[0] if keeps_stop else found[0] - len(found[1])]
    assembler = TextAssembler(served.tokenizer, start=3, stops=stops, keeps_stop=keeps_stop, min_tokens=min_tokens)
    streamed, told = "", []
    for size in sizes:
        batch, order = order[:size], order[size:]
        streamed += assembler.add([commit(3 + i, ids[i]) for i in batch])
        assert expected.startswith(streamed), "something leaked that a stop string takes back"
        if streamed:
            told += assembler.take_tokens()
            # The end takes all others along, those of a stop string too, which is no longer part of the text.
            ends_told = assembler.offsets[1 : len(told) + 1]
            assert assembler.is_ended or all(end <= len(streamed) for end in ends_told), "told before its text is out"
    streamed += assembler.finish()
    told += assembler.take_tokens()
    assert streamed == expected
    assert assembler.end_reason == (None if found is None else found[1])
    num_tokens = len(data) if found is None else 1 + next(i for i, end in enumerate(ends) if end >= found[0])
    assert assembler.token_ids == ids[:num_tokens]
    assert told == list(range(num_tokens)), "each token is told of once, in order"


@given(pieces=st.lists(st.text("ab", max_size=6), max_size=6), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
def test_a_finder_holds_back_exactly_what_may_still_become_a_stop_string(pieces, stops):
    finder, text = StopFinder(stops), ""
    for piece in pieces:
        if finder.feed(piece) is not None:
            return
        text += piece
        beginnings = [stop[:n] for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        assert finder.num_held == max(map(len, beginnings), default=0)


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_a_stop_string_across_tokens_is_found_however_commits_are_gathered(served, size):
    text = "a sea \u00e9t\u00e9 and the end"
    ids = [byte_token(served, byte) for byte in text.encode()]
    assembler = TextAssembler(served.tokenizer, start=0, stops=["t\u00e9 and"])
    streamed = ""
    for first in range(0, len(ids), size):
        streamed += assembler.add([commit(i, ids[i]) for i in range(first, min(first + size, len(ids)))])
    assert streamed + assembler.finish() == "a sea \u00e9"


def test_offsets_count_characters_and_not_bytes(served):
    ids = [byte_token(served, byte) for byte in "\u00e9a\u00e9".encode()]
    assembler = TextAssembler(served.tokenizer, start=0)
    assembler.add([commit(i, token_id) for i, token_id in enumerate(ids)])
    assert assembler.offsets == [0, 0, 1, 2, 2]
