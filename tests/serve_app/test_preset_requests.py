"""Generations that name a preset: by `steering.preset`, or as a part of the model's name."""

from __future__ import annotations

import json

import pytest

from serve_app.presets import PresetStore

pytestmark = pytest.mark.anyio
PATH = "/v1/steering/presets"
MUSIC = {"interventions": [{"concepts": [2], "strength": 3.0, "layer": 1}]}
ANIMALS = {"interventions": [{"concepts": [0], "strength": 1.0}], "suppress": [{"concept": 4, "strength": 2.0}]}


@pytest.fixture
async def target(server, tmp_path):
    target = server(presets=PresetStore(tmp_path / "presets"))
    for steering in (MUSIC, ANIMALS):
        assert (await target.post({"name": "bookish", "steering": steering}, PATH)).status_code == 200
    return target


async def complete(target, path="/v1/completions", **body):
    body = {"max_tokens": 4, "seed": 1, **body}
    response = await target.post({"prompt": "a", **body} if path == "/v1/completions" else body, path)
    return response.json()


def concepts_of(target) -> list[tuple[int, ...]]:
    return [item.concept_ids for item in target.engine.requests[-1].steering.interventions]


async def test_a_version_does_what_its_steering_would_do(target):
    by_preset = await complete(target, steering={"preset": "bookish@1"})
    spelled_out = await complete(target, steering=MUSIC)
    assert by_preset["choices"] == spelled_out["choices"]
    assert target.engine.requests[0].steering == target.engine.requests[1].steering
    assert by_preset["steering"] == {**spelled_out["steering"], "preset": "bookish@1"}
    assert "preset" not in spelled_out["steering"]


async def test_a_name_alone_is_the_latest_version_and_the_answer_tells_which(target):
    answer = await complete(target, steering={"preset": "bookish"})
    assert answer["steering"]["preset"] == "bookish@2"
    assert [item["concept"]["id"] for item in answer["steering"]["suppress"]] == [4]


async def test_a_requests_own_steering_adds_to_the_presets(target):
    own = {"concepts": [1], "strength": 5, "suppress": [{"concept": 5, "strength": 1}]}
    await complete(target, steering={"preset": "bookish@2", **own})
    assert sorted(concepts_of(target)) == [(0,), (1,)]
    assert [item.concept_id for item in target.engine.requests[-1].steering.suppress] == [5, 4]


async def test_errors_count_the_requests_own_list(target):
    steering = {"preset": "bookish@1", "interventions": [{"concepts": [999], "strength": 1}]}
    answer = await complete(target, steering=steering)
    assert answer["error"]["param"] == "steering.interventions[0].concepts[0]"


@pytest.mark.parametrize("model", ["tiny@bookish@1", "tiny@bookish"])
async def test_a_model_may_be_named_with_a_preset(target, model):
    answer = await complete(target, model=model)
    assert answer["steering"]["preset"] == ("bookish@1" if model.endswith("1") else "bookish@2")
    messages = [{"role": "user", "content": "a"}]
    chat = await complete(target, "/v1/chat/completions", model=model, messages=messages)
    assert chat["steering"]["preset"] == answer["steering"]["preset"]


async def test_model_and_steering_may_name_the_same_preset_but_not_two(target):
    same = await complete(target, model="tiny@bookish@1", steering={"preset": "bookish@1"})
    assert same["steering"]["preset"] == "bookish@1"
    two = await complete(target, model="tiny@bookish@1", steering={"preset": "bookish@2"})
    assert two["error"]["param"] == "steering.preset"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"steering": {"preset": "nobody"}}, 404, "preset_not_found", "steering.preset"),
        ({"steering": {"preset": "bookish@9"}}, 404, "preset_not_found", "steering.preset"),
        ({"steering": {"preset": "../bookish"}}, 404, "preset_not_found", "steering.preset"),
        ({"model": "tiny@nobody"}, 404, "preset_not_found", "model"),
        ({"model": "other@bookish"}, 404, "model_not_found", "model"),
        ({"steering": {"preset": 3}}, 400, "invalid_value", "steering.preset"),
    ],
    ids=str,
)
async def test_a_preset_that_is_not_there_is_refused_before_any_work(target, body, status, code, param):
    response = await target.post({"prompt": "a", "max_tokens": 1, **body})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert not target.engine.requests


@pytest.mark.parametrize("more", [{"logprobs": 2}, {"max_tokens": 0}])
async def test_a_preset_that_would_change_nothing_is_refused(target, more):
    """Scores are the plain model's: a client that names a preset in the model's id would take them for steered ones."""
    answer = await complete(target, model="tiny@bookish", echo=True, **more)
    assert (answer["error"]["code"], answer["error"]["param"]) == ("invalid_value", "model")
    assert "has no effect" in answer["error"]["message"]
    assert not target.engine.requests and not target.engine.analyses
    assert "choices" in await complete(target, model="tiny", echo=True, **more)


async def test_tokenizers_take_the_name_that_generations_take_and_analyses_say_that_they_do_not(target):
    named, plain = ({"model": model, "prompt": "an animal"} for model in ("tiny@bookish", "tiny"))
    assert (await target.post(named, "/tokenize")).json() == (await target.post(plain, "/tokenize")).json()
    assert (await target.post({"model": "tiny@bookish", "tokens": [1]}, "/detokenize")).status_code == 200
    assert (await target.post({"model": "other@bookish", "tokens": [1]}, "/detokenize")).status_code == 404
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/concepts/inspect", {"input": "a"}),
        ("/v1/likelihoods", {"continuation": "a"}),
        ("/v1/traces/replay", {"trace": {}}),
        ("/v1/attributions/input", {"trace": {}}),
    ):
        response = await target.post({"model": "tiny@bookish", **body}, path)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "model") and "'tiny'" in error["message"]


@pytest.mark.parametrize("kept", ["delta", "reference"])
async def test_a_mode_of_overrides_is_the_one_that_was_asked_for(target, kept):
    overrides = [{"concept": 3, "weight": 0.5}]
    await target.post({"name": "set", "steering": {"overrides": overrides, "override_mode": kept}}, PATH)
    other = "reference" if kept == "delta" else "delta"
    assert (await complete(target, steering={"preset": "set"}))["steering"]["override_mode"] == kept
    assert (await complete(target, steering={"preset": "set", "override_mode": kept}))["steering"][
        "override_mode"
    ] == kept
    error = (await complete(target, steering={"preset": "set", "override_mode": other}))["error"]
    assert error["param"] == "steering.override_mode" and "use one mode" in error["message"]
    error = (await complete(target, steering={"preset": "bookish", "override_mode": "reference"}))["error"]
    assert error["param"] == "steering.override_mode" and "has overrides" in error["message"]


@pytest.mark.parametrize(
    ("steering", "param"),
    [
        ({"concepts": [{"id": 0, "weight": 1000}, {"id": 0, "weight": 1}], "strength": 1}, "steering.concepts"),
        (
            {"interventions": [{"concepts": [0], "strength": 1}] * 64, "concepts": [1], "strength": 1},
            "steering.interventions",
        ),
    ],
)
async def test_what_no_request_could_use_is_not_kept(target, steering, param):
    response = await target.post({"name": "big", "steering": steering}, PATH)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert (await target.get(f"{PATH}/big")).status_code == 404


async def test_a_presets_own_steering_can_be_posted_again(target):
    overrides = [{"concept": 3, "weight": 0.5}]
    await target.post({"name": "all", "steering": {**MUSIC, **ANIMALS, "overrides": overrides}}, PATH)
    for name in ("bookish@1", "bookish@2", "all"):
        kept = (await target.get(f"{PATH}/{name}")).json()["steering"]
        answer = (await target.post({"name": "again", "steering": kept}, PATH)).json()
        assert answer["steering"] == kept


async def test_a_preset_of_another_checkpoint_is_refused(target, tmp_path):
    file = tmp_path / "presets"
    kept = PresetStore(file)
    kept.add("foreign", "", kept.get("bookish@1").steering, "of another checkpoint")
    answer = await complete(target, steering={"preset": "foreign"})
    assert (answer["error"]["code"], answer["error"]["param"]) == ("preset_incompatible", "steering.preset")


async def test_what_is_too_much_together_is_refused(target):
    many = [{"concepts": [0], "strength": 1}] * 64
    answer = await complete(target, steering={"preset": "bookish@1", "interventions": many})
    assert answer["error"]["param"] == "steering.interventions"
    fits = await complete(target, steering={"preset": "bookish@1", "interventions": many[:63]})
    assert len(fits["steering"]["resolved"]) == 64


async def test_a_stream_tells_the_version_at_its_end(target):
    body = {"prompt": "a", "max_tokens": 2, "stream": True, "steering": {"preset": "bookish"}}
    lines = (await target.post(body)).text.splitlines()
    told = [json.loads(line[6:]).get("steering") for line in lines if line.startswith("data: {")]
    assert [steering["preset"] for steering in told if steering] == ["bookish@2"]


async def test_models_are_listed_with_the_presets_that_they_can_use(target, tmp_path):
    kept = PresetStore(tmp_path / "presets")
    kept.add("foreign", "", kept.get("bookish").steering, "of another checkpoint")
    models = (await target.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["tiny", "tiny@bookish"]
    for model in ("tiny@bookish", "tiny@bookish@1"):
        assert (await target.get(f"/v1/models/{model}")).json()["id"] == model
    for model in ("tiny@nobody", "tiny@bookish@7", "other@bookish"):
        assert (await target.get(f"/v1/models/{model}")).status_code == 404


async def test_a_request_that_is_explained_may_name_a_preset_too(target):
    request = {"prompt": "a", "max_tokens": 2, "seed": 1, "steering": {"preset": "bookish@1"}}
    response = await target.post({"request": request}, "/v1/attributions/input")
    assert response.status_code == 200
    assert concepts_of(target) == [(2,)]
    request["steering"]["preset"] = "nobody"
    error = (await target.post({"request": request}, "/v1/attributions/input")).json()["error"]
    assert (error["code"], error["param"]) == ("preset_not_found", "request.steering.preset")
