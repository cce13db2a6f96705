"""Which input tokens drove each generated one: integrated gradients over a replayed trace.

For a target, what the model saw in the step that committed it is reached on a straight path from masks alone; the
gradient of the target's logit along it, times the way, is what each input position contributed. Source: Sundararajan
et al., Axiomatic Attribution for Deep Networks (2017), equation 3, as a right Riemann sum.

Shapes: R points of a path, S positions, D model width.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..analysis import AttributeInputs, InputAttribution, TargetAttribution
from ..errors import Unsupported
from ..model.quantization import is_quantized
from ..runner.model_runner import ModelRunner
from ..runner.transfer import HostCopy, to_device
from ..trace import TracedCommit
from .snapshots import POSITIONS_AT_ONCE, Snapshot, SnapshotPasses, check_trace, snapshots


def attribute_inputs(analysis: AttributeInputs, runner: ModelRunner) -> Generator[None, None, InputAttribution]:
    """The work of an analysis, a slice some points of one target's path. Raises InvalidRequest for what is not served.

    Runs the plain modules, in the model's dtype; embeddings and gradients are float32.
    """
    if runner.config.needs_heads_for_tokens:
        raise Unsupported(
            "this checkpoint chooses tokens from concept features (use_epsilon_correction is false), which the inputs "
            "reach through a choice of concepts that has no gradient; tokens are not attributed to inputs",
            param="trace",
        )
    if is_quantized(runner.plain_model):
        raise Unsupported(
            "the engine runs in fp8, whose products have no gradient; tokens are attributed to inputs with dtype "
            "bfloat16 or float32",
            param="trace",
        )
    check_trace(analysis.trace, runner.config, runner)
    return _work(analysis, runner, SnapshotPasses(runner, analysis.trace))


@dataclass(frozen=True, slots=True)
class _Part:
    """One target's numbers on their way to the host."""

    commit: TracedCommit
    packed: HostCopy
    """float32 [S + 2]: contributions, then the target's logit and the baseline's."""


def _work(
    analysis: AttributeInputs, runner: ModelRunner, passes: SnapshotPasses
) -> Generator[None, None, InputAttribution]:
    num_steps, limit = analysis.num_steps, analysis.trace.limit
    most_positions = min(POSITIONS_AT_ONCE, runner.replay_context)
    wanted = None if analysis.targets is None else set(analysis.targets)
    parts: list[_Part] = []
    for snapshot in snapshots(analysis.trace, runner.config):
        num_points = max(most_positions // len(snapshot.token_ids), 1)
        for commit in snapshot.commits:
            if wanted is not None and commit.position not in wanted:
                continue
            total_S = torch.zeros(len(snapshot.token_ids), device=runner.device)
            logits: list[Tensor] = []
            # Point 0 is the baseline, of which only the logit counts.
            for start in range(0, num_steps + 1, num_points):
                points = range(start, min(start + num_points, num_steps + 1))
                contribution_S, logit_R = _slice(passes, snapshot, commit, points, num_steps)
                total_S += contribution_S
                logits += [logit_R[:1]] if start == 0 else []
                logits += [logit_R[-1:]] if points.stop == num_steps + 1 else []
                yield
            parts.append(_Part(commit, HostCopy(torch.cat((total_S, logits[-1], logits[0])))))
    return InputAttribution(
        targets=tuple(sorted((_read(part, limit) for part in parts), key=lambda target: target.position)),
        num_steps=num_steps,
    )


@torch.enable_grad()
def _slice(
    passes: SnapshotPasses, snapshot: Snapshot, commit: TracedCommit, points: range, num_steps: int
) -> tuple[Tensor, Tensor]:
    """What some points of a target's path add to its contributions, [S], and the target's logit at each, [R]; float32.

    Point i of `num_steps` lies at i / num_steps of the way.
    """
    transformer = passes.model.transformer
    token_ids_RS = passes.tokens([snapshot]).expand(len(points), -1)
    mask_id = torch.full_like(token_ids_RS[0], passes.model.config.mask_token_id)
    mask_SD = transformer.embedding(mask_id).detach().float()
    delta_SD = transformer.embedding(token_ids_RS[0]).detach().float() - mask_SD
    share_R = to_device([point / num_steps for point in points], torch.float32, passes.device)
    embeddings_RSD = (mask_SD + share_R[:, None, None] * delta_SD).requires_grad_()
    hidden_RSD = passes.hidden(
        embeddings_RSD.to(transformer.lm_head.weight.dtype),
        token_ids_RS,
        [snapshot.num_committed] * len(points),
        recomputes=True,
    )
    token_D = transformer.token_vectors_VD[commit.token_id].detach().float()
    logit_R = hidden_RSD[:, commit.position].float() @ token_D
    # The baseline's own gradient is no part of a right sum.
    (gradient_RSD,) = torch.autograd.grad((logit_R * (share_R > 0)).sum(), embeddings_RSD)
    contribution_S = (delta_SD * gradient_RSD.sum(dim=0)).sum(dim=-1) / num_steps
    return contribution_S, logit_R.detach()


def _read(part: _Part, limit: int) -> TargetAttribution:
    *contributions, target_logit, baseline_logit = part.packed.read().tolist()
    absent = [0.0] * (limit - len(contributions))
    return TargetAttribution(
        position=part.commit.position,
        token_id=part.commit.token_id,
        target_logit=target_logit,
        baseline_logit=baseline_logit,
        contributions=tuple(contributions + absent),
    )
