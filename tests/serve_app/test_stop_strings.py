"""`stop` through the API: text, usage and events end together, and the engine is told to leave off."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve_app.streams import diffusion_of, events_of, streamed_text

pytestmark = pytest.mark.anyio

STEPS = {"stream_options": {"include_diffusion": "steps", "include_usage": True}}


@pytest.fixture(scope="module")
def abc(served) -> list[int]:
    """Ids of the letters a, b and c."""
    return [served.tokenizer.encode(letter)[0] for letter in "abc"]


async def test_the_text_ends_before_the_stop_string_and_the_engine_is_cancelled(server, abc):
    one = server(script=abc)
    answer = (await one.post({"prompt": "a", "max_tokens": 100, "stop": "ca"})).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "ca")
    assert answer["usage"]["completion_tokens"] == 4, "up to the token that completes the stop string"
    assert (one.engine.running, len(one.engine.aborted)) == (set(), 1)


async def test_the_stop_string_may_stay_in_the_text(server, abc):
    body = {"prompt": "a", "max_tokens": 100, "stop": ["x", "ca"], "include_stop_str_in_output": True}
    assert (await server(script=abc).post(body)).json()["choices"][0]["text"] == "abca"


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "cab", "max_tokens": 4}, "abca", ("length", None)),
        ({"stop": "ca", "max_tokens": 3}, "abc", ("length", None)),
        ({"stop": ["cab", "b"], "min_tokens": 2}, "ab", ("stop", "cab")),
        ({"stop": "b", "min_tokens": 2}, "abca", ("stop", "b")),
    ],
)
async def test_what_was_held_back_comes_in_the_end_and_min_tokens_is_kept(server, abc, fields, text, reason):
    one = server(script=abc)
    body = {"prompt": "a", "max_tokens": 100, **fields}
    choice = (await one.post(body)).json()["choices"][0]
    assert (choice["text"], (choice["finish_reason"], choice["stop_reason"])) == (text, reason)
    events = events_of(await one.post({**body, "stream": True}))
    assert streamed_text(events) == text
    assert (events[-1]["choices"][0]["finish_reason"], events[-1]["choices"][0]["stop_reason"]) == reason


async def test_an_end_token_has_its_id_for_a_reason_unless_it_ends_every_turn(server, served, abc):
    a, b, _ = abc
    body = {"prompt": "a", "max_tokens": 9, "stop": "zz"}
    choice = (await server(script=[a, b]).post({**body, "stop_token_ids": [b]})).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", b)
    choice = (await server(script=[a, served.config.eot_id]).post(body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)


@pytest.mark.parametrize("stop", ["q", "xy", ["a" * 30], ["th", "in"]])
@pytest.mark.parametrize("tokens_per_step", [1, 5, 16])
@pytest.mark.parametrize("detail", ["off", "blocks", "steps"])
async def test_streamed_text_usage_and_work_equal_those_of_the_plain_answer(server, stop, tokens_per_step, detail):
    body = {
        "prompt": "a small animal",
        "max_tokens": 120,
        "seed": 3,
        "stop": stop,
        "diffusion": {"tokens_per_step": tokens_per_step},
        "attribution": {"level": "both"},
    }
    plain = (await server().post(body)).json()
    options = {"include_diffusion": detail, "include_usage": True}
    events = events_of(await server().post({**body, "stream": True, "stream_options": options}))
    assert streamed_text(events) == plain["choices"][0]["text"]
    assert events[-1]["usage"] == plain["usage"]
    (last,) = [event for event in events if "attribution" in event]
    assert last["attribution"] == plain["attribution"]
    assert len(last["attribution"][0]["tokens"]) == plain["usage"]["completion_tokens"]
    assert last["diffusion"].items() >= plain["diffusion"].items()


async def test_the_events_of_a_text_that_ended_early_are_complete(server, abc):
    """The engine never says that the last block is finished, since it is cancelled in the middle of it."""
    one = server(script=[*abc, *abc[:1] * 40])
    body = {"prompt": "a small animal", "max_tokens": 100, "stop": "aaaaaaaaaaaaaa", "stream": True, **STEPS}
    events = events_of(await one.post(body))
    assert streamed_text(events) == "abc"
    sealed = diffusion_of(events, "block.sealed")
    assert [(e["block"], e["start"], e["end"]) for e in sealed] == [(0, 0, 10), (1, 10, 17)]
    assert "".join(event["text"] for event in sealed) == "abc"
    (done,) = diffusion_of(events, "generation.done")
    steps = diffusion_of(events, "step")
    assert (done["blocks"], done["steps"], done["forward_passes"]) == (2, len(steps), None)
    committed = {commit["position"] for event in steps for commit in event["commits"]}
    assert committed >= set(range(17))
    assert events[-1]["usage"]["completion_tokens"] == 17


async def test_the_work_of_a_text_that_ended_by_itself_is_still_counted_in_full(server, abc):
    answer = (await server(script=abc).post({"prompt": "a", "max_tokens": 20, "stop": "zz"})).json()
    assert answer["diffusion"]["forward_passes"] == 21


async def test_one_choice_may_end_while_others_go_on(server):
    one = server()
    body = {"prompt": ["a sea", "an animal"], "max_tokens": 60, "seed": 2}
    whole = [choice["text"] for choice in (await one.post(body)).json()["choices"]]
    stop = next(whole[0][i : i + 3] for i in range(5, 50) if whole[0][i : i + 3] not in whole[1])
    choices = (await one.post({**body, "stop": stop})).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert choices[0]["text"] == whole[0][: whole[0].index(stop)]
    assert choices[1]["text"] == whole[1]
    events = events_of(await one.post({**body, "stop": stop, "stream": True}))
    assert [streamed_text(events, i) for i in range(2)] == [choice["text"] for choice in choices]


async def test_no_pass_runs_after_the_stop_string_was_found(server, abc):
    """A batch of events that nobody waits for is a pass that nobody needed."""
    batches = []

    async def before(request, number: int) -> None:
        batches.append(number)

    one = server(script=abc, before=before)
    body = {"prompt": "", "max_tokens": 100, "stop": "b", "diffusion": {"tokens_per_step": 16}, "stream": True}
    events_of(await one.post(body))
    # Begun, block begun, and one step in which the whole of the block was committed.
    assert batches == [0, 1, 2]


async def test_many_clients_with_stop_strings_leave_nothing_running(server):
    one = server()
    bodies = [{"prompt": f"{i} sea", "max_tokens": 100, "stop": ["a", "e"], "n": 2} for i in range(10)]
    responses = await asyncio.gather(*(one.post(body) for body in bodies))
    assert all(response.status_code == 200 for response in responses)
    assert not one.engine.running


@pytest.mark.parametrize(("length", "status"), [(1000, 200), (1001, 400)])
async def test_a_long_stop_string_is_refused_before_each_choice_pays_for_it(server, length, status):
    """Each choice makes a table as long as the string: one of 2 MB with `n` 8 held up all other requests for 3 s."""
    response = await server().post({"prompt": "a", "max_tokens": 2, "n": 2, "stop": ["b", "a" * length]})
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert (error["param"], error["message"]) == ("stop", "stop: has a string of 1001 characters; at most 1000")
