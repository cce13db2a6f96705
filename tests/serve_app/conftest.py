"""A tiny checkpoint with text and names, and an API on a FakeEngine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine import Event, GenerateRequest, ModelConfig
from serve_app.api import create_api
from serve_app.checkpoint import describe
from serve_app.completions import Caller
from serve_app.config import Limits
from serve_app.local import LocalEngineClient
from serve_app.presets import PresetStore
from serve_app.service import Service
from serve_app.translation import Checkpoint
from tests.checkpoints import Recipe
from tests.fakes import FakeEngine
from tests.serve_app.plain_servers import plain_server

SPECIAL = ("start_header_id", "end_header_id", "eot_id", "endoftext", "pad", "bos", "endofchunk", "mask")
NUM_ORDINARY = 272
CORPUS = ["a small animal that lives in the sea", "an animal with four legs", "the act of singing in the sea", "été"]
CONCEPTS = [
    # name, description, group id, group, steerable
    ("Animals", "living things that move; an animal eats", 1, "Nature", True),
    ("Animal husbandry", "raising farm animals for food", 1, "Nature", True),
    ("Music", "singing and playing; not an animal", 2, "Arts", True),
    ("Plants", "things that grow in the earth", 1, "Nature", False),
    ("Twin", "the first of two with one name", 3, "Pairs", True),
    ("twin", "the second of two with one name", 3, "Pairs", True),
]

RECIPE = Recipe(name="with_text", vocab_size=NUM_ORDINARY + len(SPECIAL), has_eot=True)


def write_tokenizer(folder: Path, *, num_ordinary: int = NUM_ORDINARY) -> None:
    """A byte-level BPE of `num_ordinary` tokens and the special ones after them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=num_ordinary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == num_ordinary
    names = [f"<|{name}|>" for name in SPECIAL]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_labels(folder: Path) -> None:
    rows = [
        {
            "concept_id": i,
            "concept_name": name,
            "concept_description": description,
            "head": "known",
            "public_group_id": float(group_id),
            "group_name": group,
            "is_steerable": steerable,
            "is_tone": False,
            "is_alignment": False,
            "is_demographic": False,
        }
        for i, (name, description, group_id, group, steerable) in enumerate(CONCEPTS)
    ]
    discovered = {"concept_id": 50, "concept_name": "Found thing", "head": "unknown", "is_steerable": False}
    pd.DataFrame([*rows, discovered]).to_parquet(folder / "concept_labels.parquet")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, with tokenizer and labels: 50 known and 70 discovered concepts, blocks of 16."""
    folder = RECIPE.write(tmp_path_factory.mktemp("with_text"))
    write_tokenizer(folder)
    write_labels(folder)
    return folder


@pytest.fixture(scope="session")
def served(folder: Path) -> Checkpoint:
    return describe(folder, "tiny")


class DirectClient(LocalEngineClient):
    """The client of an engine in the same process, which remembers who asked."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.callers: list[Caller | None] = []

    def generate(
        self, request: GenerateRequest, caller: Caller | None = None
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        self.callers.append(caller)
        return super().generate(request, caller)


class Server:
    """The API on a FakeEngine, and a client to it."""

    def __init__(
        self,
        served: Checkpoint,
        *,
        presets: PresetStore | None = None,
        engine_class: type[FakeEngine] = FakeEngine,
        **engine_options: Any,
    ) -> None:
        self.engine = engine_class(served.config, **engine_options)
        self.checkpoint = served
        self.direct = DirectClient(self.engine)
        self._presets = presets
        self.app: FastAPI = self._make_app()

    def without_chat_template(self) -> None:
        """From now on serve what a base checkpoint is."""
        self.checkpoint = replace(self.checkpoint, chat_template=None)
        self.app = self._make_app()

    def _make_app(self) -> FastAPI:
        limits = Limits(max_body_bytes=100_000, max_prompts=4)
        service = Service(
            client=self.direct, checkpoint=self.checkpoint, limits=limits, created=1, presets=self._presets
        )
        return create_api(service)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client

    async def post(self, body: Any, path: str = "/v1/completions") -> httpx.Response:
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        async with self.client() as client:
            return await client.post(path, content=content, headers={"content-type": "application/json"})

    async def get(self, path: str, **params: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path, params=params or None)


@pytest.fixture(scope="session")
def server(served: Checkpoint) -> Callable[..., Server]:
    """The engine's class and its options -> a server on it."""
    return lambda **options: Server(served, **options)


@pytest.fixture
def replica(folder: Path) -> Callable[..., tuple[Any, FakeEngine]]:
    """Options of `plain_server` -> (an EngineServer without Ray, its engine)."""
    return partial(plain_server, folder)


@pytest.fixture(scope="session")
def model_config(folder: Path) -> ModelConfig:
    return ModelConfig.from_json(folder)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
