"""A Monte-Carlo estimate of a continuation's log-likelihood: how well the model restores it under random masks.

Formula: the bound of masked diffusion models (Nie et al., Large Language Diffusion Models, 2025): the cross-entropy of
the masked tokens over the share that is masked, averaged over masks. Batches of samples spread their mask counts evenly
over the continuation. Later blocks see the masks of earlier ones, so each sample has pages of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from ..analysis import EstimateLikelihood, Likelihood
from ..decoding.random import uniform
from ..runner.text_passes import Readable, TokenScore
from ..scheduling import PageLease
from .noisy_rows import Mask, NoisyRow, NoisyText
from .texts import CleanText, Slices, Tools, check_text, keys_of, on_pages, read_behind, require_finite


def start_likelihood(analysis: EstimateLikelihood, tools: Tools) -> Slices:
    """The generator of an analysis; raises InvalidRequest for what can never be served."""
    prompt, continuation = tuple(analysis.prompt_token_ids), tuple(analysis.continuation_token_ids)
    check_text(prompt, tools.config, name="prompt_token_ids")
    check_text(continuation, tools.config, name="continuation_token_ids", others=len(prompt))
    text = NoisyText(prompt, continuation, tools.config, is_guided=analysis.cfg_scale > 0 and bool(prompt))
    tools.lending.check_fits(text.num_clean, text.num_scratch(1), "continuation_token_ids")
    masks = (
        draw_mask(len(continuation), sample, analysis.num_samples, analysis.batch_size, analysis.seed)
        for sample in range(analysis.num_samples)
    )
    return estimate(text, masks, analysis, tools)


def draw_mask(num_tokens: int, sample: int, num_samples: int, batch_size: int, seed: int) -> Mask:
    """Which of a continuation's tokens are masked in a sample: a function of the arguments alone."""
    batch, index = divmod(sample, batch_size)
    size = min(batch_size, num_samples - batch * batch_size)
    first = 1 + math.floor(_uniform(seed, [batch], 0)[0] * num_tokens)
    # The batch's counts start anywhere and go round once.
    count = (round(first + index * num_tokens / size) - 1) % num_tokens + 1
    noise = _uniform(seed, list(range(num_tokens)), 1 + sample)
    return tuple(sorted(sorted(range(num_tokens), key=noise.__getitem__)[:count]))


def _uniform(seed: int, positions: list[int], choice_index: int) -> list[float]:
    position = torch.tensor(positions)
    values: list[float] = uniform(torch.tensor(seed), position, torch.tensor(choice_index)).tolist()
    return values


def estimate(text: NoisyText, masks: Iterable[Mask], analysis: EstimateLikelihood, tools: Tools) -> Slices:
    """The estimate from given masks, one a sample: nothing of `analysis` counts but its batch size and cfg_scale."""

    def work(lease: PageLease) -> Slices:
        yield from CleanText(text.token_ids, lease, tools.passes).seal_all()
        yield from _write_unconditional_prompt(text, lease, tools)
        loss_of: dict[int, float] = {}
        for sample, loss in (yield from read_behind(_launches(text, masks, lease, analysis.cfg_scale, tools))):
            loss_of[sample] = loss_of.get(sample, 0.0) + loss
        require_finite(all(map(math.isfinite, loss_of.values())), "the continuation")
        return combine([loss_of[sample] for sample in sorted(loss_of)], analysis.batch_size)

    keys = keys_of(text.token_ids, text.num_clean, tools.config)
    most = text.num_scratch(text.num_at_once(tools.passes.max_rows))
    return (yield from on_pages(tools, keys, least_scratch=text.num_scratch(1), most_scratch=most, work=work))


def combine(losses: Sequence[float], batch_size: int) -> Likelihood:
    """The estimate from the samples' losses, each -logprob of the masked tokens over the masked share.

    Batches are drawn independently, so the variance of their means over their number estimates that of the estimate
    without bias, also where the last batch is smaller and varies more. A batch's mask counts are one systematic sample:
    a random start and even steps. Such a sample cannot tell its own variance without bias (Cochran, Sampling
    Techniques, 1977, chapter 8), since its members are not independent: the spread between mask counts is in its
    losses, but the even steps take it out of their mean. So one batch gives no error.
    """
    # A batch that is not complete counts as much as the others, as in the published evaluation.
    batches = [losses[start : start + batch_size] for start in range(0, len(losses), batch_size)]
    means = [math.fsum(batch) / len(batch) for batch in batches]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Likelihood(log_likelihood=-statistics.fmean(means), standard_error=error, num_samples=len(losses))


def _write_unconditional_prompt(text: NoisyText, lease: PageLease, tools: Tools) -> Iterator[None]:
    """Write the masked complete blocks of the prompt, once for all samples."""
    rows = text.unconditional_prompt(lease.scratch_page_ids)
    for start in range(0, len(rows), tools.passes.max_rows):
        tools.passes.hidden(rows[start : start + tools.passes.max_rows])
        yield


@dataclass(frozen=True, slots=True)
class _Losses:
    """Parts of samples' losses on their way."""

    scores: Readable[TokenScore] | None
    """None where a pass had no masked tokens of the continuation."""
    factors: list[tuple[int, float]]
    """Of each score, its sample and the inverse of the share that is masked."""

    def read(self) -> list[tuple[int, float]]:
        """(sample, loss) of the samples in the pass."""
        terms: dict[int, list[float]] = {}
        for (sample, factor), score in zip(self.factors, self.scores.read() if self.scores else [], strict=True):
            terms.setdefault(sample, []).append(-score.logprob * factor)
        return [(sample, math.fsum(parts)) for sample, parts in terms.items()]


def _launches(
    text: NoisyText, masks: Iterable[Mask], lease: PageLease, cfg_scale: float, tools: Tools
) -> Iterator[_Losses]:
    # A row and the one that guides it never part.
    width = tools.passes.max_rows // text.num_copies * text.num_copies
    num_page_sets = text.num_page_sets(len(lease.scratch_page_ids))
    samples = enumerate(masks)
    while group := list(islice(samples, num_page_sets)):
        rows = [
            row for page_set, (sample, mask) in enumerate(group) for row in text.rows(sample, mask, page_set, lease)
        ]
        for start in range(0, len(rows), width):
            yield _launch(rows[start : start + width], text, cfg_scale, tools)


def _launch(rows: list[NoisyRow], text: NoisyText, cfg_scale: float, tools: Tools) -> _Losses:
    hidden_RCD = tools.passes.hidden([noisy.row for noisy in rows])
    conditional = [(index, noisy) for index, noisy in enumerate(rows) if not noisy.is_unconditional]
    targets = [(index, offset, noisy) for index, noisy in conditional for offset in noisy.offsets]
    if not targets:
        return _Losses(None, [])
    scores = tools.passes.scores(
        tools.passes.at(hidden_RCD, [(index, offset) for index, offset, _ in targets]),
        [text.token_ids[noisy.row.block * text.block_size + offset] for _, offset, noisy in targets],
        unconditional_MD=(
            tools.passes.at(hidden_RCD, [(index + 1, offset) for index, offset, _ in targets])
            if text.is_guided
            else None
        ),
        cfg_scale=cfg_scale,
    )
    return _Losses(scores, [(noisy.sample, noisy.factor) for _, _, noisy in targets])
