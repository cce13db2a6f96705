"""Stand-ins for parts that are slow or need a device, with the same surface and no patches."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from engine import (
    Analysis,
    AnalysisResult,
    AttributeInputs,
    BlockFinished,
    BlockStarted,
    Commit,
    Committed,
    ConceptContribution,
    Embedding,
    EmbedTokens,
    EngineLoad,
    EngineStats,
    EngineStopped,
    EstimateLikelihood,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    InputAttribution,
    Inspection,
    InspectTokens,
    Likelihood,
    ModelConfig,
    NonFiniteLogits,
    Output,
    PrefixChanges,
    QueueFull,
    ResolvedIntervention,
    RunningLoad,
    Scores,
    ScoreTokens,
    Started,
    TargetAttribution,
    TokenAttribution,
    TokenConcepts,
    Unsupported,
)
from engine.admission import check_request

NUM_PAGES = 64
NUM_LANES = 64


class FakeEngine:
    """AsyncEngine without a model: a token follows from the prompt, the seed, the steering and its position alone.

    `script` gives the generated tokens instead, over and over. `before` is awaited before each batch of events with
    the request and the batch's number; it may raise, or wait for ever.
    `before_analysis` likewise, before an analysis. `error` is what requests end with, if anything.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        script: Sequence[int] = (),
        before: Callable[[GenerateRequest, int], Awaitable[None]] | None = None,
        before_analysis: Callable[[Analysis], Awaitable[None]] | None = None,
        error: str | None = None,
        num_lanes: int = NUM_LANES,
    ) -> None:
        self.model_config = model_config
        self.num_lanes = num_lanes
        self._on_load: Callable[[EngineLoad], None] | None = None
        self.script, self.before, self.error = script, before, error
        self.before_analysis = before_analysis
        self.requests: list[GenerateRequest] = []
        self.analyses: list[Analysis] = []
        self.running: set[str | None] = set()
        self.aborted: list[str | None] = []
        self.failure: Exception | None = None

    @classmethod
    def from_checkpoint(cls, path: str | Path, config: object = None, *, recorder: object = None) -> FakeEngine:
        return cls(ModelConfig.from_json(path))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[tuple[Event, ...]]:
        check_request(request, self.model_config, num_pages=NUM_PAGES, num_lanes=self.num_lanes)
        self.requests.append(request)
        self.running.add(request.request_id)
        self.ask_load()
        is_finished = False
        try:
            for number, events in enumerate(self._events(request)):
                if self.before is not None:
                    await self.before(request, number)
                await asyncio.sleep(0)
                is_finished = isinstance(events[-1], Finished)
                yield events
        finally:
            self.running.discard(request.request_id)
            self.ask_load()
            if not is_finished:
                self.aborted.append(request.request_id)

    def watch_load(self, callback: Callable[[EngineLoad], None], *, interval_s: float = 0.02) -> None:
        self._on_load = callback
        self.ask_load(with_all_prefixes=True)

    def ask_load(self, *, with_all_prefixes: bool = False) -> None:
        if self._on_load is not None:
            self._on_load(self.load(with_all_prefixes=with_all_prefixes))

    def load(self, *, with_all_prefixes: bool = False) -> EngineLoad:
        guided = {request.request_id for request in self.requests if request.is_guided}
        running = [
            RunningLoad(
                request_id=str(id_), num_steps_left=8, num_blocks_left=1, num_pages=1, num_lanes=1 + (id_ in guided)
            )
            for id_ in self.running
        ]
        return EngineLoad(
            num_lanes=self.num_lanes,
            num_lanes_free=max(self.num_lanes - sum(block.num_lanes for block in running), 0),
            num_pages=NUM_PAGES,
            num_pages_free=NUM_PAGES - len(running),
            num_waiting=0,
            num_lanes_waiting=0,
            running=tuple(running),
            pass_seconds=((1, 0.01),),
            prefixes=PrefixChanges(is_everything=with_all_prefixes),
        )

    async def stats(self) -> EngineStats:
        self.check_health()
        running = len(self.running)
        return EngineStats(
            num_waiting=0,
            num_running=running,
            num_lanes=self.num_lanes,
            num_lanes_in_use=running,
            num_pages=NUM_PAGES,
            pages_free=NUM_PAGES - running,
            pages_cached=0,
            pages_held=running,
        )

    async def concept_top_tokens(self, concept_id: int, k: int = 15, *, head: str = "known") -> list[tuple[int, float]]:
        return [((concept_id + i) % self.model_config.vocab_size, 3.0 - i / 8) for i in range(k)]

    async def concept_neighbors(self, concept_id: int, k: int = 10, *, head: str = "known") -> list[tuple[int, float]]:
        concept = self.model_config.concept
        number = concept.n_concepts if head == "known" else concept.n_discovered
        return [((concept_id + 1 + i) % number, 1.0 - i / 16) for i in range(min(k, number - 1))]

    async def analyze(self, analysis: Analysis) -> AnalysisResult:
        """Numbers that follow from the tokens alone."""
        self.analyses.append(analysis)
        if self.before_analysis is not None:
            name = f"analysis-{len(self.analyses)}"
            self.running.add(name)
            try:
                await self.before_analysis(analysis)
            finally:
                self.running.discard(name)
        match analysis:
            case ScoreTokens(token_ids=ids, num_logprobs=k):
                top = [tuple((token_id + i, -0.5 - i) for i in range(k)) for token_id in ids]
                return Scores(
                    logprobs=tuple(None if i == 0 else -1.0 - token_id % 7 for i, token_id in enumerate(ids)),
                    top_logprobs=tuple(() if i == 0 else entry for i, entry in enumerate(top)),
                )
            case EmbedTokens(token_ids=ids):
                return Embedding(vector=tuple(float(sum(ids) % 7 + i) for i in range(self.model_config.n_embd)))
            case EstimateLikelihood(continuation_token_ids=ids, num_samples=number, batch_size=size):
                error = 0.5 if number > size else None
                return Likelihood(log_likelihood=-float(len(ids)), standard_error=error, num_samples=number)
            case InspectTokens(token_ids=ids, top_k=k):
                concept = ConceptContribution(0, 0.5, 1.0)
                return Inspection(
                    tokens=tuple(TokenConcepts(known=(concept,)[:k], discovered=(concept,)[:k]) for _ in ids)
                )
            case AttributeInputs(trace=trace, num_steps=number):
                start = len(trace.prompt_token_ids)
                return InputAttribution(
                    targets=tuple(
                        TargetAttribution(
                            position=commit.position,
                            token_id=commit.token_id,
                            target_logit=2.0,
                            baseline_logit=0.5,
                            contributions=(1.5,) + (0.0,) * (start + trace.max_tokens - 1),
                        )
                        for commit in sorted(trace.commits, key=lambda commit: commit.position)
                        if analysis.targets is None or commit.position in analysis.targets
                    ),
                    num_steps=number,
                )
        raise AssertionError(analysis)

    def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        self.running.clear()

    def _events(self, request: GenerateRequest) -> Iterator[tuple[Event, ...]]:
        """Batches of events: one a denoising step, positions in a scrambled order."""
        size, start = self.model_config.diff_block_size, len(request.prompt_token_ids)
        end, seed = start + request.max_tokens, request.sampling.seed or 0
        request_id = request.request_id or "fake"
        steering = self._resolve(request)
        commits: list[Commit] = []
        text_end = end
        yield (Started(request_id, seed, size, start, start % size, 0, steering),)
        for block in range(start // size, -(-end // size)):
            first, last = max(block * size, start), min(block * size + size, end)
            if first >= text_end:
                break
            yield (BlockStarted(request_id, block, first, last),)
            order = sorted(range(first, last), key=lambda position: zlib.crc32(b"%d" % position))
            most = request.sampling.max_commits(size)
            while order := [position for position in order if position < text_end]:
                chosen, order = order[:most], order[most:]
                new = [self._commit(request, position, len(commits)) for position in chosen]
                commits += new
                ends = [c.position for c in new if c.token_id in self._end_ids(request)]
                text_end = min([text_end, *ends])
                yield (Committed(request_id, block, tuple(new)),)
            yield (BlockFinished(request_id, block, first, min(last, text_end)),)
        token_of = {commit.position: commit.token_id for commit in commits}
        reason = FinishReason.STOP if text_end < end else FinishReason.LENGTH
        output = Output(
            request_id=request_id,
            token_ids=tuple(token_of[position] for position in range(start, text_end)),
            finish_reason=FinishReason.ERROR if self.error else reason,
            commits=tuple(commits),
            num_forward_passes=len(commits) + 1,
            num_denoising_steps=len(commits),
            num_blocks=1 + max((c.position for c in commits), default=start) // size - start // size,
            num_prompt_tokens=start,
            num_cached_tokens=0,
            num_preemptions=0,
            seed=seed,
            steering=steering,
            error=self.error,
        )
        yield (Finished(request_id, output),)

    def _end_ids(self, request: GenerateRequest) -> set[int | None]:
        eot = None if request.sampling.ignore_eos else self.model_config.eot_id
        return {*request.sampling.stop_token_ids, eot}

    def _resolve(self, request: GenerateRequest) -> tuple[ResolvedIntervention, ...]:
        return tuple(
            ResolvedIntervention(
                item.concept_ids,
                item.weights or (1.0,) * len(item.concept_ids),
                item.strength / 2,
                2.0,
                self.model_config.n_layers // 2 if item.layer is None else item.layer,
                item.schedule,
                item.cutoff_tokens,
            )
            for item in (request.steering.interventions if request.steering else ())
        )

    def _commit(self, request: GenerateRequest, position: int, step: int) -> Commit:
        generated = position - len(request.prompt_token_ids)
        sampling, num_tokens = request.sampling, self.model_config.vocab_size - 8
        key = repr(
            (request.prompt_token_ids, sampling.seed, sampling.choice_index, request.steering, position)
        ).encode()
        token_id = zlib.crc32(key) % num_tokens
        if self.script:
            token_id = self.script[generated % len(self.script)]
        # The token itself is the second likeliest.
        top = tuple(((token_id + 1 - i) % num_tokens, -0.125 * (i + 1)) for i in range(sampling.num_logprobs))
        return Commit(position, token_id, step, 0.9, 5.0 + token_id / 7, -0.25, top, self._explain(request, token_id))

    def _explain(self, request: GenerateRequest, token_id: int) -> TokenAttribution | None:
        if request.attribution is None:
            return None
        concept = self.model_config.concept
        known = [ConceptContribution((token_id + i) % concept.n_concepts, 0.5, 2.0 - i) for i in range(4)]
        discovered = [ConceptContribution((token_id + i) % concept.n_discovered, 0.25, 0.5 - i / 4) for i in range(4)]
        known_total, discovered_total = sum(c.contribution for c in known), sum(c.contribution for c in discovered)
        top_k = request.attribution.top_k
        return TokenAttribution(
            tuple(sorted(known, key=lambda c: -abs(c.contribution))[:top_k]),
            tuple(sorted(discovered, key=lambda c: -abs(c.contribution))[:top_k]),
            known_total,
            discovered_total,
            5.0 + token_id / 7 - known_total - discovered_total,
        )


def scripted_engine(path: Path, config: object, *, recorder: object) -> FakeEngine:
    """A FakeEngine whose requests go wrong by their seed; importable, so that Ray's workers find it."""
    return FakeEngine(ModelConfig.from_json(path), before=misbehave, before_analysis=misbehave_in_analysis)


async def misbehave_in_analysis(analysis: Analysis) -> None:
    """The same for an embedding, by its first token, whatever batch the table says."""
    if isinstance(analysis, EmbedTokens) and analysis.token_ids[0] in MISBEHAVIOUR:
        _, error = MISBEHAVIOUR[analysis.token_ids[0]]
        if error is not None:
            raise error
        await asyncio.Event().wait()


async def misbehave(request: GenerateRequest, number: int) -> None:
    """Raise what the table says for the seed, before the batch of events that it says; None hangs for ever."""
    if request.sampling.seed in MISBEHAVIOUR:
        at, error = MISBEHAVIOUR[request.sampling.seed]
        if number == at and error is not None:
            raise error
        if number == at:
            await asyncio.Event().wait()


MISBEHAVIOUR: dict[int, tuple[int, Exception | None]] = {
    100: (0, QueueFull("the queue is full")),
    101: (0, RuntimeError("a defect of ours")),
    102: (0, Unsupported("no such steering", param="steering")),
    103: (6, NonFiniteLogits("no finite logits at position 3")),
    104: (5, None),
    105: (0, EngineStopped("the thread ended")),
}


def slow_engine(path: Path, config: object, *, recorder: object) -> FakeEngine:
    """Loads until somebody puts a file `go` beside the checkpoint."""
    while not (Path(path) / "go").exists():
        time.sleep(0.05)
    return FakeEngine(ModelConfig.from_json(path))
