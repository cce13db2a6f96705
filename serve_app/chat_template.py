"""From a conversation to a prompt's token ids, by the checkpoint's chat template.

The template's own special tokens become their ids; what people wrote never does, whatever it spells. Contents pass
through the template as they are, so that it may trim or split them, except where they spell a special token, or could
together with what the template puts beside them: there a mark breaks the spelling, and leaves after the rendering.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine import CheckpointError, ModelConfig

from .errors import ApiError
from .tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

HEADER_TEMPLATE = (
    "{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] }}"
    "<|endofchunk|><|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Steerling's own format for its instruct vocabulary: nothing before the first header; a turn ends its chunk."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: who speaks, what, and perhaps under which name."""

    role: str
    content: str
    name: str | None = None


class ChatTemplate:
    """One checkpoint's template, compiled."""

    def __init__(self, source: str, tokenizer: Tokenizer, tokens: Mapping[str, str] | None = None) -> None:
        """`tokens` are what the template knows by names such as `bos_token`. Raises CheckpointError for bad syntax."""
        self.source = source
        """In Jinja, as the checkpoint has it."""
        self._tokenizer = tokenizer
        self._tokens = dict(tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error

    @classmethod
    def from_checkpoint(cls, folder: str | Path, config: ModelConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template in `folder`, else Steerling's own where the vocabulary has its tokens, else None."""
        description = _read_description(Path(folder) / CONFIG_FILE)
        source = _find_source(Path(folder), description)
        if source is None:
            wanted = (config.start_header_id, config.end_header_id, config.eot_id, config.endofchunk_token_id)
            if any(token_id is None for token_id in wanted) or not _has_published_names(tokenizer):
                return None
            source = HEADER_TEMPLATE
        return cls(source, tokenizer, _named_tokens(description, config, tokenizer))

    def render(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> str:
        """The prompt as text, for people to read: what a user wrote may look like a special token in it.

        Raises ApiError for what the template refuses.
        """
        contents = [(turn.content, turn.name) for turn in turns]
        return self._render(
            turns, contents, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )

    def encode(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> list[int]:
        """The prompt's ids. Raises ApiError for what the template refuses."""
        mark = _new_mark(turns)
        names = list(self._tokenizer.special_ids)
        broken = [
            (_break(turn.content, names, mark), None if turn.name is None else _break(turn.name, names, mark))
            for turn in turns
        ]
        modes = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        marked = self._render(turns, broken, **modes)
        if any(mark in content or mark in (name or "") for content, name in broken):
            unmarked = self.render(turns, **modes)
            if marked.replace(mark, "") != unmarked:
                # The template looks into contents, or cuts them up, and a mark was in the way.
                spells = any(len(self._tokenizer.split_special(turn.content)) > 1 for turn in turns)
                if spells or self._specials(marked) != self._specials(unmarked):
                    message = "a message spells a special token where the checkpoint's chat template looks for one"
                    raise ApiError(400, message, code="invalid_value", param="messages")
                marked = unmarked
        return self._encode_marked(marked, mark)

    def _specials(self, text: str) -> list[str]:
        return [part for part in self._tokenizer.split_special(text) if part in self._tokenizer.special_ids]

    def _encode_marked(self, marked: str, mark: str) -> list[int]:
        """Ids of text in which marks keep apart what must not be read as one special token."""
        ids: list[int] = []
        specials = self._tokenizer.special_ids
        for part in self._tokenizer.split_special(marked):
            if part in specials:
                ids.append(specials[part])
            else:
                ids += self._tokenizer.encode(part.replace(mark, ""))
        return ids

    def _render(
        self,
        turns: Sequence[Turn],
        contents: Sequence[tuple[str, str | None]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        messages: list[dict[str, str]] = [
            {"role": turn.role, "content": content, **({} if name is None else {"name": name})}
            for turn, (content, name) in zip(turns, contents, strict=True)
        ]
        tag = f"\ue002{secrets.randbits(64)}\ue003"
        if continue_final_message:
            # Whether the template trims shows in what becomes of the space.
            messages[-1]["content"] += f"{tag} "
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            message = f"the checkpoint's chat template refuses these messages: {error}"
            raise ApiError(400, message, code="invalid_value", param="messages") from error
        return _cut_at(text, tag) if continue_final_message else text


def encode_chat(
    template: ChatTemplate | None,
    turns: Sequence[Turn],
    *,
    model_id: str,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """A conversation's ids. Raises ApiError where the checkpoint has no chat template, or its template refuses."""
    if template is None:
        message = (
            f"model {model_id!r} has no chat template: it continues text and was not made for conversations; "
            "send a `prompt` to /v1/completions"
        )
        raise ApiError(400, message, code="chat_template_missing", param="messages")
    return template.encode(
        turns, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
    )


def _cut_at(text: str, tag: str) -> str:
    """The text up to where the last message ends."""
    before, found, after = text.rpartition(tag)
    if not found:
        message = "the checkpoint's chat template does not show the last message, so it cannot be continued"
        raise ApiError(400, message, code="invalid_value", param="continue_final_message")
    return before if after.startswith(" ") else before.rstrip()


def _new_mark(turns: Sequence[Turn]) -> str:
    """A string that no message holds. Digits between private characters: no filter of a template changes them."""
    while True:
        mark = f"\ue000{secrets.randbits(64)}\ue001"
        if not any(mark in turn.content or mark in (turn.name or "") for turn in turns):
            return mark


def _break(text: str, names: Iterable[str], mark: str) -> str:
    """The text with a mark inside whatever is, or beside other text could become, one of `names`."""
    # A template may trim what it is given.
    first = len(text) - len(text.lstrip())
    core = text.strip()
    places: set[int] = set()
    for name in names:
        places |= {first + place for place in _breaks(core, name)}
    pieces, last = [], 0
    for place in sorted(places):
        pieces.append(text[last:place])
        last = place
    return mark.join([*pieces, text[last:]])


def _breaks(core: str, name: str) -> set[int]:
    """Where to break `core` so that no `name` is left in it, at its ends, or around it."""
    places = set()
    at = core.find(name)
    while at >= 0:
        places.add(at + 1)
        at = core.find(name, at + 1)
    for size in range(1, min(len(name), len(core) + 1)):
        if core.endswith(name[:size]):
            places.add(len(core) - size + 1)
        if core.startswith(name[-size:]):
            places.add(size - 1)
    if core and core in name[1:-1]:
        places.add(1)
    return places


def _read_description(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(description, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return description


def _find_source(folder: Path, description: Mapping[str, Any]) -> str | None:
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    source = description.get("chat_template")
    if isinstance(source, list) and all(isinstance(item, dict) and "template" in item for item in source):
        # Several by name; the others are for tools and documents.
        source = next((item["template"] for item in source if item.get("name") == "default"), None)
    if not isinstance(source, str | None):
        raise CheckpointError(f"{folder / CONFIG_FILE}: chat_template is {source!r:.80}; it must be a string")
    return source


def _named_tokens(description: Mapping[str, Any], config: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id, "pad_token": config.pad_token_id}
    tokens = {key: tokenizer.token_name(i) for key, i in ids.items() if i is not None}
    for key in _TOKENS:
        value = description.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[key] = content
    return tokens


def _has_published_names(tokenizer: Tokenizer) -> bool:
    names = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|endofchunk|>"}
    return names <= tokenizer.special_ids.keys()


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; here it is only text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's contents."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates may use, as Hugging Face's renderer gives it to them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own would escape for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
