"""One choice as it unfolds: engine events in; text, diffusion events and the parts of the answer out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from engine import (
    Aborted,
    BlockFinished,
    BlockStarted,
    Commit,
    Committed,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Output,
    RequestFailed,
    ResolvedIntervention,
    Started,
    SteeringParams,
)

from .attribution import AttributionWriter, TextToken, number
from .concepts import ConceptCatalogue
from .schemas import CompletionRequest
from .streaming import TextAssembler
from .translation import Checkpoint, end_token_ids


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that one choice gained."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class DiffusionPiece:
    """One diffusion event, without its sequence number."""

    event: dict[str, Any]


Piece = TextPiece | DiffusionPiece


class Choice:
    """The generation of one choice."""

    def __init__(
        self, index: int, engine_request: GenerateRequest, request: CompletionRequest, checkpoint: Checkpoint
    ) -> None:
        self.index = index
        self.text = ""
        self.engine_request = engine_request
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._num_prompt_tokens = len(engine_request.prompt_token_ids)
        self._first_block = self._num_prompt_tokens // checkpoint.config.diff_block_size
        ends = end_token_ids(request, checkpoint.config)
        self._assembler = TextAssembler(checkpoint.tokenizer, start=self._num_prompt_tokens, end_ids=ends)
        self._attribution = AttributionWriter(request.attribution, checkpoint.catalogue, checkpoint.tokenizer)
        options = request.stream_options
        self._detail = "off" if options is None else options.include_diffusion
        self._commits: list[tuple[int, Commit]] = []
        self._num_cached_tokens = 0
        self._block_text = ""
        self._output: Output | None = None

    @property
    def output(self) -> Output:
        """What the engine said at the end; only after the last event."""
        assert self._output is not None, "the generation has not ended"
        return self._output

    @property
    def usage(self) -> tuple[int, int, int]:
        """Tokens of the prompt, of the text so far, and of the prompt from the cache."""
        return self._num_prompt_tokens, len(self._assembler.token_ids), self._num_cached_tokens

    def take(self, events: Sequence[Event]) -> Iterator[Piece]:
        """What a client should see of these events, in order; text at most once per block.

        Raises RequestFailed or Aborted when the engine gave the request up.
        """
        text = ""
        for event in events:
            if isinstance(event, Committed):
                text += self._gain(self._assembler.add(event.commits))
                self._commits += [(event.block, commit) for commit in event.commits]
                if self._detail == "steps":
                    yield from self._steps(event)
                continue
            if isinstance(event, Finished):
                self._end(event.output)
            if isinstance(event, Finished) or (isinstance(event, BlockFinished) and self._is_last(event)):
                text += self._gain(self._assembler.finish())
            if text and isinstance(event, BlockFinished | Finished):
                yield TextPiece(self.index, text)
                text = ""
            if isinstance(event, Started):
                self._num_cached_tokens = event.num_cached_tokens
            if self._detail != "off" and not isinstance(event, Finished):
                yield DiffusionPiece(self._diffusion_event(event))
        if text:
            yield TextPiece(self.index, text)

    def attribution(self) -> dict[str, Any]:
        """This choice's entry in the answer's `attribution`."""
        by_position = {
            commit.position: TextToken(commit, order, block - self._first_block)
            for order, (block, commit) in enumerate(self._commits)
        }
        tokens = [by_position[self._num_prompt_tokens + i] for i in range(len(self._assembler.token_ids))]
        endofchunk = self._checkpoint.config.endofchunk_token_id
        return self._attribution.choice(self.index, tokens, endofchunk_token_id=endofchunk)

    def _is_last(self, event: BlockFinished) -> bool:
        return self._assembler.is_ended or event.end == self._num_prompt_tokens + self.engine_request.max_tokens

    def _gain(self, text: str) -> str:
        self.text += text
        self._block_text += text
        return text

    def _end(self, output: Output) -> None:
        if output.finish_reason is FinishReason.ABORT:
            raise Aborted("the engine cancelled the request")
        if output.finish_reason is FinishReason.ERROR:
            raise RequestFailed(output.error or "the engine gave the request up")
        assert list(output.token_ids) == self._assembler.token_ids, "streamed tokens differ from the final ones"
        self._output = output

    def _steps(self, event: Committed) -> Iterator[DiffusionPiece]:
        """One diffusion event a denoising step."""
        for step, commits in groupby(event.commits, key=lambda commit: commit.denoising_step):
            yield DiffusionPiece(
                {
                    "type": "step",
                    "index": self.index,
                    "block": event.block - self._first_block,
                    "step": step,
                    "commits": [self._commit(commit) for commit in commits],
                }
            )

    def _commit(self, commit: Commit) -> dict[str, Any]:
        shown = {
            "position": commit.position - self._num_prompt_tokens,
            "token": self._tokenizer.token_name(commit.token_id),
            "bytes": list(self._tokenizer.text_bytes(commit.token_id)),
            "token_id": commit.token_id,
            "confidence": number(commit.confidence),
        }
        if commit.attribution is not None:
            shown["concepts"] = self._attribution.step_concepts(commit.attribution)
        return shown

    def _diffusion_event(self, event: Started | BlockStarted | BlockFinished) -> dict[str, Any]:
        if isinstance(event, Started):
            return {
                "type": "generation.started",
                "index": self.index,
                "block_length": event.block_size,
                "prompt_tail": event.prompt_tail,
            }
        place = {
            "index": self.index,
            "block": event.block - self._first_block,
            "start": event.start - self._num_prompt_tokens,
            "end": event.end - self._num_prompt_tokens,
        }
        if isinstance(event, BlockStarted):
            return {"type": "block.started", **place}
        text, self._block_text = self._block_text, ""
        return {"type": "block.sealed", **place, "text": text}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """OpenAI's `usage`, over all choices; counts the tokens that were returned."""
    prompt, completion, cached = (sum(counts) for counts in zip(*(choice.usage for choice in choices), strict=True))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def additions(choices: Sequence[Choice], request: CompletionRequest, checkpoint: Checkpoint) -> dict[str, Any]:
    """The top-level parts of an answer that OpenAI's API does not have: what was steered, run and attributed."""
    outputs = [choice.output for choice in choices]
    engine_request = choices[0].engine_request
    parts: dict[str, Any] = {}
    if engine_request.steering is not None:
        parts["steering"] = _steering(engine_request.steering, outputs[0].steering, checkpoint.catalogue)
    sampling = engine_request.sampling
    parts["diffusion"] = {
        "blocks": sum(output.num_blocks for output in outputs),
        "denoising_steps": sum(output.num_denoising_steps for output in outputs),
        "forward_passes": sum(output.num_forward_passes for output in outputs),
        "policy": sampling.policy,
        **({} if sampling.policy_parameter is None else {sampling.policy: sampling.policy_parameter}),
        "tokens_per_step": sampling.max_commits(checkpoint.config.diff_block_size),
        "sampler": sampling.sampler,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": outputs[0].seed,
    }
    if request.attribution.level != "off":
        parts["attribution"] = [choice.attribution() for choice in choices]
    return parts


def _steering(
    params: SteeringParams, resolved: Sequence[ResolvedIntervention], catalogue: ConceptCatalogue
) -> dict[str, Any]:
    def name(concept_id: int) -> dict[str, Any]:
        concept = catalogue.get(concept_id)
        return {"id": concept_id, "name": None if concept is None else concept.name}

    return {
        "resolved": [
            {
                "concepts": [
                    {**name(concept_id), "weight": weight}
                    for concept_id, weight in zip(item.concept_ids, item.weights, strict=True)
                ],
                "alpha": number(item.alpha),
                "peak_logit": number(item.peak),
                "layer": item.layer,
                "schedule": item.schedule,
                **({"cutoff_tokens": item.cutoff_tokens} if item.schedule == "hard_cutoff" else {}),
            }
            for item in resolved
        ],
        "suppress": [{"concept": name(item.concept_id), "strength": item.strength} for item in params.suppress],
    }
