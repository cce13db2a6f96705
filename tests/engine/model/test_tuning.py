"""Which settings a pass gets, and that those for the released shape fit it. The kernels themselves need a GPU."""

from __future__ import annotations

from engine.model.tuning import HOPPER, PLAIN, tuning_for


def test_only_passes_without_split_rows_overlap():
    assert HOPPER.with_splits(1).overlaps
    assert not HOPPER.with_splits(2).overlaps
    assert HOPPER.with_splits(2).products == HOPPER.products
    assert not PLAIN.with_splits(1).overlaps


def test_other_gpus_than_those_measured_run_the_plain_way():
    assert tuning_for((9, 0)) is HOPPER
    assert [tuning_for(capability) for capability in ((8, 0), (8, 9), (10, 0), (12, 0))] == [PLAIN] * 4


def test_pages_larger_than_those_measured_get_the_settings_that_fit_every_gpu():
    assert HOPPER.attention_for(64, 128) == HOPPER.attention
    assert HOPPER.attention_for(128, 128) == PLAIN.attention != HOPPER.attention
