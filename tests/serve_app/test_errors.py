from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

import engine
from engine import errors as engine_errors
from serve_app.errors import ANSWERS, MAX_TEXT_LENGTH, ApiError, from_validation, to_api_error
from serve_app.schemas import CompletionRequest

ENGINE_ERRORS = [
    kind
    for kind in vars(engine_errors).values()
    if isinstance(kind, type) and issubclass(kind, engine_errors.EngineError)
]


def make(kind: type[engine.EngineError]) -> engine.EngineError:
    return kind("what", param="sampling.top_p") if issubclass(kind, engine.InvalidRequest) else kind("what")


def through_ray(error: Exception) -> Exception:
    """What a caller of a replica catches when `error` is raised there."""
    wrapped = RayTaskError("generate", "Traceback", pickle.loads(pickle.dumps(error)), "proc", 1, "127.0.0.1")
    return wrapped.as_instanceof_cause()


@pytest.mark.parametrize("kind", ENGINE_ERRORS, ids=lambda kind: kind.__name__)
def test_every_engine_error_has_its_own_row(kind):
    assert kind in ANSWERS


@pytest.mark.parametrize("kind", ENGINE_ERRORS, ids=lambda kind: kind.__name__)
def test_an_engine_error_is_answered_the_same_from_here_and_from_a_replica(kind):
    here, there = to_api_error(make(kind)), to_api_error(through_ray(make(kind)))
    assert (there.status, there.body(), there.headers()) == (here.status, here.body(), here.headers())
    assert (here.status == 400) == issubclass(kind, engine.InvalidRequest)


@pytest.mark.parametrize(
    ("param", "told"),
    [
        ("prompt_token_ids", "prompt"),
        ("sampling.top_p", "top_p"),
        ("sampling.tokens_per_step", "diffusion.tokens_per_step"),
        ("sampling.entropy_bound", "diffusion.entropy_bound"),
        ("steering.interventions[2].layer", "steering.interventions[2].layer"),
        (None, None),
    ],
)
def test_a_field_is_told_by_the_name_it_has_in_the_request(param, told):
    assert to_api_error(engine.InvalidValue("what", param=param)).param == told


def test_a_full_queue_says_when_to_come_back():
    error = to_api_error(engine.QueueFull("4096 requests wait"))
    assert (error.status, error.code, error.headers()) == (429, "queue_full", {"retry-after": "1"})


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("gone", b"0" * 16)])
def test_a_replica_that_is_gone_is_a_503(error):
    assert (to_api_error(error).status, to_api_error(error).code) == (503, "engine_unavailable")


@pytest.mark.parametrize("error", [KeyError("secret"), through_ray(KeyError("secret"))])
def test_an_unexpected_error_is_a_500_that_tells_nothing(error):
    answer = to_api_error(error)
    assert (answer.status, answer.type, answer.code) == (500, "server_error", "internal_error")
    assert "secret" not in answer.message


def test_a_body_can_be_encoded_and_stays_short_whatever_the_request_held():
    body = ApiError(400, "\ud800" + "x" * 10_000, code="invalid_value", param="\udfff").body()
    assert body["error"]["param"].encode() == rb"\udfff"
    assert len(body["error"]["message"].encode()) <= MAX_TEXT_LENGTH + 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 500}, "n is 500; it must be less than or equal to 128"),
        ({"n": "2"}, 'n is "2"; it must be a valid integer'),
        ({"temperature": True}, "temperature is true; it must be a valid number"),
        ({"stream": [1]}, "stream is a list; it must be a valid boolean"),
        ({"user": 1, "top_p": {"a": 1}}, "top_p is an object; it must be a valid number"),
        ({"diffusion": {"policy": "x" * 200}}, f"diffusion.policy is \"{'x' * 79}...; it must be 'confidence', "),
        ({"steering": {"interventions": [{"concepts": [1]}]}}, "steering.interventions[0].strength is missing"),
        (
            {"steering": {"suppress": [{"concept": 1, "strength": 1}] * 65}},
            "steering.suppress has 65 items; at most 64",
        ),
        ({"diffusion": {"polcy": 1}}, "diffusion.polcy: unknown field"),
    ],
    ids=str,
)
def test_a_message_tells_the_field_its_value_and_the_limit(given, message):
    body = {"prompt": "a", **given}
    with pytest.raises(ValidationError) as raised:
        CompletionRequest.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in raised.value.errors()]
    assert message in from_validation(errors, body).message


def test_names_of_union_branches_do_not_appear_in_a_path():
    body = {"steering": {"concepts": [1, {"id": 2, "weight": "much"}]}}
    loc = ("body", "steering", "function-before", "concepts", 1, "ConceptItem", "weight")
    error = from_validation([{"type": "float_type", "loc": loc, "msg": "Input should be a valid number"}], body)
    assert error.param == "steering.concepts[1].weight"
