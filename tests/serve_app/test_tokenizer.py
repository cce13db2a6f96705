from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from steerling.data.tokenizer import SteerlingTokenizer
from tokenizers import Tokenizer as Backend

from engine import CheckpointError, ModelConfig
from serve_app.tokenizer import Tokenizer

TEXTS = ["", "a small animal", "été 北京 \U0001f600", " \n\t ", "<|endoftext|> and <|mask|>", "<|endofchunk|>"]


@pytest.fixture(scope="session")
def small(folder, model_config) -> Tokenizer:
    return Tokenizer.from_checkpoint(folder, model_config)


@pytest.fixture(scope="session", params=[False, True], ids=["base", "instruct"])
def published(request, tmp_path_factory) -> tuple[Tokenizer, SteerlingTokenizer]:
    """Ours and the reference package's, for a checkpoint in the layout without special-token ids."""
    try:
        tiktoken.get_encoding("cl100k_base")
    except OSError:
        pytest.skip("cl100k_base cannot be downloaded here and TIKTOKEN_CACHE_DIR does not hold it")
    config = ModelConfig.from_dict({"concept": {}, "instruct": request.param})
    return Tokenizer.from_checkpoint(tmp_path_factory.mktemp("empty"), config), SteerlingTokenizer(request.param)


@given(text=st.text())
def test_encoded_text_decodes_to_itself(small, text):
    assert small.decode(small.encode(text)) == text


@given(ids=st.lists(st.integers(0, 279), max_size=30))
def test_text_is_the_bytes_of_its_tokens(small, ids):
    assert small.decode(ids).encode() == b"".join(map(small.text_bytes, ids)).decode("utf-8", "replace").encode()


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_file(small, folder, text):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.encode_special_tokens = True
    assert small.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("name", ["<|mask|>", "<|endoftext|>", "<|eot_id|>", "<|endofchunk|>"])
def test_text_that_spells_a_special_token_is_ordinary_text(small, name):
    """A prompt with the mask token's text was once taken for a prompt with a mask, and overwritten."""
    ids = small.encode(f"before {name} after")
    assert small.decode(ids) == f"before {name} after"
    assert max(ids) < 272


def test_special_tokens_have_a_name_and_no_text(small, model_config):
    for token_id in (model_config.endofchunk_token_id, model_config.eot_id, model_config.mask_token_id):
        assert small.text_bytes(token_id) == b""
    assert small.token_name(model_config.endofchunk_token_id) == "<|endofchunk|>"
    assert small.token_name(small.encode("a")[0]) == "a"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d["decoder"].update(type="Metaspace"), "byte-level"),
        (lambda d: d["added_tokens"][-1].update(special=False), "does not mark"),
    ],
)
def test_a_file_that_could_not_be_decoded_or_would_parse_specials_is_refused(
    folder, model_config, tmp_path, change, complaint
):
    description = json.loads((folder / "tokenizer.json").read_text())
    change(description)
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=complaint):
        Tokenizer.from_checkpoint(tmp_path, model_config)


def test_a_vocabulary_larger_than_the_model_is_refused(folder, model_config):
    with pytest.raises(CheckpointError, match="the model's vocabulary has 279"):
        Tokenizer.from_checkpoint(folder, replace(model_config, vocab_size=279, mask_token_id=0))


def test_a_checkpoint_without_tokenizer_and_with_a_small_vocabulary_is_refused(published, tmp_path, model_config):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_checkpoint(tmp_path, model_config)


@pytest.mark.parametrize("text", TEXTS)
def test_the_published_vocabulary_equals_the_reference(published, text):
    ours, reference = published
    ids = reference.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == reference.decode(ids) == text
    assert ours.vocab_size == reference.vocab_size


def test_the_published_special_tokens_have_no_text(published):
    ours, reference = published
    ids = [reference.eos_token_id, reference.pad_token_id, reference.endofchunk_token_id, reference.mask_token_id]
    assert ours.decode([*ids, 100300 - 23]) == ""
    assert [ours.token_name(i) for i in ids] == ["<|endoftext|>", "<|pad|>", "<|endofchunk|>", "<|mask|>"]
