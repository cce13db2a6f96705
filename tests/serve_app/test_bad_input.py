"""Whatever a client sends, the answer is a 4xx that names the field, and the engine never sees it."""

from __future__ import annotations

import asyncio
import gzip
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

INTERVENTION = {"concepts": [2], "strength": 1}


def steer(**intervention):
    return {"steering": {"interventions": [INTERVENTION, {**INTERVENTION, **intervention}]}}


BAD_VALUES = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [[1.0]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": ["a", "\udfff"]}, "prompt"),
    ({"prompt": [64] * 600}, "prompt"),
    ({"prompt": "sea " * 20_000}, "prompt"),
    ({"model": 3}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "steering": {"concepts": [2], "strength": 1}}, "steering"),
    ({"max_tokens": 0, "echo": True, "attribution": {"level": "token"}}, "attribution"),
    ({"max_tokens": 0, "echo": True, "prompt": [280]}, "prompt"),
    ({"max_tokens": 0, "echo": True, "prompt": [3] * 513}, "prompt"),
    ({"max_tokens": 0, "echo": True, "prompt": [3, 279]}, "prompt"),
    ({"logprobs": 1, "echo": True, "steering": {"concepts": [2], "strength": 1}}, "steering"),
    ({"prompt": ["a", "sea " * 600]}, "prompt[1]"),
    ({"prompt": [[1], [2], [280]]}, "prompt[2]"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 5}, "n"),
    ({"n": 2, "prompt": ["a"] * 3}, "n"),
    ({"prompt": ["a"] * 5}, "prompt"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "\udfff"}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"280": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ({"logit_bias": {"1": math.nan}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "much"}}, "logit_bias"),
    ({"logit_bias": [[1, 2]]}, "logit_bias"),
    ({"stop_token_ids": [280]}, "stop_token_ids"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"stop_token_ids": list(range(100))}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_difusion": "steps"}}, "stream_options.include_difusion"),
    ({"stream": True, "stream_options": {"include_diffusion": "all"}}, "stream_options.include_diffusion"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"steering": []}, "steering"),
    ({"steering": {"concepts": [1]}}, "steering.strength"),
    ({"steering": {"strength": 1}}, "steering.concepts"),
    ({"steering": {"concepts": [], "strength": 1}}, "steering.concepts"),
    ({"steering": {"concepts": 1, "strength": 1}}, "steering.concepts"),
    ({"steering": {"concepts": [1] * 300, "strength": 1}}, "steering.concepts"),
    ({"steering": {"concepts": [1.5], "strength": 1}}, "steering.concepts[0]"),
    ({"steering": {"concepts": [0, "nobody"], "strength": 1}}, "steering.concepts[1]"),
    ({"steering": {"concepts": [0, {"weight": 1}], "strength": 1}}, "steering.concepts[1].id"),
    ({"steering": {"concepts": [0, {"id": [1]}], "strength": 1}}, "steering.concepts[1].id"),
    ({"steering": {"concepts": [0, {"id": 1, "wieght": 1}], "strength": 1}}, "steering.concepts[1].wieght"),
    ({"steering": {"concepts": [0, {"id": 1, "weight": math.nan}], "strength": 1}}, "steering.concepts[1].weight"),
    ({"steering": {"concepts": [1], "strength": 1, "layer": 2}}, "steering.layer"),
    (
        {"steering": {"concepts": [{"id": 1, "weight": 600}, {"id": 1, "weight": 600}], "strength": 1}},
        "steering.concepts",
    ),
    ({"steering": {"concepts": [1], "strength": 1, "interventions": [INTERVENTION] * 64}}, "steering.interventions"),
    ({"steering": {"interventions": INTERVENTION}}, "steering.interventions"),
    ({"steering": {"interventions": [INTERVENTION] * 65}}, "steering.interventions"),
    (steer(strenght=3), "steering.interventions[1].strenght"),
    (steer(strength=None), "steering.interventions[1].strength"),
    (steer(strength=math.inf), "steering.interventions[1].strength"),
    (steer(strength=10**400), "steering.interventions[1].strength"),
    (steer(strength=1001), "steering.interventions[1].strength"),
    (steer(unit="volts"), "steering.interventions[1].unit"),
    (steer(layer=-1), "steering.interventions[1].layer"),
    (steer(layer=3), "steering.interventions[1].layer"),
    (steer(schedule="sometimes"), "steering.interventions[1].schedule"),
    (steer(cutoff_tokens=0), "steering.interventions[1].cutoff_tokens"),
    (steer(group="yes"), "steering.interventions[1].group"),
    (steer(concepts=[50]), "steering.interventions[1].concepts[0]"),
    ({"steering": {"overrides": [{"concept": 1}]}}, "steering.overrides[0].weight"),
    ({"steering": {"overrides": [{"concept": "nobody", "weight": 1}]}}, "steering.overrides[0].concept"),
    ({"steering": {"overrides": [{"concept": 200, "weight": 1}]}}, "steering.overrides[0].concept"),
    (
        {"steering": {"overrides": [{"concept": 1, "weight": 1}, {"concept": 1, "weight": 2}]}},
        "steering.overrides[1].concept",
    ),
    ({"steering": {"overrides": [{"concept": 1, "weight": math.nan}]}}, "steering.overrides[0].weight"),
    ({"steering": {"override_mode": "add"}}, "steering.override_mode"),
    ({"steering": {"concepts": [0, {"id": {"id": 1}}], "strength": 1}}, "steering.concepts[1].id"),
    ({"steering": {"suppress": [{"concept": {"id": 1, "name": [1]}, "strength": 1}]}}, "steering.suppress[0].concept"),
    ({"steering": {"suppress": [{"concept": {"name": "food"}, "strength": 1}]}}, "steering.suppress[0].concept"),
    ({"steering": {"override_mode": "reference"}}, "steering.override_mode"),
    ({"steering": {"group": True, "interventions": [INTERVENTION]}}, "steering.group"),
    (steer(cutoff_tokens=8), "steering.interventions[1].cutoff_tokens"),
    ({"diffusion": {"cfg_scale": -1}}, "diffusion.cfg_scale"),
    ({"steering": {"suppress": [{"concept": 1, "strength": -1}]}}, "steering.suppress[0].strength"),
    ({"steering": {"suppress": [{"concept": 99, "strength": 1}]}}, "steering.suppress[0].concept"),
    ({"steering": {"suppress": [{"concepts": [1], "strength": 1}]}}, "steering.suppress[0].concepts"),
    ({"attribution": {"level": "all"}}, "attribution.level"),
    ({"attribution": {"level": "token", "top_k": -1}}, "attribution.top_k"),
    ({"attribution": {"level": "token", "heads": []}}, "attribution.heads"),
    ({"attribution": {"level": "token", "heads": ["unknown"]}}, "attribution.heads[0]"),
    ({"attribution": {"levle": "token"}}, "attribution.levle"),
    ({"attribution": "token"}, "attribution"),
    ({"diffusion": {"tokens_per_step": 0}}, "diffusion.tokens_per_step"),
    ({"diffusion": {"tokens_per_step": 17}}, "diffusion.tokens_per_step"),
    ({"diffusion": {"steps": 4}}, "diffusion.steps"),
    ({"diffusion": {"policy": "random"}}, "diffusion.policy"),
    ({"diffusion": {"policy": 1}}, "diffusion.policy"),
    ({"diffusion": {"policy": "threshold", "tokens_per_step": 17}}, "diffusion.tokens_per_step"),
    ({"diffusion": {"policy": "lossless", "tokens_per_step": 2}}, "diffusion.tokens_per_step"),
    ({"diffusion": {"policy": "lossless", "tokens_per_step": 0}}, "diffusion.tokens_per_step"),
    ({"diffusion": {"policy": "lossless", "threshold": 0.9}}, "diffusion.threshold"),
    ({"diffusion": {"policy": "threshold", "threshold": 0}}, "diffusion.threshold"),
    ({"diffusion": {"policy": "threshold", "threshold": 1e-9}}, "diffusion.threshold"),
    ({"diffusion": {"policy": "threshold", "threshold": 1.01}}, "diffusion.threshold"),
    ({"diffusion": {"policy": "threshold", "threshold": "0.9"}}, "diffusion.threshold"),
    ({"diffusion": {"policy": "threshold", "treshold": 0.9}}, "diffusion.treshold"),
    ({"diffusion": {"policy": "factor", "factor": -1}}, "diffusion.factor"),
    ({"diffusion": {"policy": "factor", "factor": math.nan}}, "diffusion.factor"),
    ({"diffusion": {"policy": "factor", "factor": 10**400}}, "diffusion.factor"),
    ({"diffusion": {"policy": "entropy_bound", "entropy_bound": -0.1}}, "diffusion.entropy_bound"),
    ({"diffusion": {"policy": "entropy_bound", "entropy_bound": True}}, "diffusion.entropy_bound"),
    ({"diffusion": {"threshold": 0.9}}, "diffusion.threshold"),
    ({"diffusion": {"policy": "threshold", "factor": 1}}, "diffusion.factor"),
    ({"diffusion": {"policy": "factor", "factor": 1, "entropy_bound": 0.1}}, "diffusion.entropy_bound"),
    ({"diffusion": {"entropy_sampling": 1}}, "diffusion.entropy_sampling"),
]

UNSUPPORTED = [
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"cache_salt": "mine"}, "cache_salt"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
]

TOLERATED = [
    {"user": "me", "metadata": {"a": 1}, "anything": [None]},
    {"n": 1, "best_of": 1, "echo": False, "stop": [], "suffix": "", "presence_penalty": 0.0, "frequency_penalty": 0},
    {"n": 2, "best_of": 2, "store": True, "logprobs": False},
    {"logprobs": None, "seed": None, "stop": None, "stream_options": None, "steering": None},
    {"steering": {}, "attribution": {}, "diffusion": {}},
    {"attribution": {"level": "token", "top_k": 0, "heads": ["known"]}},
    {"temperature": 0, "top_k": -1, "logit_bias": {}},
    {"max_tokens": 511},
    {"max_tokens": 0, "echo": True, "prompt": [3] * 512},
    {"max_tokens": 0, "echo": True, "prompt": ""},
]


@pytest.mark.parametrize(("fields", "param"), BAD_VALUES, ids=lambda value: str(value)[:60])
async def test_a_bad_value_is_refused_by_the_name_of_its_field(server, fields, param):
    one = server()
    response = await one.post({"prompt": "a", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param, error
    assert not one.engine.requests


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED, ids=lambda value: str(value)[:60])
async def test_a_field_that_is_not_served_is_refused_by_name_before_any_work(server, fields, param):
    one = server()
    # Also when something else is wrong: mending that would not help.
    response = await one.post({"prompt": "a", "min_tokens": -1, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_field", param)
    assert not one.engine.requests


async def test_guidance_with_lossless_drafts_is_refused_by_name(server):
    response = await server().post({"prompt": "a", "diffusion": {"cfg_scale": 1.0, "policy": "lossless"}})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_field", "diffusion.cfg_scale")


@pytest.mark.parametrize("fields", TOLERATED, ids=lambda value: str(value)[:60])
async def test_what_asks_for_nothing_is_tolerated(server, fields):
    response = await server().post({"prompt": "a", **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"a":' * 10_000,
        b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
        b'{"prompt":"a"} {}',
    ],
    ids=lambda body: str(body[:20]),
)
async def test_a_body_that_is_no_request_is_a_400(server, body):
    response = await server().post(body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        (b'{"prompt":"\xe9"}', {}, 400, "not UTF-8: byte 0xe9 at offset 11"),
        (b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", {}, 400, "too many digits"),
        (b"[" * 50_000, {}, 400, "nested too deeply"),
        (gzip.compress(b'{"prompt":"a"}'), {"content-encoding": "gzip"}, 415, "content-encoding is 'gzip'"),
    ],
    ids=["latin_1", "digits", "nesting", "gzip"],
)
async def test_a_body_that_cannot_be_read_is_told_why(server, body, headers, status, reason):
    async with server().client() as client:
        headers = {"content-type": "application/json", **headers}
        response = await client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize("nested", ["prompt", "steering", "logit_bias", "stop", "unknown"])
async def test_deep_nesting_breaks_nothing(server, nested):
    deep: object = 1
    for _ in range(400):
        deep = [deep]
    response = await server().post({"prompt": "a", nested: deep})
    assert response.status_code == (200 if nested == "unknown" else 400)


async def test_a_body_beyond_the_limit_is_a_413(server):
    response = await server().post({"prompt": "a" * 100_001})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_another_content_type_is_a_415_that_says_which(server):
    async with server().client() as client:
        response = await client.post("/v1/completions", data={"prompt": "a"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def json_values():
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**40), 10**40),
        st.integers(-3, 300),
        st.floats(),
        st.text(st.characters(), max_size=5),
        st.just("\ud800"),
    )
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys(), inner, max_size=3), max_leaves=8
    )


def keys():
    inner = ["concepts", "strength", "id", "weight", "interventions", "suppress", "concept", "level", "top_k", "1", "x"]
    return st.sampled_from(inner) | st.text(max_size=3)


FIELDS = [
    "prompt",
    "model",
    "max_tokens",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "steering",
    "attribution",
    "diffusion",
    "n",
    "best_of",
    "echo",
    "stop",
    "logprobs",
    "return_token_ids",
    "tools",
    "response_format",
]


@settings(max_examples=300, deadline=None)
@given(field=st.sampled_from(FIELDS), value=json_values())
def test_any_json_value_in_any_field_is_served_or_refused_by_name(server, field, value):
    """A malformed field that got as far as the engine once took the server down for everybody."""
    response = asyncio.run(server().post(json.dumps({"prompt": "a", "max_tokens": 4, field: value})))
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        # A bound may join two fields, as min_tokens and max_tokens.
        assert (response.json()["error"]["param"] or "").startswith((field, "max_tokens")), response.text


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"cfg_scale": 1}, "cfg_scale", "belongs into 'diffusion.cfg_scale'"),
        ({"tokens_per_step": 4}, "tokens_per_step", "belongs into 'diffusion.tokens_per_step'"),
        ({"concepts": ["a"], "strength": 3}, "concepts", "belongs into 'steering.concepts'"),
        ({"max_new_tokens": 8}, "max_new_tokens", "is 'max_tokens' here"),
        ({"steer": {"a": 3}}, "steer", "is 'steering' here"),
    ],
)
async def test_our_fields_in_the_wrong_place_are_refused_with_the_right_one(server, fields, param, said):
    """They were ignored, as unknown fields of ordinary clients are, and the text was simply not steered."""
    response = await server().post({"prompt": "a", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert said in error["message"]


async def test_an_attribution_without_a_level_is_of_tokens(server):
    answer = (await server().post({"prompt": "a", "max_tokens": 2, "attribution": {"top_k": 1}})).json()
    assert len(answer["attribution"][0]["tokens"]) == 2
    assert "attribution" not in (await server().post({"prompt": "a", "max_tokens": 2})).json()
