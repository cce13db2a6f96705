"""The loader takes every layout, and names what is wrong with any other."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from engine.config import ModelConfig
from engine.errors import CheckpointError, InvalidConfig
from engine.model.weights import load_model, save_checkpoint
from tests.checkpoints import DEFAULT_MODEL, EOT, Recipe, save_tensors

CPU = torch.device("cpu")
SMALL = Recipe(name="small")


def load(folder):
    return load_model(folder, device=CPU, dtype=torch.float32)


def logits(model, ids):
    return model.transformer.logits(model.compose(model.hidden_dense(torch.tensor([ids]))))


@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("absent", [None, "tok_emb", "lm_head"])
def test_every_layout_loads_to_the_same_model(tmp_path, layout, num_shards, absent):
    ids = SMALL.plain_ids(20)
    recipe = replace(SMALL, layout=layout, num_shards=num_shards, absent=absent)
    model = load(recipe.write(tmp_path / "other"))
    assert torch.equal(logits(model, ids), logits(load(SMALL.write(tmp_path / "plain")), ids))


def test_untied_weights_are_two_tensors(tmp_path):
    model = load(replace(SMALL, model={"weight_sharing": False}).write(tmp_path))
    assert not torch.equal(model.transformer.embedding.weight, model.transformer.lm_head.weight)


def test_names_under_a_wrapper_are_understood(tmp_path):
    SMALL.write(tmp_path)
    save_tensors(tmp_path, {f"model.{name}": tensor for name, tensor in SMALL.tensors().items()})
    assert load(tmp_path).config.vocab_size == SMALL.vocab_size


def write_with(folder, change):
    """SMALL's checkpoint after `change` has edited its tensors."""
    SMALL.write(folder)
    tensors = replace(SMALL, absent="lm_head").tensors()
    change(tensors)
    save_tensors(folder, tensors)
    return folder


NAME = "transformer.blocks.1.mlp.c_fc.weight"


def test_a_missing_tensor_is_named(tmp_path):
    folder = write_with(tmp_path, lambda tensors: tensors.pop(NAME))
    with pytest.raises(CheckpointError, match=f"missing {NAME}"):
        load(folder)


def test_a_surplus_tensor_is_named(tmp_path):
    folder = write_with(tmp_path, lambda tensors: tensors.update({"transformer.blocks.7.extra": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected transformer\.blocks\.7\.extra"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    folder = write_with(tmp_path, lambda tensors: tensors.update({NAME: torch.zeros(3, 32)}))
    with pytest.raises(CheckpointError, match=rf"{NAME} has shape \[3, 32\], .*\[128, 32\]"):
        load(folder)


def test_both_tied_tensors_missing_is_an_error(tmp_path):
    folder = write_with(tmp_path, lambda tensors: tensors.pop("transformer.tok_emb.weight"))
    with pytest.raises(CheckpointError, match=r"tok_emb.*lm_head"):
        load(folder)


def test_tied_tensors_that_differ_are_an_error(tmp_path):
    other = {"transformer.lm_head.weight": torch.zeros(SMALL.vocab_size, DEFAULT_MODEL["n_embd"])}
    folder = write_with(tmp_path, lambda tensors: tensors.update(other))
    with pytest.raises(CheckpointError, match="differ"):
        load(folder)


def test_a_tensor_of_an_unused_head_is_left_over(tmp_path):
    """A config without a discovered head must not silently drop the head that the file holds."""
    recipe = replace(SMALL, concept={"use_unknown": False})
    SMALL.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(recipe.config()))
    with pytest.raises(CheckpointError, match=r"unexpected unknown_head\."):
        load(tmp_path)


def test_a_folder_without_tensors_is_an_error(tmp_path):
    SMALL.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"weight_map": null}', '{"weight_map": {}}', '{"weight_map": ["a"]}', "\xff"]
    + ['{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../model.safetensors"}}'],
)
def test_an_index_that_is_none_is_an_error_that_names_it(tmp_path, text):
    """A list, a number or a null in the index was an AttributeError or a TypeError."""
    folder = replace(SMALL, num_shards=2).write(tmp_path)
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not a safetensors index"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_quantised_weights_are_an_error_that_names_tensor_and_dtype(tmp_path, dtype):
    """Integers were taken for weights, and the model wrote nonsense."""
    folder = write_with(tmp_path, lambda tensors: tensors.update({NAME: tensors[NAME].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"{NAME} is stored as .*, not as BF16, F16, F32, F64"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_floats_of_every_other_width_load(tmp_path, dtype):
    folder = write_with(tmp_path, lambda tensors: tensors.update({NAME: tensors[NAME].to(dtype)}))
    assert load(folder).transformer.layers[1].mlp.up.weight.dtype is torch.float32


def test_a_loaded_model_does_not_change_with_its_file(tmp_path):
    """float32 weights were a view of the mapped file: training over a served checkpoint changed what was served, and
    a shorter file ended the process with a bus error."""
    ids = SMALL.plain_ids(20)
    model = load(SMALL.write(tmp_path))
    before = logits(model, ids)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        length = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(length))
    assert torch.equal(logits(model, ids), before)


def test_a_shard_that_the_index_names_but_nobody_wrote_is_an_error(tmp_path):
    replace(SMALL, num_shards=3).write(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load(tmp_path)


def test_a_truncated_file_is_an_error_that_names_it(tmp_path):
    file = SMALL.write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_an_unknown_config_key_is_named(tmp_path, layout):
    raw = replace(SMALL, layout=layout).config() | {"num_experts": 8}
    with pytest.raises(InvalidConfig, match="num_experts"):
        ModelConfig.from_dict(raw)


def test_a_saved_checkpoint_loads_to_the_same_model(tmp_path):
    model = load(SMALL.write(tmp_path / "first"))
    save_checkpoint(model, SMALL.config(), tmp_path / "second", dtype=torch.float32)
    ids = SMALL.plain_ids(20)
    assert torch.equal(logits(load(tmp_path / "second"), ids), logits(model, ids))


def test_both_layouts_read_to_the_same_config():
    assert ModelConfig.from_dict(SMALL.config()) == ModelConfig.from_dict(replace(SMALL, layout="nested").config())


def test_a_text_ends_at_its_own_stop_tokens_and_at_the_end_of_a_turn_but_at_no_token_that_is_never_chosen():
    config = ModelConfig.from_dict(EOT.config())
    eot = config.eot_id
    assert config.end_token_ids((), ignore_eos=False) == {eot}
    assert config.end_token_ids([3], ignore_eos=False) == {3, eot}
    assert config.end_token_ids([3], ignore_eos=True) == {3}
    assert config.end_token_ids(config.banned_token_ids, ignore_eos=True) == set()


def test_the_nested_layout_without_ids_takes_the_published_ones():
    raw = replace(SMALL, layout="nested").config()
    raw = {k: v for k, v in raw.items() if k not in {*SMALL.special_ids, "vocab_size"}}
    base, instruct = ModelConfig.from_dict(raw), ModelConfig.from_dict(raw | {"instruct": True})
    assert (base.vocab_size, base.eos_token_id, base.pad_token_id, base.mask_token_id) == (
        100281,
        100257,
        100277,
        100280,
    )
    assert (base.bos_token_id, base.endofchunk_token_id, base.eot_id) == (100278, 100279, None)
    assert (instruct.vocab_size, instruct.start_header_id, instruct.end_header_id, instruct.eot_id) == (
        100284,
        100281,
        100282,
        100283,
    )


def test_a_flat_config_without_a_mask_id_is_an_error_that_names_it():
    raw = {k: v for k, v in SMALL.config().items() if k != "mask_token_id"}
    with pytest.raises(InvalidConfig, match="mask_token_id"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("n_head", 5), ("n_kv_heads", 3), ("norm_order", "sandwich"), ("mask_token_id", 97), ("concept_dim", 31)),
        *(("n_layers", 10**9), ("block_size", 10**12), ("intermediate_size", 0), ("norm_eps", -1.0), ("clip_qkv", 0)),
        *(("rope_base", 0), ("factorize_rank", 0), ("unknown_topk", 0), ("n_unknown_concepts", 0)),
    ],
)
def test_a_config_value_out_of_range_is_named(key, value):
    with pytest.raises(InvalidConfig, match=key if key != "n_head" else "n_embd"):
        ModelConfig.from_dict(SMALL.config() | {key: value})


FOREIGN = ["3", 1.5, -1, [], {"a": 1}, float("nan"), "true", 10**30]


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_a_config_value_of_the_wrong_type_is_named(layout):
    """A string was compared with a number, true counted as 1, and a fraction reached torch."""
    raw = replace(SMALL, layout=layout).config()
    concept = raw if layout == "flat" else raw["concept"]
    ours = {"concept", "interpretable", "instruct", "inject_alpha", "inject_layer", "max_concepts"}
    for section in (raw, concept):
        for key in sorted(set(section) - ours - {"store_unknown_weights"} - set(HUB_KEYS)):
            is_number = isinstance(section[key], int | float) and not isinstance(section[key], bool)
            wrong = [*FOREIGN[:1], *FOREIGN[3:5], *FOREIGN[6:7], True] if is_number else FOREIGN
            for value in wrong:
                section_before = section[key]
                section[key] = value
                name = "block_size" if key == "concept_block_size" else key
                with pytest.raises(InvalidConfig, match=rf"^(concept )?{name} is "):
                    ModelConfig.from_dict(raw)
                section[key] = section_before


HUB_KEYS = ("model_type", "architectures", "auto_map", "torch_dtype", "transformers_version")


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id", "eot_id", "bos_token_id"])
def test_the_mask_is_no_other_special_token(name):
    """With one id for mask and padding, positions past the limit were filled."""
    raw = replace(SMALL, has_eot=True).config()
    with pytest.raises(InvalidConfig, match=f"{name} and mask_token_id"):
        ModelConfig.from_dict(raw | {name: raw["mask_token_id"]})


def test_an_end_of_turn_that_is_never_chosen_is_refused():
    raw = replace(SMALL, has_eot=True).config()
    with pytest.raises(InvalidConfig, match="eot_id"):
        ModelConfig.from_dict(raw | {"eot_id": raw["eos_token_id"]})


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "5", '"x"', "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "\xff"]
)
def test_a_config_that_is_no_object_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidConfig, match=r"config\.json"):
        ModelConfig.from_json(tmp_path)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_loading_tells_the_bytes_that_the_files_hold(tmp_path, num_shards):
    # With both of the tied tensors in the files only one would be read.
    folder = replace(SMALL, num_shards=num_shards, absent="lm_head").write(tmp_path)
    told: list[tuple[int, int]] = []
    load_model(folder, device=CPU, dtype=torch.bfloat16, progress=lambda done, total: told.append((done, total)))
    stored = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    assert [done for done, _ in told] == sorted({done for done, _ in told}), "each tensor adds to it"
    assert (told[0], told[-1]) == ((0, size), (size, size))
    assert len(told) == len(stored) + 1
