"""POST /v1/attributions/input and /v1/traces/replay, on a real engine of a tiny checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine import AttributeInputs, Trace, limits
from serve_app.schemas.input_attribution import InputAttributionAnswer, ReplayAnswer
from tests.serve_app.real_api import RealApi, real_api

pytestmark = pytest.mark.anyio

INPUT, REPLAY = "/v1/attributions/input", "/v1/traces/replay"
ASKED = {"prompt": "a small animal", "max_tokens": 20, "seed": 3}


class Api(RealApi):
    async def explain(self, **body):
        response = await self.post(INPUT, {"n_steps": 3, **body})
        assert response.status_code == 200, response.text
        InputAttributionAnswer.model_validate_json(response.content)
        return response.json()


@pytest.fixture
async def api(folder, served) -> AsyncIterator[Api]:
    async with real_api(folder, served, kind=Api) as api:
        yield api


async def test_a_request_is_generated_and_explained_as_the_engine_does(api, served):
    answer = await api.explain(request=ASKED)
    generated = (await api.post("/v1/completions", {**ASKED, "return_token_ids": True})).json()
    (choice,) = generated["choices"]
    prompt_ids = choice["prompt_token_ids"]
    start = len(prompt_ids)
    assert (answer["object"], answer["model"], answer["n_steps"]) == ("input_attribution", "tiny", 3)
    assert answer["diffusion"] == {"seed": 3}
    tokens = answer["tokens"]
    assert [t["token_id"] for t in tokens] == [*prompt_ids, *choice["token_ids"]]
    assert [t["position"] for t in tokens] == list(range(start + 20))
    assert [t["role"] for t in tokens] == ["prompt"] * start + ["generated"] * 20
    assert bytes(b for t in tokens[:start] for b in t["bytes"]).decode() == "a small animal"
    assert [t["position"] for t in answer["targets"]] == list(range(20))
    assert [t["token_id"] for t in answer["targets"]] == choice["token_ids"]
    ask = AttributeInputs(trace=Trace.from_dict(answer["trace"]), num_steps=3)
    for told, found in zip(answer["targets"], (await api.engine.analyze(ask)).targets, strict=True):
        assert told["token"] == served.tokenizer.token_name(found.token_id)
        assert told["logit"] == pytest.approx(found.target_logit, abs=1e-5)
        assert told["baseline_logit"] == pytest.approx(found.baseline_logit, abs=1e-5)
        assert told["completeness_error"] == pytest.approx(found.completeness_error, abs=1e-5)
        given = [[i, v] for i, v in enumerate(found.contributions) if v]
        assert [i for i, _ in told["contributions"]] == [i for i, _ in given]
        assert [v for _, v in told["contributions"]] == pytest.approx([v for _, v in given], abs=1e-5)


async def test_a_trace_in_its_place_gives_the_same_and_tells_no_seed(api):
    first = await api.explain(request={**ASKED, "diffusion": {"tokens_per_step": 3}})
    again = await api.explain(trace=first["trace"])
    assert "diffusion" not in again
    assert first == {**again, "diffusion": {"seed": 3}}


async def test_targets_and_the_largest_contributions_can_be_chosen(api):
    whole = await api.explain(request=ASKED)
    some = await api.explain(request=ASKED, targets=[17, 2], top_k=4)
    assert [t["position"] for t in some["targets"]] == [2, 17]
    for target in some["targets"]:
        given = whole["targets"][target["position"]]["contributions"]
        assert target["contributions"] == sorted(given, key=lambda pair: -abs(pair[1]))[:4]
        assert len(given) > 4
    assert some["tokens"] == whole["tokens"]


async def test_a_conversation_can_be_explained(api):
    messages = [{"role": "user", "content": "sing"}]
    body = {"messages": messages, "max_tokens": 8, "seed": 1, "ignore_eos": True, "temperature": 0}
    answer = await api.explain(request=body)
    generated = (await api.post("/v1/chat/completions", {**body, "return_token_ids": True})).json()
    ids = [t["token_id"] for t in answer["tokens"]]
    assert ids == [*generated["prompt_token_ids"], *generated["choices"][0]["token_ids"]]
    assert [t["position"] for t in answer["targets"]] == list(range(8))


async def test_steering_is_replayed(api):
    steering = {"interventions": [{"concepts": [{"id": 2}], "strength": 6.0}]}
    answer = await api.explain(request={**ASKED, "steering": steering}, targets=[0])
    assert answer["trace"]["steering"]["interventions"][0]["concept_ids"] == [2]
    replay = (await api.post(REPLAY, {"trace": answer["trace"]})).json()
    assert replay["largest_difference"] < 1e-4


async def test_what_stands_right_of_an_end_is_told_as_what_the_model_saw(api, served):
    config = served.config
    ended = None
    for seed in range(60):
        body = {"prompt": "a", "max_tokens": 30, "seed": seed, "temperature": 3.0, "diffusion": {"tokens_per_step": 2}}
        answer = await api.explain(request=body, targets=None, n_steps=1)
        if any(t["role"] == "end_of_text" for t in answer["tokens"]):
            ended = answer
            break
    assert ended is not None, "no seed gave a text that ends"
    start = len(ended["trace"]["prompt_token_ids"])
    end = next(t["position"] for t in ended["tokens"] if t["role"] == "generated" and t["token_id"] == config.eot_id)
    past = [t for t in ended["tokens"] if t["position"] > end]
    assert {(t["role"], t["token_id"]) for t in past} == {("end_of_text", config.eos_token_id)}
    assert all(t["position"] < end - start for t in ended["targets"]), "the text alone is explained"


async def test_a_replay_tells_each_commit_beside_what_was_recorded(api):
    trace = (await api.explain(request={**ASKED, "temperature": 0}, targets=[0]))["trace"]
    response = await api.post(REPLAY, {"trace": trace})
    ReplayAnswer.model_validate_json(response.content)
    replay = response.json()
    assert replay["object"] == "trace_replay"
    assert replay["largest_difference"] < 1e-4
    assert replay["num_likeliest"] == len(replay["commits"]) == 20
    for commit, recorded in zip(replay["commits"], trace["commits"], strict=True):
        assert {name: commit[name] for name in ("position", "token_id", "denoising_step")} == {
            name: recorded[name] for name in ("position", "token_id", "denoising_step")
        }
        assert commit["recorded_logit"] == recorded["target_logit"]
        assert commit["logit"] == pytest.approx(recorded["target_logit"], abs=1e-4)
        assert commit["logprob"] < 0
    trace["commits"][4]["token_id"] = 5 if trace["commits"][4]["token_id"] != 5 else 6
    changed = (await api.post(REPLAY, {"trace": trace})).json()
    assert changed["commits"][4]["rank"] > 0 and changed["largest_difference"] > 1e-3
    assert changed["commits"][:4] == replay["commits"][:4], "it comes after them"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, None, "needs `request` or `trace`, and neither is there"),
        ({"request": ASKED, "trace": {}}, None, "both are there"),
        ({"request": ASKED, "n_step": 4}, "n_step", "unknown field"),
        ({"request": ASKED, "n_steps": 0}, "n_steps", "greater than or equal to 1"),
        ({"request": ASKED, "n_steps": 257}, "n_steps", "less than or equal to 256"),
        ({"request": ASKED, "targets": [0, 20]}, "targets[1]", r"from 0 to 19"),
        ({"request": ASKED, "targets": []}, "targets", "at least 1"),
        ({"request": {**ASKED, "n": 2}}, "request.n", "2 choices; at most 1"),
        ({"request": {**ASKED, "prompt": ["a", "b"]}}, "request.prompt", "2 prompts"),
        ({"request": {**ASKED, "stream": True}}, "request.stream", "nothing to stream"),
        ({"request": {**ASKED, "temperature": "hot"}}, "request.temperature", "valid number"),
        ({"request": {**ASKED, "echo": True, "max_tokens": 0}}, "request.max_tokens", "nothing to explain"),
        ({"request": {**ASKED, "max_tokens": 300}}, "targets", f"max_tokens is 300 and at most {limits.MAX_TARGETS}"),
        ({"request": {**ASKED, "max_tokens": 600}}, "request.max_tokens", "together at most 512"),
        ({"trace": {"version": 9}}, "trace.version", "version is 9"),
        ({"trace": {}}, "trace.version", "version is None"),
    ],
)
async def test_what_cannot_be_explained_is_refused_by_name(api, body, param, words):
    error = await api.refusal(INPUT, body)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"diffusion": {"cfg_scale": 1.5}}, "diffusion.cfg_scale", "cfg_scale is 1.5, and guided generations"),
        (
            {"steering": {"overrides": [{"concept": 1, "weight": 1}]}},
            "steering.overrides",
            "overrides of concept weights",
        ),
    ],
)
async def test_what_no_gradient_is_served_for_has_a_code_of_its_own_and_the_bodys_own_name(api, more, param, words):
    error = await api.refusal(INPUT, {"request": {**ASKED, **more}})
    assert (error["code"], error["param"]) == ("attribution_unsupported", f"request.{param}")
    assert words in error["message"]
    trace = (await api.explain(request=ASKED, targets=[0]))["trace"]
    for path in (INPUT, REPLAY):
        error = await api.refusal(path, {"trace": {**trace, "cfg_scale": 1.5}})
        assert (error["code"], error["param"]) == ("attribution_unsupported", "trace.cfg_scale")


async def test_another_model_is_not_found(api):
    response = await api.post(INPUT, {"model": "other", "request": ASKED})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    response = await api.post(REPLAY, {"model": "other", "trace": {}})
    assert response.status_code == 404


async def test_a_token_that_nobody_chose_is_no_target(api):
    trace = (await api.explain(request=ASKED, targets=[0]))["trace"]
    trace["commits"] = trace["commits"][:1]
    missing = 0 if trace["commits"][0]["position"] != len(trace["prompt_token_ids"]) else 1
    error = await api.refusal(INPUT, {"trace": trace, "targets": [missing]})
    assert error["param"] == "targets[0]" and "chose no token" in error["message"]


async def test_a_trace_that_the_model_cannot_have_left_is_refused(api, served):
    trace = (await api.explain(request=ASKED, targets=[0]))["trace"]
    trace["commits"][0]["token_id"] = served.config.mask_token_id
    for path in (INPUT, REPLAY):
        error = await api.refusal(path, {"trace": trace})
        assert (error["param"], error["code"]) == ("trace.commits", "invalid_value")
        assert "never chosen" in error["message"]


@pytest.mark.parametrize(
    ("path", "value", "param"),
    [
        (("prompt_token_ids", 0), -1, "trace.prompt_token_ids"),
        (("stop_token_ids",), [10**30], "trace.stop_token_ids"),
        (("steering", "interventions", 0, "layer"), 99, "trace.steering.interventions[0].layer"),
        (("steering", "interventions", 0, "concept_ids"), [10**6], "trace.steering.interventions[0].concept_ids"),
    ],
)
async def test_what_is_wrong_in_a_trace_is_named_as_a_part_of_it(api, path, value, param):
    """The engine checks a trace as the request behind it, and errors named fields that the body does not have."""
    steering = {"interventions": [{"concepts": [2], "strength": 2.0}]}
    trace = (await api.explain(request={**ASKED, "steering": steering}, targets=[0]))["trace"]
    part = trace
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    for route in (INPUT, REPLAY):
        assert (await api.refusal(route, {"trace": trace}))["param"] == param


async def test_what_the_engine_never_explains_is_refused_before_anything_is_generated(server):
    fake = server()

    async def refuse(asked):
        raise RuntimeError("as an engine that has no gradients")

    fake.engine.analyze = refuse
    response = await fake.post({"request": ASKED}, INPUT)
    assert response.status_code == 500
    assert not fake.engine.requests


async def test_a_caller_that_leaves_ends_the_analysis(server):
    fake, begun, ended = server(), asyncio.Event(), []
    explain = fake.engine.analyze

    async def analyze(asked):
        if not asked.trace.commits:
            return await explain(asked)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asked)

    fake.engine.analyze = analyze
    asking = asyncio.ensure_future(fake.post({"request": ASKED}, INPUT))
    await begun.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert len(ended) == 1 and not fake.engine.aborted
