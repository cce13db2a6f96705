"""What a model saw before each step of a trace, and dense passes over that.

Where the engine runs rows against pages, this runs whole texts from position 0: a canvas with everything before it.
Later blocks are left out, as no earlier position attends to them.

Shapes: R texts, S positions, G steering groups, L layers, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..admission import check_request
from ..checks import shown
from ..config import ModelConfig
from ..decoding import steering
from ..errors import InvalidValue, Unsupported
from ..model.transformer import Inject
from ..request import GenerateRequest, SamplingParams
from ..runner.model_runner import ModelRunner
from ..runner.transfer import to_device
from ..scheduling import Sequence
from ..trace import Trace, TracedCommit

POSITIONS_AT_ONCE = 1024
"""Of a slice: as many texts of one length as have so many positions, but one at least. Passes wait for a slice."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One denoising step: what was there, and what it committed."""

    token_ids: tuple[int, ...]
    """All positions up to the end of the canvas, masks where nothing was committed yet."""
    num_committed: int
    """Tokens committed before it."""
    commits: tuple[TracedCommit, ...]


def check_trace(trace: Trace, config: ModelConfig, runner: ModelRunner) -> None:
    """Raise an InvalidRequest for a trace that this engine cannot replay, or that no generation can have left."""
    longest = runner.replay_context
    if longest == 0:
        raise Unsupported(
            "traces are not replayed here, because input_attribution_context is 0; set it to the longest prompt and "
            "max_tokens together, or leave it out",
            param="trace",
        )
    if trace.limit > longest:
        raise Unsupported(
            f"there are {len(trace.prompt_token_ids)} prompt tokens and max_tokens is {trace.max_tokens}; together at "
            f"most {longest} are replayed: raise input_attribution_context",
            param="trace",
        )
    if trace.cfg_scale:
        raise Unsupported(
            f"cfg_scale is {trace.cfg_scale:g}, and guided generations are not replayed: their logits come from two "
            "passes",
            param="trace.cfg_scale",
        )
    if trace.steering is not None and trace.steering.overrides:
        raise Unsupported(
            "generations with overrides of concept weights are not replayed", param="trace.steering.overrides"
        )
    request = GenerateRequest(
        prompt_token_ids=trace.prompt_token_ids,
        max_tokens=trace.max_tokens,
        sampling=SamplingParams(stop_token_ids=tuple(trace.stop_token_ids)),
        steering=trace.steering,
    )
    check_request(request, config)
    for _ in _walk(trace, config):
        pass


def snapshots(trace: Trace, config: ModelConfig) -> Iterator[Snapshot]:
    """The steps of a checked trace in turn."""
    for sequence, commits in _walk(trace, config):
        stop = sequence.key_length(sequence.block)
        yield Snapshot(tuple(sequence.token_ids[:stop]), sequence.num_committed, commits)


def _walk(trace: Trace, config: ModelConfig) -> Iterator[tuple[Sequence, tuple[TracedCommit, ...]]]:
    """The sequence before each step, with the step's commits; raises InvalidValue where they cannot have been made."""
    sequence = Sequence(
        id="trace",
        arrival=0,
        block_size=config.diff_block_size,
        prompt_token_ids=trace.prompt_token_ids,
        max_tokens=trace.max_tokens,
        mask_token_id=config.mask_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        end_token_ids=config.end_token_ids(trace.stop_token_ids, ignore_eos=trace.ignore_eos),
        # No step commits more, and how many it did is what the trace says.
        tokens_per_step=config.diff_block_size,
    )
    for commits in trace.steps():
        if not sequence.num_masked(sequence.block) and sequence.end is None and not sequence.is_last(sequence.block):
            sequence.start_next_block()
        for commit in commits:
            _check_commit(commit, sequence, config)
        yield sequence, commits
        sequence.commit((commit.position, commit.token_id) for commit in commits)


def _check_commit(commit: TracedCommit, sequence: Sequence, config: ModelConfig) -> None:
    canvas = sequence.canvas_range(sequence.block)
    if commit.position not in canvas or sequence.token_ids[commit.position] != config.mask_token_id:
        raise InvalidValue(
            f"step {commit.denoising_step} commits position {commit.position}, which was not to be filled then: the "
            f"canvas was [{canvas.start}, {canvas.stop}), and what is right of an end in it is final",
            param="trace.commits",
        )
    if commit.token_id >= config.vocab_size or commit.token_id in config.banned_token_ids:
        raise InvalidValue(
            f"step {commit.denoising_step} commits token {shown(commit.token_id)} at {commit.position}; token ids lie "
            f"in [0, {config.vocab_size}), and {', '.join(map(str, config.banned_token_ids))} are never chosen",
            param="trace.commits",
        )


class SnapshotPasses:
    """Dense passes over a trace's snapshots, steered as the generation was."""

    def __init__(self, runner: ModelRunner, trace: Trace) -> None:
        """Raises InvalidValue for steering that no lane holds."""
        self.model = runner.plain_model
        self.device = runner.device
        self._mask_token_id = runner.config.mask_token_id
        with runner.beside_passes():
            self._steering = steering.plan_steering(runner.model, trace.steering)

    def tokens(self, texts: list[Snapshot]) -> Tensor:
        """Token ids of snapshots of one length, int64 [R, S]."""
        return to_device([text.token_ids for text in texts], torch.int64, self.device)

    def hidden(
        self, embeddings_RSD: Tensor, token_ids_RS: Tensor, num_committed: list[int], *, recomputes: bool = False
    ) -> Tensor:
        """Hidden states hidden_RSD. The tokens only say where masks are, `num_committed` which steering acts still."""
        inject = self._injection(token_ids_RS == self._mask_token_id, num_committed)
        return self.model.transformer.dense_from_embeddings(embeddings_RSD, inject, recomputes=recomputes)

    def _injection(self, masked_RS: Tensor, num_committed: list[int]) -> Inject | None:
        plan = self._steering
        if not len(plan.vector_GD):
            return None
        num_rows = len(num_committed)
        # Not by the kernel: for another number of groups than lanes have it would be compiled anew, between passes.
        added_LRD = steering.added_by_layer_slow(
            plan.vector_GD.expand(num_rows, -1, -1),
            plan.layer_G.expand(num_rows, -1),
            plan.cutoff_G.expand(num_rows, -1),
            to_device(num_committed, torch.int64, self.device),
            self.model.config.n_layers,
        )

        def inject(layer: int, x_RSD: Tensor) -> Tensor:
            return steering.inject(x_RSD, added_LRD[layer], masked_RS)

        return inject
