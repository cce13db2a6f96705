"""One choice as it unfolds: engine events in; text, diffusion events and what the answer says of it out."""

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
    Output,
    RequestFailed,
    Scores,
    Started,
)

from ..attribution import AttributionWriter, TextToken, number
from ..schemas import GenerateFields
from ..text_assembly import TextAssembler
from ..translation import Checkpoint, ChoiceJob
from .logprobs import TokenEntry, prompt_offsets


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that one choice gained, and the tokens that all of it is now known of."""

    index: int
    text: str
    entries: tuple[TokenEntry, ...] = ()
    """Those tokens with their log-probabilities; of prompt tokens too where the prompt is scored."""
    token_ids: tuple[int, ...] = ()
    """The generated ones."""


@dataclass(frozen=True, slots=True)
class DiffusionPiece:
    """One diffusion event, without its sequence number."""

    event: dict[str, Any]


Piece = TextPiece | DiffusionPiece


def require_text(output: Output) -> None:
    """Raise Aborted or RequestFailed if the engine gave the request up."""
    if output.finish_reason is FinishReason.ABORT:
        raise Aborted("the engine cancelled the request")
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailed(output.error or "the engine gave the request up")


class Choice:
    """The generation of one choice."""

    def __init__(self, job: ChoiceJob, request: GenerateFields, checkpoint: Checkpoint) -> None:
        self.index = job.index
        self.job = job
        self.echo = checkpoint.tokenizer.decode(job.prompt_token_ids) if request.has_echo else ""
        """The prompt's text, where the answer begins with it."""
        self._generated = ""
        self._tokenizer = checkpoint.tokenizer
        self._endofchunk = checkpoint.config.endofchunk_token_id
        self._silent_end = None if request.ignore_eos else checkpoint.config.eot_id
        self._num_prompt_tokens = len(job.prompt_token_ids)
        self._end = self._num_prompt_tokens + (job.engine_request.max_tokens if job.engine_request else 0)
        self._first_block = self._num_prompt_tokens // checkpoint.config.diff_block_size
        self._assembler = TextAssembler(
            checkpoint.tokenizer,
            start=self._num_prompt_tokens,
            end_ids=checkpoint.config.end_token_ids(request.stop_token_ids, ignore_eos=request.ignore_eos),
            stops=request.stop,
            keeps_stop=request.include_stop_str_in_output,
            min_tokens=request.min_tokens,
        )
        self._attribution = AttributionWriter(request.attribution, checkpoint.catalogue, checkpoint.tokenizer)
        options = request.stream_options
        self._detail = "off" if options is None else options.include_diffusion
        self._is_scored = request.is_scoring
        self._scores: Scores | None = None
        self._commits: dict[int, TextToken] = {}
        self._started: Started | None = None
        self._block: BlockStarted | None = None
        self._num_blocks = 0
        self._num_steps = 0
        self._block_text = ""
        self._output: Output | None = None

    @property
    def text(self) -> str:
        """All text so far, the prompt's included where it is echoed."""
        return self.echo + self._generated

    @property
    def token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self._assembler.token_ids

    @property
    def is_done(self) -> bool:
        """True once nothing the engine could still do would change the answer."""
        return self._output is not None or isinstance(self._assembler.end_reason, str)

    @property
    def started(self) -> Started:
        """What the engine said at the beginning; only after the first event."""
        assert self._started is not None, "the generation has not begun"
        return self._started

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        ended = FinishReason.LENGTH if self._assembler.end_reason is None else FinishReason.STOP
        return ended.value

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended it; None for the end of a turn and for the length."""
        reason = self._assembler.end_reason
        return None if reason == self._silent_end else reason

    @property
    def usage(self) -> tuple[int, int, int]:
        """Tokens of the prompt, of the text so far, and of the prompt from the cache."""
        num_cached = 0 if self._started is None else self._started.num_cached_tokens
        if self.job.shares_prompt:
            return 0, len(self.token_ids), 0
        return self._num_prompt_tokens, len(self.token_ids), num_cached

    @property
    def work(self) -> tuple[int, int, int | None]:
        """Blocks begun, denoising steps and forward passes; None for passes where nobody could count them.

        Where a stop string ended the text, blocks and steps are those up to the step that completed it.
        """
        if self._output is None or isinstance(self._assembler.end_reason, str):
            return self._num_blocks, self._num_steps, None
        return self._output.num_blocks, self._output.num_denoising_steps, self._output.num_forward_passes

    def begin(self) -> Iterator[Piece]:
        """What is certain before anything is generated: the prompt, if it is echoed and not scored."""
        if self.echo and not self._is_scored:
            yield TextPiece(self.index, self.echo)

    def take(self, events: Sequence[Event]) -> Iterator[Piece]:
        """What a client should see of these events, in order; text at most once per block.

        Raises RequestFailed or Aborted when the engine gave the request up.
        """
        text = ""
        for event in events:
            if isinstance(event, Committed):
                text += self._gain(self._assembler.add(event.commits))
                self._note(event)
                if self._detail == "steps":
                    yield from self._steps(event)
                if not self.is_done:
                    continue
                # No more of this is the client's, and the engine is about to be told to leave off.
                event = self._cut_block()
            elif isinstance(event, Finished):
                self._finish(event.output)
            if isinstance(event, Finished) or (isinstance(event, BlockFinished) and self._is_last(event)):
                text += self._gain(self._assembler.finish())
            if isinstance(event, BlockFinished | Finished):
                yield from self._text_piece(text)
                text = ""
            if isinstance(event, Started):
                self._started = event
            elif isinstance(event, BlockStarted):
                self._block, self._num_blocks = event, self._num_blocks + 1
            if self._detail != "off" and not isinstance(event, Finished):
                yield DiffusionPiece(self._diffusion_event(event))
            if self.is_done:
                return
        yield from self._text_piece(text)

    def score(self, scores: Scores | None) -> TextPiece:
        """All of the text at once, with its scores if it has any tokens."""
        self._scores = scores
        return TextPiece(self.index, self.text, self.entries(), tuple(self.token_ids))

    def rest(self) -> TextPiece:
        """The tokens that no piece of text has told of, for the end of a stream."""
        return self._tokens_piece("") if not self._is_scored else TextPiece(self.index, "")

    def entries(self, tokens: range | None = None) -> tuple[TokenEntry, ...]:
        """Log-probabilities of these generated tokens (None: all), of prompt and text where they are scored."""
        if self._is_scored:
            return self._scored_entries()
        chosen = range(len(self.token_ids)) if tokens is None else tokens
        commits = [self._commits[self._num_prompt_tokens + i].commit for i in chosen]
        return tuple(
            TokenEntry(c.token_id, len(self.echo) + self._assembler.offsets[i], c.logprob, c.top_logprobs)
            for i, c in zip(chosen, commits, strict=True)
        )

    def attribution(self) -> dict[str, Any]:
        """This choice's entry in the answer's `attribution`."""
        tokens = [self._commits[self._num_prompt_tokens + i] for i in range(len(self.token_ids))]
        return self._attribution.choice(self.index, tokens, endofchunk_token_id=self._endofchunk)

    def _scored_entries(self) -> tuple[TokenEntry, ...]:
        if self._scores is None:
            return ()
        ids = [*self.job.prompt_token_ids, *self.token_ids]
        offsets = prompt_offsets(self._tokenizer, self.job.prompt_token_ids)
        offsets += [len(self.echo) + offset for offset in self._assembler.offsets]
        rows = zip(ids, offsets, self._scores.logprobs, self._scores.top_logprobs, strict=True)
        return tuple(TokenEntry(*row) for row in rows)

    def _text_piece(self, text: str) -> Iterator[TextPiece]:
        if text and not self._is_scored:
            yield self._tokens_piece(text)

    def _tokens_piece(self, text: str) -> TextPiece:
        tokens = self._assembler.take_tokens()
        ids = tuple(self.token_ids[tokens.start : tokens.stop])
        return TextPiece(self.index, text, self.entries(tokens), ids)

    def _note(self, event: Committed) -> None:
        for commit in event.commits:
            self._commits[commit.position] = TextToken(commit, len(self._commits), event.block - self._first_block)
            self._num_steps = max(self._num_steps, commit.denoising_step + 1)

    def _cut_block(self) -> BlockFinished:
        """The end of a block in which the text ended before the engine knew."""
        assert self._block is not None, "commits come after their block has begun"
        text_end = self._num_prompt_tokens + len(self.token_ids)
        return BlockFinished(self._block.request_id, self._block.block, self._block.start, text_end)

    def _is_last(self, event: BlockFinished) -> bool:
        return self._assembler.is_ended or event.end == self._end

    def _gain(self, text: str) -> str:
        self._generated += text
        self._block_text += text
        return text

    def _finish(self, output: Output) -> None:
        require_text(output)
        assert list(output.token_ids) == self.token_ids, "streamed tokens differ from the final ones"
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
            **self._tokenizer.spelled(commit.token_id),
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
