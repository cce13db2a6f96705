"""Comparing the engine's output with the oracle's: what has to be equal and what has to be close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine import Commit, Output, TokenAttribution
from tests.oracle import Attribution, Choice
from tests.reference import Generation

TOLERANCE = 1e-4


@dataclass
class Comparison:
    """Positions compared and the largest difference of each quantity."""

    num_commits: int = 0
    errors: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, ours: float, theirs: float) -> None:
        """Record a difference; it must not exceed the tolerance."""
        error = abs(ours - theirs)
        self.errors[name] = max(self.errors.get(name, 0.0), error)
        assert error <= TOLERANCE, f"{name}: {ours} against {theirs}"

    @property
    def largest(self) -> float:
        """The largest difference of any quantity."""
        return max(self.errors.values(), default=0.0)

    def add(self, other: Comparison) -> None:
        """Take another comparison in."""
        self.num_commits += other.num_commits
        for name, error in other.errors.items():
            self.errors[name] = max(self.errors.get(name, 0.0), error)


def decisions(commits: Sequence[Commit] | Sequence[Choice]) -> list[tuple[int, int, int]]:
    """(denoising step, position, token) of each commit in order."""
    return [(c.denoising_step, c.position, c.token_id) for c in commits]


def first_difference(ours: Sequence[Commit], theirs: Sequence[Choice]) -> str:
    """Where two runs part, and how far apart the oracle saw the alternatives."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if decisions([a]) != decisions([b]):
            return (
                f"commit {index}: engine step {a.denoising_step} position {a.position} token {a.token_id} "
                f"confidence {a.confidence:.7f}, oracle step {b.denoising_step} position {b.position} "
                f"token {b.token_id} confidence {b.confidence}"
            )
    return f"{len(ours)} commits against {len(theirs)}"


def compare_commits(ours: Sequence[Commit], theirs: Sequence[Choice]) -> Comparison:
    """Same decisions in the same order; every number within the tolerance."""
    assert decisions(ours) == decisions(theirs), first_difference(ours, theirs)
    result = Comparison(num_commits=len(ours))
    for a, b in zip(ours, theirs, strict=True):
        result.note("target logit", a.target_logit, b.target_logit)
        result.note("logprob", a.logprob, b.logprob)
        if b.confidence is not None:
            result.note("confidence", a.confidence, b.confidence)
        if a.attribution is not None:
            compare_attribution(result, a.attribution, b.attribution)
    return result


def compare_attribution(result: Comparison, ours: TokenAttribution, theirs: Attribution) -> None:
    """The same concepts with the same weights and contributions, and the same rest."""
    known = {c.concept_id: (c.weight, c.contribution) for c in ours.known}
    discovered = {c.concept_id: (c.weight, c.contribution) for c in ours.discovered}
    compare_concepts(result, known, theirs.known)
    compare_concepts(result, discovered, theirs.discovered)
    for found in (ours.known, ours.discovered):
        sizes = [abs(c.contribution) for c in found]
        assert sizes == sorted(sizes, reverse=True), "contributions come largest first"
    result.note("known total", ours.known_total, sum(c for _, c in theirs.known.values()))
    result.note("discovered total", ours.discovered_total, sum(c for _, c in theirs.discovered.values()))
    result.note("epsilon", ours.epsilon, theirs.epsilon)
    if theirs.epsilon_by_vector is not None:
        # By subtraction the parts always sum to the logit; the residual vector itself is the honest check.
        result.note("epsilon by vector", ours.epsilon, theirs.epsilon_by_vector)


def compare_concepts(
    result: Comparison, ours: Mapping[int, tuple[float, float]], theirs: Mapping[int, tuple[float, float]]
) -> None:
    """Concepts by id."""
    assert set(ours) == set(theirs), f"concepts {sorted(ours)} against {sorted(theirs)}"
    for concept, (weight, contribution) in ours.items():
        result.note("weight", weight, theirs[concept][0])
        result.note("contribution", contribution, theirs[concept][1])


def compare_output(output: Output, expected: Generation) -> Comparison:
    """A whole generation against the plain reference."""
    result = compare_commits(output.commits, expected.choices)
    assert output.token_ids == expected.token_ids
    assert output.finish_reason == expected.finish_reason
    assert output.num_denoising_steps == expected.num_steps
    return result
