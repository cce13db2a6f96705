"""POST /v1/completions on a FakeEngine: what is in an answer, plain and streamed."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine import InvalidValue, NonFiniteLogits, QueueFull
from serve_app.completions import merge
from tests.serve_app.streams import diffusion_of, events_of, streamed_text

pytestmark = pytest.mark.anyio

STEPS = {"stream_options": {"include_diffusion": "steps"}}


async def test_a_plain_answer_has_the_shape_of_openais(server):
    response = await server().post({"prompt": "a small animal", "max_tokens": 20, "seed": 3})
    answer = response.json()
    assert response.status_code == 200
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    (choice,) = answer["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 20,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["diffusion"] == {
        "blocks": 2,
        "denoising_steps": 20,
        "forward_passes": 21,
        "policy": "confidence",
        "tokens_per_step": 1,
        "sampler": "entropy",
        "repetition_penalty": 1.1,
        "seed": 3,
    }
    assert "steering" not in answer
    assert "attribution" not in answer


@pytest.mark.parametrize(
    ("diffusion", "told"),
    [
        ({"tokens_per_step": 3}, {"policy": "confidence", "tokens_per_step": 3}),
        ({"policy": "threshold"}, {"policy": "threshold", "threshold": 0.9, "tokens_per_step": 16}),
        ({"policy": "factor", "factor": 2}, {"policy": "factor", "factor": 2.0, "tokens_per_step": 16}),
        (
            {"policy": "entropy_bound", "entropy_bound": 0, "tokens_per_step": 5},
            {"policy": "entropy_bound", "entropy_bound": 0.0, "tokens_per_step": 5},
        ),
        ({"policy": "lossless"}, {"policy": "lossless", "tokens_per_step": 1}),
        ({"policy": "lossless", "tokens_per_step": 1}, {"policy": "lossless", "tokens_per_step": 1}),
    ],
)
async def test_the_answer_says_which_policy_ran_with_what(server, diffusion, told):
    one = server()
    body = {"prompt": "a", "max_tokens": 20, "diffusion": diffusion}
    answer = (await one.post(body)).json()
    options = {"include_diffusion": "blocks"}
    events = events_of(await one.post({**body, "stream": True, "stream_options": options}))
    done = [event["diffusion"] for event in events if event.get("diffusion", {}).get("type") == "generation.done"]
    fields = {"policy", "tokens_per_step", "threshold", "factor", "entropy_bound"}
    for part in (answer["diffusion"], *done):
        assert {key: value for key, value in part.items() if key in fields} == told
    assert len(done) == 1
    assert one.engine.requests[0].sampling.policy == told["policy"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 100},
        {"diffusion": {"tokens_per_step": 5}},
        {"diffusion": {"policy": "threshold", "threshold": 0.5}},
        {"prompt": ""},
        {"prompt": [64] * 16},
        {"steering": {"concepts": [2], "strength": 3}},
        {"attribution": {"level": "both"}},
    ],
)
@pytest.mark.parametrize("detail", ["off", "blocks", "steps"])
async def test_streamed_text_equals_plain_text(server, fields, detail):
    body = {"prompt": "a small animal", "max_tokens": 40, "seed": 3, **fields}
    plain = (await server().post(body)).json()
    options = {"include_diffusion": detail, "include_usage": True}
    events = events_of(await server().post({**body, "stream": True, "stream_options": options}))
    assert streamed_text(events) == plain["choices"][0]["text"]
    assert events[-1]["usage"] == plain["usage"]


async def test_a_default_stream_holds_standard_chunks_only(server):
    events = events_of(await server().post({"prompt": "a", "max_tokens": 20, "stream": True}))
    assert all(event.keys() == {"id", "object", "created", "model", "choices"} for event in events)
    assert all(len(event["choices"]) == 1 for event in events)
    assert len({event["id"] for event in events}) == 1
    assert all(event["choices"][0]["text"] for event in events[:-1]), "no empty chunk before the first text"
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]


async def test_usage_comes_once_in_a_chunk_without_choices_and_is_null_elsewhere(server):
    body = {"prompt": "a", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    *others, last = events_of(await server().post(body))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert all(event["usage"] is None and event["choices"] for event in others)


async def test_continuous_usage_counts_the_text_so_far(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(
        await server().post({"prompt": "a", "max_tokens": 20, "stream": True, "stream_options": options})
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 20


async def test_step_events_commit_every_position_once_and_make_up_each_block(server):
    # Six tokens of prompt share the first block of sixteen.
    body = {"prompt": "a small animal", "max_tokens": 30, "stream": True, **STEPS}
    events = events_of(await server().post(body))
    found = diffusion_of(events)
    assert [event["seq"] for event in found] == list(range(len(found)))
    assert found[0] == {"seq": 0, "type": "generation.started", "index": 0, "block_length": 16, "prompt_tail": 6}
    places = [(e["block"], e["start"], e["end"]) for e in found if e["type"] == "block.started"]
    assert places == [(0, 0, 10), (1, 10, 26), (2, 26, 30)]
    sealed = diffusion_of(events, "block.sealed")
    assert [(e["block"], e["start"], e["end"]) for e in sealed] == places
    assert "".join(event["text"] for event in sealed) == streamed_text(events)
    for block, start, end in places:
        steps = [event for event in found if event["type"] == "step" and event["block"] == block]
        positions = [commit["position"] for event in steps for commit in event["commits"]]
        assert sorted(positions) == list(range(start, end))
    commits = {c["position"]: bytes(c["bytes"]) for e in diffusion_of(events, "step") for c in e["commits"]}
    assert b"".join(commits[i] for i in range(30)).decode("utf-8", "replace") == streamed_text(events)


async def test_block_events_leave_the_steps_out(server):
    body = {"prompt": "a", "max_tokens": 20, "stream": True, "stream_options": {"include_diffusion": "blocks"}}
    kinds = [event["type"] for event in diffusion_of(events_of(await server().post(body)))]
    blocks = ["block.started", "block.sealed"] * 2
    assert kinds == ["generation.started", *blocks, "generation.done"]


async def test_the_last_diffusion_event_carries_what_a_plain_answer_would(server):
    body = {
        "prompt": "a",
        "max_tokens": 9,
        "seed": 4,
        "steering": {"concepts": ["music"], "strength": 8},
        "attribution": {"level": "both", "top_k": 2},
    }
    plain = (await server().post(body)).json()
    events = events_of(await server().post({**body, "stream": True, **STEPS}))
    (done,) = [event for event in events if event.get("diffusion", {}).get("type") == "generation.done"]
    assert (done["steering"], done["attribution"]) == (plain["steering"], plain["attribution"])
    assert done["diffusion"].items() >= plain["diffusion"].items()
    assert done["diffusion"]["steps"] == 9
    assert all("steering" not in event and "attribution" not in event for event in events if event is not done)


async def test_without_diffusion_events_the_last_chunk_carries_what_was_asked_for(server):
    body = {"prompt": "a", "max_tokens": 9, "seed": 4, "attribution": {"level": "token"}}
    plain = (await server().post(body)).json()
    *others, last = events_of(await server().post({**body, "stream": True}))
    assert last["choices"][0]["finish_reason"] == "length"
    assert (last["attribution"], last["diffusion"]) == (plain["attribution"], plain["diffusion"])
    assert all("attribution" not in event for event in others)


async def test_attribution_sums_to_the_logit_and_its_bytes_to_the_text(server):
    body = {"prompt": "a", "max_tokens": 20, "attribution": {"level": "both", "top_k": 1}}
    answer = (await server().post(body)).json()
    (entry,) = answer["attribution"]
    assert [token["position"] for token in entry["tokens"]] == list(range(20))
    for token in entry["tokens"]:
        parts = token["known_total"] + token["discovered_total"] + token["epsilon"]
        assert parts == pytest.approx(token["logit"], abs=1e-5)
    text = b"".join(bytes(token["bytes"]) for token in entry["tokens"]).decode("utf-8", "replace")
    assert text == answer["choices"][0]["text"]
    assert sorted(token["commit_order"] for token in entry["tokens"]) == list(range(20))
    assert entry["chunks"][0]["end"] == 20


async def test_chunks_are_cut_at_end_of_chunk_tokens_which_have_no_text(server, served):
    a, b, end = served.tokenizer.encode("a")[0], served.tokenizer.encode("b")[0], served.config.endofchunk_token_id
    body = {"prompt": "a", "max_tokens": 7, "attribution": {"level": "chunk"}}
    answer = (await server(script=[a, a, end, b]).post(body)).json()
    assert answer["choices"][0]["text"] == "aabaa"
    chunks = answer["attribution"][0]["chunks"]
    assert [(c["start"], c["end"], c["text"]) for c in chunks] == [(0, 2, "aa"), (3, 6, "baa")]


async def test_steps_name_concepts_only_when_attribution_is_asked_for(server):
    body = {"prompt": "a", "max_tokens": 3, "stream": True, **STEPS}
    commits = [c for e in diffusion_of(events_of(await server().post(body)), "step") for c in e["commits"]]
    assert all("concepts" not in commit for commit in commits)
    body["attribution"] = {"level": "token", "top_k": 3}
    commits = [c for e in diffusion_of(events_of(await server().post(body)), "step") for c in e["commits"]]
    assert all(len(commit["concepts"]) == 3 for commit in commits)
    contributions = [abs(concept["contribution"]) for concept in commits[0]["concepts"]]
    assert contributions == sorted(contributions, reverse=True)


async def test_an_end_token_ends_the_text_and_is_no_part_of_it(server, served):
    a, eot = served.tokenizer.encode("a")[0], served.config.eot_id
    body = {"prompt": "a", "max_tokens": 40}
    script = [a, a, a, a, a, eot]
    plain = (await server(script=script).post(body)).json()
    assert (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]) == ("aaaaa", "stop")
    assert plain["usage"]["completion_tokens"] == 5
    events = events_of(await server(script=script).post({**body, "stream": True, **STEPS}))
    assert streamed_text(events) == "aaaaa"
    assert diffusion_of(events, "block.sealed")[-1]["end"] == 5


async def test_half_a_character_before_an_end_token_belongs_to_the_last_block(server, served):
    half = next(i for i in range(272) if served.tokenizer.text_bytes(i) == b"\xc3")
    one = server(script=[half, half, served.config.eot_id])
    events = events_of(await one.post({"prompt": "a", "max_tokens": 40, "stream": True, **STEPS}))
    assert (
        "".join(event["text"] for event in diffusion_of(events, "block.sealed"))
        == streamed_text(events)
        == "\ufffd" * 2
    )


async def test_blocks_and_positions_count_from_the_end_of_the_prompt(server):
    body = {"prompt": [64] * 40, "max_tokens": 12, "attribution": {"level": "token"}}
    tokens = (await server().post(body)).json()["attribution"][0]["tokens"]
    assert [(token["position"], token["block"]) for token in tokens] == [(i, int(i >= 8)) for i in range(12)]
    events = events_of(await server().post({**body, "stream": True, **STEPS}))
    places = [(e["block"], e["start"], e["end"]) for e in diffusion_of(events, "block.started")]
    assert places == [(0, 0, 8), (1, 8, 12)]
    assert {event["block"] for event in diffusion_of(events, "step")} == {0, 1}


async def test_ignore_eos_writes_on(server, served):
    a, eot = served.tokenizer.encode("a")[0], served.config.eot_id
    answer = (await server(script=[a, eot]).post({"prompt": "a", "max_tokens": 8, "ignore_eos": True})).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("aaaa", 8)
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_stop_token_ids_end_the_text(server, served):
    a, b = served.tokenizer.encode("a")[0], served.tokenizer.encode("b")[0]
    answer = (await server(script=[a, a, b]).post({"prompt": "a", "max_tokens": 8, "stop_token_ids": [b]})).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("aa", "stop")


async def test_steering_is_told_with_names_and_what_it_became(server):
    body = {
        "prompt": "a",
        "max_tokens": 3,
        "steering": {
            "interventions": [{"concepts": ["music", {"id": 0, "weight": 0.5}], "strength": 4, "layer": 2}],
            "suppress": [{"concept": 1, "strength": 20}],
        },
    }
    steering = (await server().post(body)).json()["steering"]
    assert steering == {
        "resolved": [
            {
                "concepts": [
                    {"id": 2, "name": "Music", "weight": 1.0},
                    {"id": 0, "name": "Animals", "weight": 0.5},
                ],
                "alpha": 2.0,
                "peak_logit": 2.0,
                "layer": 2,
                "schedule": "fixed",
            }
        ],
        "suppress": [{"concept": {"id": 1, "name": "Animal husbandry"}, "strength": 20.0}],
    }


async def test_overrides_of_either_head_are_told_with_names(server):
    one = server()
    steering = {"overrides": [{"concept": "Plants", "weight": 0.9}, {"concept": 57, "weight": 0}]}
    answer = (await one.post({"prompt": "a", "max_tokens": 3, "steering": steering})).json()
    assert answer["steering"] == {
        "resolved": [],
        "suppress": [],
        "overrides": [
            {"concept": {"id": 3, "name": "Plants"}, "head": "known", "weight": 0.9},
            {"concept": {"id": 57, "name": None}, "head": "discovered", "weight": 0.0},
        ],
        "override_mode": "delta",
    }
    (request,) = one.engine.requests
    asked = [(item.head, item.concept_id, item.weight) for item in request.steering.overrides]
    assert asked == [("known", 3, 0.9), ("discovered", 7, 0.0)]


async def test_steering_changes_the_text(server):
    plain = {"prompt": "a", "max_tokens": 20, "seed": 1}
    texts = {
        (await server().post({**plain, **steering})).json()["choices"][0]["text"]
        for steering in (
            {},
            {"steering": {"concepts": [2], "strength": 1}},
            {"steering": {"concepts": [2], "strength": 2}},
        )
    }
    assert len(texts) == 3


async def test_a_list_of_prompts_gives_each_the_answer_it_has_alone(server):
    prompts = ["a sea", "an animal", ""]
    body = {"max_tokens": 20, "seed": 2, "attribution": {"level": "token"}}
    alone = [(await server().post({**body, "prompt": prompt})).json() for prompt in prompts]
    together = (await server().post({**body, "prompt": prompts})).json()
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    assert [c["text"] for c in together["choices"]] == [a["choices"][0]["text"] for a in alone]
    assert together["usage"]["total_tokens"] == sum(a["usage"]["total_tokens"] for a in alone)
    assert [entry["tokens"] for entry in together["attribution"]] == [a["attribution"][0]["tokens"] for a in alone]
    events = events_of(await server().post({**body, "prompt": prompts, "stream": True}))
    for index, answer in enumerate(alone):
        assert streamed_text(events, index) == answer["choices"][0]["text"]
    reasons = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert reasons == [0, 1, 2]


async def test_two_clients_at_once_get_the_answers_they_get_alone(server):
    one = server()
    bodies = [{"prompt": prompt, "max_tokens": 30, "seed": 5} for prompt in ("a sea", "an animal")]
    alone = [(await one.post(body)).json()["choices"] for body in bodies]
    together = await asyncio.gather(*(one.post(body) for body in bodies))
    assert [response.json()["choices"] for response in together] == alone


def raises(error: Exception, at: int):
    async def before(request, number: int) -> None:
        if number == at:
            raise error

    return before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidValue("no", param="sampling.top_k"), 400, "invalid_value"),
        (QueueFull("full"), 429, "queue_full"),
        (RuntimeError("a defect"), 500, "internal_error"),
    ],
)
async def test_what_refuses_a_request_is_a_status_also_for_a_stream(server, error, status, code, stream):
    one = server(before=raises(error, 0))
    response = await one.post({"prompt": "a", "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert not one.engine.running


async def test_one_refused_prompt_refuses_the_list_and_cancels_the_others(server):
    async def before(request, number: int) -> None:
        if request.request_id.endswith("-1"):
            raise QueueFull("full")
        if number > 0:
            await asyncio.Event().wait()

    one = server(before=before)
    response = await one.post({"prompt": ["a", "b", "c"], "stream": True})
    assert response.status_code == 429
    assert not one.engine.running


@pytest.mark.parametrize("options", [{"before": raises(NonFiniteLogits("NaN"), 4)}, {"error": "no finite logits"}])
async def test_what_fails_on_the_way_is_a_500_for_a_plain_request(server, options):
    response = await server(**options).post({"prompt": "a", "max_tokens": 9})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


class Connection:
    """One request by the letter of ASGI: what was sent, whether it ended well, and a client that can leave."""

    def __init__(self, app, body: dict) -> None:
        self.app, self.messages, self.left = app, [], asyncio.Event()
        self._body = json.dumps(body).encode()
        self._is_read = False

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json"), (b"host", b"test")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> dict:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        self.messages.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


async def test_an_error_in_a_stream_is_its_last_event_and_the_stream_never_ends_well(server):
    one = server(before=raises(NonFiniteLogits("NaN at position 3"), 6))
    connection = Connection(one.app, {"prompt": "a", "max_tokens": 30, "stream": True})
    with pytest.raises(Exception, match="the stream ended with an error"):
        await connection.run()
    assert connection.messages[0]["status"] == 200
    last = json.loads(connection.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "non_finite_logits"
    assert "[DONE]" not in connection.text
    assert connection.messages[-1]["more_body"], "a finished body would look like success"
    assert not one.engine.running


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "stream": True}])
async def test_a_client_that_leaves_cancels_its_request_in_the_engine(server, body):
    is_held = asyncio.Event()

    async def before(request, number: int) -> None:
        if number == 5:
            is_held.set()
            await asyncio.Event().wait()

    one = server(before=before)
    connection = Connection(one.app, {"prompt": "a", "max_tokens": 30, **body})
    running = asyncio.ensure_future(connection.run())
    await is_held.wait()
    assert one.engine.running
    connection.left.set()
    await running
    assert not one.engine.running
    assert len(one.engine.aborted) == len(one.engine.requests)


async def test_a_client_that_leaves_while_it_waits_for_a_place_cancels_too(server):
    is_held = asyncio.Event()

    async def before(request, number: int) -> None:
        is_held.set()
        await asyncio.Event().wait()

    one = server(before=before)
    connection = Connection(one.app, {"prompt": "a", "stream": True})
    running = asyncio.ensure_future(connection.run())
    await is_held.wait()
    connection.left.set()
    await running
    assert not one.engine.running


async def test_merge_waits_for_every_first_item_and_closes_all_sources_on_an_error():
    closed = []

    async def source(name: str, *items: object):
        try:
            for item in items:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                yield item
            await asyncio.Event().wait()
        finally:
            closed.append(name)

    merged = merge([source("a", 1, 2), source("b", 3, RuntimeError("broken"))])
    items = []
    with pytest.raises(RuntimeError, match="broken"):
        async for item in merged:
            items.append(item)
    assert {index for index, _ in items[:2]} == {0, 1}
    assert sorted(closed) == ["a", "b"]
