"""What a model makes of a trace's commits: each token's logit, probability and rank in the step that committed it.

Shapes: R snapshots, S positions, M commits, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from ..analysis import Replay, ReplayedCommit, ReplayTrace
from ..runner.kv_cache import REPLAYED_COMMITS
from ..runner.model_runner import ModelRunner
from ..runner.transfer import HostCopy, to_device
from ..trace import Trace
from .snapshots import POSITIONS_AT_ONCE, Snapshot, SnapshotPasses, check_trace, snapshots


def replay_trace(analysis: ReplayTrace, runner: ModelRunner) -> Generator[None, None, Replay]:
    """The work of an analysis, a slice a few steps of the trace. Raises InvalidRequest for what is not served."""
    check_trace(analysis.trace, runner.config, runner)
    return _work(analysis.trace, runner, SnapshotPasses(runner, analysis.trace))


def _work(trace: Trace, runner: ModelRunner, passes: SnapshotPasses) -> Generator[None, None, Replay]:
    parts: list[HostCopy] = []
    for texts in _alike(trace, runner, min(POSITIONS_AT_ONCE, runner.replay_context)):
        parts += [HostCopy(found_M3) for found_M3 in _slice(passes, texts)]
        yield
    found = [values for part in parts for values in part.read().tolist()]
    return Replay(
        commits=tuple(
            ReplayedCommit(
                position=commit.position,
                token_id=commit.token_id,
                denoising_step=commit.denoising_step,
                target_logit=target_logit,
                logprob=logprob,
                rank=int(rank),
                recorded_logit=commit.target_logit,
            )
            for commit, (target_logit, logprob, rank) in zip(trace.commits, found, strict=True)
        )
    )


def _alike(trace: Trace, runner: ModelRunner, most_positions: int) -> Iterator[list[Snapshot]]:
    """The trace's steps in turn, as many together as are of one length and fit, one at least."""
    texts: list[Snapshot] = []
    for snapshot in snapshots(trace, runner.config):
        length = len(snapshot.token_ids)
        if texts and (len(texts[0].token_ids) != length or (len(texts) + 1) * length > most_positions):
            yield texts
            texts = []
        texts.append(snapshot)
    if texts:
        yield texts


@torch.no_grad()
def _slice(passes: SnapshotPasses, texts: list[Snapshot]) -> list[Tensor]:
    """Target logit, logprob and rank of each commit, float32 [M, 3] in parts."""
    model, config = passes.model, passes.model.config
    token_ids_RS = passes.tokens(texts)
    embeddings_RSD = model.transformer.embedding(token_ids_RS)
    hidden_RSD = passes.hidden(embeddings_RSD, token_ids_RS, [text.num_committed for text in texts])
    places = [(row, c.position, c.token_id) for row, text in enumerate(texts) for c in text.commits]
    place_M3 = to_device(places, torch.int64, passes.device)
    banned = to_device(list(config.banned_token_ids), torch.int64, passes.device)
    found = []
    for start in range(0, len(places), REPLAYED_COMMITS):
        row_M, position_M, token_M = place_M3[start : start + REPLAYED_COMMITS].unbind(dim=1)
        composed_MD = model.compose(hidden_RSD[row_M, position_M])
        logits_MV = model.transformer.logits(composed_MD).float()
        target_M = logits_MV.gather(1, token_M[:, None])[:, 0]
        logprob_M = target_M - logits_MV.logsumexp(dim=-1)
        is_larger_MV = (logits_MV > target_M[:, None]).index_fill(1, banned, False)
        found.append(torch.stack((target_M, logprob_M, is_larger_MV.sum(dim=-1).float()), dim=1))
    return found
