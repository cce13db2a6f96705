"""Which settings a pass gets, and that those for the released shape fit it. The kernels themselves need a GPU."""

from __future__ import annotations

from engine.config import ModelConfig
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


def test_every_measured_gemm_is_one_of_the_released_shape_at_whole_rows():
    config = ModelConfig(vocab_size=100281, mask_token_id=1, eos_token_id=2, pad_token_id=3)
    width, kv_width = config.n_embd, config.num_kv_heads * config.head_dim
    products = {(width + 2 * kv_width, width), (width, width), (width, config.mlp_width)}
    assert {key[1:] for key in HOPPER.products} == products
    assert {key[1:] for key in HOPPER.gated} == {(2 * config.mlp_width, width)}
    assert all(key[0] % config.diff_block_size == 0 for key in (*HOPPER.products, *HOPPER.gated))


def test_every_measured_setting_divides_its_gemm_and_fits_shared_memory():
    gated = [((m, n // 2, k), settings, 2) for (m, n, k), settings in HOPPER.gated.items()]
    for (m, n, k), settings, tiles in [*((key, value, 1) for key, value in HOPPER.products.items()), *gated]:
        assert (m % settings.block_m, n % settings.block_n, k % settings.block_k) == (0, 0, 0)
        num_bytes = 2 * settings.num_stages * (settings.block_m + tiles * settings.block_n) * settings.block_k
        assert num_bytes <= 227 * 1024, f"{num_bytes} bytes of a multiprocessor's 227 KiB"
    assert all(settings.splits == 1 for settings in HOPPER.gated.values())
