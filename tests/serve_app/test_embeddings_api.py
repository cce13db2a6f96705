"""Vectors over HTTP, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
import struct

import pytest

from engine import EmbedTokens, EngineStopped, QueueFull
from tests.fakes import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/embeddings"


async def embed(target, **body):
    return await target.post(body, PATH)


async def test_one_text_gives_one_vector_and_its_tokens_are_counted(server, served):
    target = server()
    answer = (await embed(target, input="an animal", model="tiny")).json()
    token_ids = served.tokenizer.encode("an animal")
    (item,) = answer["data"]
    assert (item["object"], item["index"], len(item["embedding"])) == ("embedding", 0, 32)
    assert answer["usage"] == {"prompt_tokens": len(token_ids), "total_tokens": len(token_ids)}
    assert target.engine.analyses == [EmbedTokens(token_ids=token_ids, kind="composed", pooling="mean")]


async def test_kind_and_pooling_are_handed_on(server):
    target = server()
    await embed(target, input=[1, 2], embedding_type="discovered", pooling="last")
    assert target.engine.analyses == [EmbedTokens(token_ids=(1, 2), kind="discovered", pooling="last")]


@pytest.mark.parametrize(
    ("given", "number"), [("a", 1), (["a", "an animal", "a"], 3), ([1, 2, 3], 1), ([[1], [2, 3]], 2)], ids=str
)
async def test_every_shape_of_input_gives_its_vectors_in_order(server, given, number):
    answer = (await embed(server(), input=given)).json()
    assert [item["index"] for item in answer["data"]] == list(range(number))
    single = given if number > 1 else [given]
    for item, text in zip(answer["data"], single, strict=True):
        alone = (await embed(server(), input=text)).json()["data"][0]
        assert item["embedding"] == alone["embedding"]


async def test_base64_holds_the_same_numbers_as_little_endian_floats(server):
    plain = (await embed(server(), input="sea")).json()["data"][0]["embedding"]
    packed = (await embed(server(), input="sea", encoding_format="base64")).json()["data"][0]["embedding"]
    assert list(struct.unpack("<32f", base64.b64decode(packed))) == plain


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [[1], []]}, "invalid_value", "input[1]"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": [[1, 280]]}, "invalid_value", "input[0][1]"),
        ({"input": [1] * 513}, "context_length_exceeded", "input"),
        ({"input": ["a", "a" * 20_000]}, "context_length_exceeded", "input[1]"),
        ({"input": "a", "dimensions": 16}, "unsupported_field", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "embedding_type": "other"}, "invalid_value", "embedding_type"),
        ({"input": "a", "steering": {"concepts": [1], "strength": 2}}, "unsupported_field", "steering"),
        ({"input": "a", "attribution": {}}, "unsupported_field", "attribution"),
        ({"input": "a", "diffusion": {"policy": "lossless"}}, "unsupported_field", "diffusion"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
        ({"input": ["a"] * 2049}, "invalid_value", "input"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_what_cannot_be_embedded_is_refused_by_name_before_any_work(server, body, code, param):
    target = server()
    error = (await embed(target, **body)).json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert not target.engine.analyses


async def test_the_longest_text_and_the_models_own_width_are_taken(server):
    response = await embed(server(), input=[1] * 512, dimensions=32, user="somebody", unknown=1)
    assert response.status_code == 200


class OneFails(FakeEngine):
    """Fails for one text and waits for ever with all others."""

    num_open = 0

    async def analyze(self, analysis):
        if analysis.token_ids == (7,):
            await asyncio.sleep(0)
            raise EngineStopped("gone")
        self.num_open += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


async def test_what_fails_for_one_text_ends_the_others(server):
    target = server(engine_class=OneFails)
    response = await embed(target, input=[[1], [2], [7], [3]])
    assert response.status_code == 503
    assert target.engine.num_open == 0


class Narrow(FakeEngine):
    """Takes `room` analyses at once, as an engine with so small a `max_analyses`."""

    room = 1
    num_open = 0

    async def analyze(self, analysis):
        if self.num_open >= self.room:
            raise QueueFull(f"{self.room} analyses are under way")
        self.num_open += 1
        try:
            await asyncio.sleep(0)
            return await super().analyze(analysis)
        finally:
            self.num_open -= 1


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_an_engine_that_takes_fewer_at_once_embeds_them_all_the_same(server, room):
    target, plain = server(engine_class=Narrow), server()
    target.engine.room = room
    body = {"input": [[i % 7] for i in range(20)]}
    assert (await embed(target, **body)).json() == (await embed(plain, **body)).json()


async def test_an_engine_that_takes_none_at_all_is_busy(server):
    target = server(engine_class=Narrow)
    target.engine.room = 0
    response = await embed(target, input=[[1], [2], [3]])
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")


async def test_many_texts_are_embedded_a_few_at_a_time(server):
    most = 0

    class Counting(FakeEngine):
        num_open = 0

        async def analyze(self, analysis):
            nonlocal most
            self.num_open += 1
            most = max(most, self.num_open)
            await asyncio.sleep(0)
            self.num_open -= 1
            return await super().analyze(analysis)

    answer = (await embed(server(engine_class=Counting), input=[[i % 7] for i in range(100)])).json()
    assert 1 < most <= 8
    assert len(answer["data"]) == 100
