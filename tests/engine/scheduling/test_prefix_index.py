from __future__ import annotations

import subprocess
import sys

import pytest

from engine.scheduling import ROOT_KEY, PrefixIndex, prefix_key


def chain(*blocks: tuple[int, ...]) -> list[bytes]:
    keys = []
    for block in blocks:
        keys.append(prefix_key(keys[-1] if keys else ROOT_KEY, block))
    return keys


def test_equal_prefixes_have_equal_keys():
    assert chain((1, 2), (3, 4)) == chain((1, 2), (3, 4))


@pytest.mark.parametrize("other", [((1, 2), (3, 5)), ((1, 3), (3, 4)), ((2, 1), (3, 4)), ((3, 4), (1, 2))])
def test_any_other_token_anywhere_before_changes_the_key(other):
    assert chain((1, 2), (3, 4))[-1] != chain(*other)[-1]


def test_a_block_has_another_key_behind_another_parent():
    assert chain((1, 2))[-1] != chain((1, 2), (1, 2))[-1]


def test_keys_do_not_depend_on_the_process():
    program = "from engine.scheduling import ROOT_KEY, prefix_key; print(prefix_key(ROOT_KEY, (5, 100280)).hex())"
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"}
    output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert output.stdout.decode().strip() == prefix_key(ROOT_KEY, (5, 100280)).hex()


def test_the_longest_match_stops_at_the_first_missing_block():
    index = PrefixIndex()
    keys = chain((1,), (2,), (3,))
    index.register(keys[0], 7)
    index.register(keys[2], 9)
    assert index.longest_match(keys) == [7]
    index.register(keys[1], 8)
    assert index.longest_match(keys) == [7, 8, 9]


def test_a_match_hashes_one_block_past_its_end_and_no_further():
    index = PrefixIndex()
    keys = chain((1,), (2,), (3,))
    index.register(keys[0], 7)
    remaining = iter(keys)
    assert index.longest_match(remaining) == [7]
    assert list(remaining) == keys[2:]


def test_a_forgotten_parent_hides_its_children_until_it_is_computed_again():
    index = PrefixIndex()
    keys = chain((1,), (2,))
    index.register(keys[0], 7)
    index.register(keys[1], 8)
    index.forget(7)
    assert index.longest_match(keys) == []
    assert 7 not in index
    assert 8 in index
    index.check_integrity()
    index.register(keys[0], 3)
    assert index.longest_match(keys) == [3, 8]


def test_forgetting_an_unknown_page_does_nothing():
    index = PrefixIndex()
    index.register(chain((1,))[0], 7)
    index.forget(8)
    assert index.page_ids == {7}


def test_one_page_a_key_and_one_key_a_page():
    index = PrefixIndex()
    keys = chain((1,), (2,))
    index.register(keys[0], 7)
    with pytest.raises(AssertionError, match="already on page 7"):
        index.register(keys[0], 8)
    with pytest.raises(AssertionError, match="already stands for another"):
        index.register(keys[1], 7)
    index.register(keys[1], 8)
