from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine import Commit
from serve_app.text_assembly import TextAssembler


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
