"""Text to tokens and back over HTTP, as vLLM spells it, for clients that have no tokenizer of their own."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from .chat_template import encode_chat
from .errors import ApiError
from .preset_steering import split_model
from .schemas import MAX_MESSAGES, Message, Object, check_text
from .schemas.answers import Answer
from .service import service_of
from .translation import Checkpoint, check_model, turns_of

router = APIRouter(tags=["tokenizer"])

MAX_TOKENS_AT_ONCE = 2**20
"""Token ids that one request may turn into text."""


class TokenizeRequest(Object):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: Annotated[str, AfterValidator(check_text)] | None = None
    """Unlike the prompt of a generation it is searched for special tokens: `<|endoftext|>` is one id."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """A conversation, put into the checkpoint's chat template; what people wrote is ordinary text in it."""
    add_special_tokens: bool = True
    """Accepted for compatibility: the served vocabularies add no token to a text."""
    add_generation_prompt: bool = True
    """With `messages`: end where the answer begins."""
    continue_final_message: bool = False
    """With `messages`: end within the last one; needs `add_generation_prompt: false`."""
    return_token_strs: bool = False
    """Give each token's text too."""

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if self.continue_final_message and self.add_generation_prompt:
            message = "a message is either continued or begun; send `add_generation_prompt: false` too"
            raise PydanticCustomError("continue_final_message", message, {"field": "continue_final_message"})
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_of", "either `prompt` or `messages` is needed", {"field": "prompt"})
        return self


class Tokens(Answer):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    """Tokens that fit the model's context."""
    tokens: list[int]
    token_strs: list[str] | None
    """Where they were asked for; parts of characters show as U+FFFD."""


class DetokenizeRequest(Object):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS_AT_ONCE)]


class Text(Answer):
    """Answer of POST /detokenize."""

    prompt: str


class TokenizerInfo(Answer):
    """Answer of GET /tokenizer_info, with the names that tokenizer files use."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    eos_token: str | None
    eos_token_id: int | None
    bos_token: str | None
    bos_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None
    mask_token: str | None
    mask_token_id: int | None
    additional_special_tokens: list[str]
    add_bos_token: bool
    add_eos_token: bool
    chat_template: str | None
    """Of the checkpoint, in Jinja; None where it has none."""


@router.post("/tokenize", response_model=Tokens)
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a prompt, special tokens by name included, or of messages in the chat template."""
    checkpoint = service_of(request).checkpoint
    _check_model(body.model, checkpoint)
    # Off the event loop: a body may hold megabytes.
    token_ids = await asyncio.to_thread(_encoded, body, checkpoint)
    tokenizer = checkpoint.tokenizer
    return {
        "count": len(token_ids),
        "max_model_len": checkpoint.config.block_size,
        "tokens": token_ids,
        "token_strs": [tokenizer.token_name(i) for i in token_ids] if body.return_token_strs else None,
    }


@router.post("/detokenize", response_model=Text)
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids; special tokens stand under their names, so that /tokenize gives the ids again."""
    checkpoint = service_of(request).checkpoint
    _check_model(body.model, checkpoint)
    vocab_size = checkpoint.config.vocab_size
    for position, token_id in enumerate(body.tokens):
        if not 0 <= token_id < vocab_size:
            message = f"tokens[{position}] is {token_id}; ids lie in [0, {vocab_size})"
            raise ApiError(400, message, code="invalid_value", param=f"tokens[{position}]")
    return {"prompt": checkpoint.tokenizer.decode_with_special(body.tokens)}


@router.get("/tokenizer_info", response_model=TokenizerInfo)
async def get_tokenizer_info(request: Request) -> dict[str, Any]:
    """What a client needs to know of the tokenizer besides encoding and decoding."""
    checkpoint = service_of(request).checkpoint
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    special: dict[str, Any] = {}
    for name in ("eos", "bos", "pad", "mask"):
        token_id = getattr(config, f"{name}_token_id")
        special[f"{name}_token"] = None if token_id is None else tokenizer.token_name(token_id)
        special[f"{name}_token_id"] = token_id
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": config.vocab_size,
        "model_max_length": config.block_size,
        **special,
        "additional_special_tokens": list(tokenizer.special_ids),
        "add_bos_token": False,
        "add_eos_token": False,
        "chat_template": None if checkpoint.chat_template is None else checkpoint.chat_template.source,
    }


def _check_model(model: str | None, checkpoint: Checkpoint) -> None:
    # A client that generates with a preset sends the same name here; the tokens are the model's.
    check_model(split_model(model, checkpoint.model_id)[0], checkpoint)


def _encoded(body: TokenizeRequest, checkpoint: Checkpoint) -> list[int]:
    if body.messages is not None:
        return encode_chat(
            checkpoint.chat_template,
            turns_of(body.messages),
            model_id=checkpoint.model_id,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    assert body.prompt is not None
    return checkpoint.tokenizer.encode_with_special(body.prompt)
