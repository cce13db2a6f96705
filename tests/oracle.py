"""The reference package, wrapped as the tests need it: a dense forward pass and its own generation.

The package's model is built directly and given the checkpoint's tensors. Nothing of the product is used
here, so that a mistake cannot cancel itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from steerling.attribution.concept_attribution import AttributionAccumulator, _compute_unknown_topk
from steerling.attribution.input_attribution import FaithfulOutputToInputAttributor, _TraceRecorder
from steerling.attribution.trace import CommitRecord
from steerling.configs import GenerationConfig, SteeringConfig
from steerling.inference.causal_diffusion import GenerationStepInfo, SteerlingGenerator
from steerling.models.interpretable import InterpretableCausalDiffusionLM, InterpretableOutput
from torch import Tensor

from tests.checkpoints import Recipe

Generator = TypeVar("Generator", bound=SteerlingGenerator)


@dataclass(frozen=True)
class Attribution:
    """The concepts behind one token; id -> (weight, contribution)."""

    known: dict[int, tuple[float, float]]
    discovered: dict[int, tuple[float, float]]
    epsilon: float
    """Target logit minus the contributions."""
    epsilon_by_vector: float | None
    """(hidden - known - discovered) . W[token]; None where reported and active concepts differ."""


@dataclass(frozen=True)
class Choice:
    """One position's token as the oracle or the plain reference chose it."""

    position: int
    token_id: int
    denoising_step: int
    target_logit: float
    logprob: float
    attribution: Attribution
    confidence: float | None = None
    """None where the package does not tell it."""


@dataclass(frozen=True)
class Overrides:
    """Weights that are set at masked positions: concept -> weight."""

    known: dict[int, float] = field(default_factory=dict)
    discovered: dict[int, float] = field(default_factory=dict)
    is_by_package: bool = False
    """As the package's `intervene` does; else (new - current weight) * embedding is added before lm_head."""


@dataclass(frozen=True)
class Pass:
    """One dense forward over a whole sequence; under guidance, over it and over its unconditional copy."""

    logits_SV: Tensor
    """Under guidance the guided ones."""
    outputs: InterpretableOutput
    """Of a pass with overrides by the package, what `intervene` gave; else of the pass without them."""
    overrides: Overrides = Overrides()
    index: int = 0
    """Of the sequence in the outputs' batch."""
    unconditional: Pass | None = None
    scale: float = 0.0


def guided(conditional: Pass, unconditional: Pass, scale: float) -> Pass:
    """Both passes as one: logits uncond + (scale + 1) * (cond - uncond)."""
    cond_SV, uncond_SV = conditional.logits_SV, unconditional.logits_SV
    logits_SV = uncond_SV + (scale + 1) * (cond_SV - uncond_SV)
    return replace(conditional, logits_SV=logits_SV, unconditional=unconditional, scale=scale)


@dataclass(frozen=True)
class _Tokenizer:
    """As much of a tokenizer as the package's generator looks at."""

    mask_token_id: int
    eos_token_id: int
    pad_token_id: int

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]


class _WatchedGenerator(SteerlingGenerator):
    """The package's generator, which tells its callback nothing under guidance: this one keeps each forward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forwards: list[tuple[Tensor, Tensor, InterpretableOutput]] = []
        """Token ids, logits and outputs, each of a batch of two: the sequence and its unconditional copy."""

    def _forward(self, input_ids: Tensor, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        logits, outputs = super()._forward(input_ids, *args, return_outputs=True, **kwargs)
        self.forwards.append((input_ids.clone(), logits, outputs))
        return (logits, outputs) if return_outputs else logits


class Oracle:
    """The package's model with a recipe's weights."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model: InterpretableCausalDiffusionLM = recipe.build()
        ids = recipe.special_ids
        self.mask_id, self.eos_id, self.pad_id = ids["mask_token_id"], ids["eos_token_id"], ids["pad_token_id"]
        self.eot_id = ids.get("eot_id")
        self.block = recipe.block
        self.num_layers = recipe.model_config.n_layers
        self.has_no_positions = not recipe.model_config.use_rope
        self.lm_head_VD = self.model.transformer.lm_head.weight.detach()
        self.generator = self._make(SteerlingGenerator)

    def _make(self, kind: type[Generator]) -> Generator:
        return kind(
            self.model,
            _Tokenizer(self.mask_id, self.eos_id, self.pad_id),
            self.recipe.model_config,
            is_interpretable=True,
            device="cpu",
        )

    def embedding(self, known_id: int) -> Tensor:
        """Embedding (D,) of a known concept."""
        return self._embedding(self.model.known_head, known_id)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Sequence[int],
        injections: Sequence[tuple[int, Tensor]] = (),
        overrides: Overrides | None = None,
    ) -> Pass:
        """Dense forward. Each injection (layer, vector (D,)) is added at masked positions from that layer on."""
        overrides = overrides or Overrides()
        ids = torch.tensor([list(token_ids)])
        masked = (ids == self.mask_id).unsqueeze(-1)
        with ExitStack() as hooks:
            for index, block in enumerate(self.model.transformer.blocks):
                vectors = [vector for layer, vector in injections if index + 1 >= layer]
                if vectors:
                    total = masked * torch.stack(vectors).sum(dim=0)
                    handle = block.register_forward_hook(lambda _m, _a, out, total=total: out + total)
                    hooks.callback(handle.remove)
            if overrides.is_by_package:
                logits, outputs = self.model.intervene(
                    ids, known=overrides.known, unknown=overrides.discovered, positions=masked[..., 0]
                )
            else:
                logits, outputs = self.model(ids, minimal_output=True)
        if not overrides.is_by_package and (overrides.known or overrides.discovered):
            change = masked * self._change(outputs.hidden, overrides)
            logits = self.model.transformer.lm_head(outputs.composed + change)
        return Pass(logits[0], outputs, overrides)

    def _change(self, hidden: Tensor, overrides: Overrides) -> Tensor:
        """Sum of (new - current weight) * embedding, with every weight of the head at hand."""
        change = torch.zeros_like(hidden)
        for head, wanted in (
            (self.model.known_head, overrides.known),
            (self.model.unknown_head, overrides.discovered),
        ):
            for concept, weight in wanted.items():
                current = self.weights(head, hidden)[..., concept, None]
                change = change + (weight - current) * self._embedding(head, concept)
        return change

    @staticmethod
    def weights(head: Any, hidden: Tensor) -> Tensor:
        """Sigmoids of all of a head's concepts at hidden states (..., D)."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        ids = torch.arange(head.n_concepts).expand(len(flat), -1)
        weights: Tensor = head.compute_logits_for_indices(flat, ids).sigmoid()
        return weights.reshape(*hidden.shape[:-1], -1)

    @staticmethod
    def _embedding(head: Any, concept: int) -> Tensor:
        embedding: Tensor = head._get_embedding(torch.tensor([concept]))[0].detach()
        return embedding

    def choice(self, seen: Pass, position: int, token_id: int, step: int, confidence: float | None = None) -> Choice:
        """Everything the pass says about choosing this token there."""
        logits_V = seen.logits_SV[position]
        return Choice(
            position=position,
            token_id=token_id,
            denoising_step=step,
            target_logit=float(logits_V[token_id]),
            logprob=float(logits_V.log_softmax(dim=-1)[token_id]),
            attribution=self.attribute(seen, position, token_id),
            confidence=confidence,
        )

    @torch.no_grad()
    def attribute(self, seen: Pass, position: int, token_id: int) -> Attribution:
        """Concepts of both heads that the package reports for this token; guided, if the pass is."""
        own = self._attribute_alone(seen, position, token_id)
        if seen.unconditional is None:
            return own
        other = self._attribute_alone(seen.unconditional, position, token_id)
        known = _guided_concepts(own.known, other.known, seen.scale)
        discovered = _guided_concepts(own.discovered, other.discovered, seen.scale)
        parts = sum(c for _, c in known.values()) + sum(c for _, c in discovered.values())
        by_vector = None
        if own.epsilon_by_vector is not None and other.epsilon_by_vector is not None:
            by_vector = (seen.scale + 1) * own.epsilon_by_vector - seen.scale * other.epsilon_by_vector
        return Attribution(known, discovered, float(seen.logits_SV[position, token_id]) - parts, by_vector)

    def _attribute_alone(self, seen: Pass, position: int, token_id: int) -> Attribution:
        """The same from the pass's own outputs; the epsilon is the guided logit's where the pass is guided."""
        outputs, concept, index = seen.outputs, self.recipe.concept_config, seen.index
        hidden_D, target_D = outputs.hidden[index, position], self.lm_head_VD[token_id]
        num_known = min(concept.topk_known or concept.n_concepts, concept.topk_known_features or concept.n_concepts)
        overrides = seen.overrides
        known = self.top_contributions(self.model.known_head, hidden_D, target_D, num_known, overrides.known)
        discovered = {}
        features = outputs.known_features[index, position]
        if self.model.unknown_head is not None:
            num_discovered = concept.unknown_topk or 64
            discovered = self.top_contributions(
                self.model.unknown_head, hidden_D, target_D, num_discovered, overrides.discovered
            )
            features = features + outputs.unk_hat[index, position]
        parts = sum(c for _, c in known.values()) + sum(c for _, c in discovered.values())
        is_whole = concept.use_epsilon_correction and self._reports_all_active()
        # Without overrides this is the hidden state itself.
        whole_D = outputs.composed[index, position] if overrides.is_by_package else hidden_D
        features = features + self._taken_from_rest(hidden_D, overrides)
        return Attribution(
            known=known,
            discovered=discovered,
            epsilon=float(seen.logits_SV[position, token_id]) - parts,
            epsilon_by_vector=float((whole_D - features) @ target_D) if is_whole else None,
        )

    def _taken_from_rest(self, hidden_D: Tensor, overrides: Overrides) -> Tensor:
        """What overrides took away that no active concept had: the current weights of concepts outside the top k.

        The package's small heads, told to set a weight, sum all weights anew and take nothing away.
        """
        concept = self.recipe.concept_config
        total_D = torch.zeros_like(hidden_D)
        for head, wanted, k in (
            (self.model.known_head, overrides.known, concept.topk_known),
            (self.model.unknown_head, overrides.discovered, concept.unknown_topk),
        ):
            if not wanted or (overrides.is_by_package and not head._is_large):
                continue
            weight_N = self.weights(head, hidden_D)
            active = set(weight_N.sort(descending=True, stable=True).indices[: k or head.n_concepts].tolist())
            for one in wanted.keys() - active:
                total_D = total_D + weight_N[one] * self._embedding(head, one)
        return total_D

    def _reports_all_active(self) -> bool:
        concept = self.recipe.concept_config
        known = concept.topk_known_features in (None, concept.topk_known)
        discovered = not concept.use_unknown or (concept.apply_topk_to_unknown and concept.unknown_topk is not None)
        return known and (discovered or (concept.n_unknown_concepts or 0) <= (concept.unknown_topk or 64))

    @staticmethod
    def top_contributions(
        head: Any, hidden_D: Tensor, target_D: Tensor, k: int, overrides: dict[int, float]
    ) -> dict[int, tuple[float, float]]:
        """Scores every concept of a head and keeps the k largest logits; ties go to the lowest id.

        Those whose weight is set come with it, whether they are among the k or not.
        """
        ids = torch.arange(head.n_concepts)
        logits = head.compute_logits_for_indices(hidden_D.unsqueeze(0), ids.unsqueeze(0))[0]
        weights = logits.sigmoid()
        top = logits.sort(descending=True, stable=True).indices[:k]
        if overrides:
            weights[list(overrides)] = torch.tensor(list(overrides.values()))
            top = torch.tensor(sorted({*top.tolist(), *overrides}))
        weights = weights[top]
        contributions = weights * (head._get_embedding(top) @ target_D)
        rows = zip(top.tolist(), weights.tolist(), contributions.tolist(), strict=True)
        return {concept: (weight, contribution) for concept, weight, contribution in rows}

    @torch.no_grad()
    def generate_full(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        tokens_per_step: int = 1,
        repetition_penalty: float = 1.0,
        steering: SteeringConfig | None = None,
    ) -> list[Choice]:
        """The package's own greedy generation. Prompt and max_tokens must be multiples of the block."""
        assert len(prompt) % self.block == 0 and max_tokens % self.block == 0
        assert self.block % tokens_per_step == 0
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            steps=max_tokens // tokens_per_step,
            temperature=0.0,
            use_entropy_sampling=False,
            repetition_penalty=repetition_penalty,
        )
        choices: list[Choice] = []

        def record(info: GenerationStepInfo) -> None:
            assert isinstance(info.outputs, InterpretableOutput)
            seen = Pass(info.logits[0], info.outputs)
            pairs = zip(info.committed_positions.tolist(), info.committed_token_ids.tolist(), strict=True)
            choices.extend(self.choice(seen, position, token, info.step) for position, token in pairs)

        ids = torch.tensor([list(prompt)], dtype=torch.long).reshape(1, -1)
        self.generator.generate_full(ids, config, steering=steering, step_callback=record)
        return choices

    @torch.no_grad()
    def generate_guided(
        self, prompt: Sequence[int], max_tokens: int, *, cfg_scale: float, steering: SteeringConfig | None = None
    ) -> list[Choice]:
        """The package's own greedy generation under guidance, one commit a step; lengths as in `generate_full`."""
        assert len(prompt) % self.block == 0 and max_tokens % self.block == 0
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            temperature=0.0,
            use_entropy_sampling=False,
            repetition_penalty=1.0,
            cfg_scale=cfg_scale,
        )
        generator = self._make(_WatchedGenerator)
        ids = torch.tensor([list(prompt)], dtype=torch.long).reshape(1, -1)
        last_S = generator.generate_full(ids, config, steering=steering).tokens
        after = [*(ids_BS[0] for ids_BS, _, _ in generator.forwards[1:]), last_S]
        choices = []
        for step, ((ids_BS, logits_BSV, outputs), after_S) in enumerate(zip(generator.forwards, after, strict=True)):
            seen = guided(Pass(logits_BSV[0], outputs), Pass(logits_BSV[1], outputs, index=1), cfg_scale)
            (position,) = (ids_BS[0] != after_S).nonzero().flatten().tolist()
            choices.append(self.choice(seen, position, int(after_S[position]), step))
        return choices

    @torch.no_grad()
    def accumulated_attributions(
        self, prompt: Sequence[int], max_tokens: int, steering: SteeringConfig | None = None
    ) -> dict[int, Attribution]:
        """Attributions by position from the package's own accumulator (linear, factorised discovered head only)."""
        head, unknown = self.model.known_head, self.model.unknown_head
        assert unknown is not None and unknown.factorize and not unknown.use_attention
        total = len(prompt) + max_tokens
        keeper = AttributionAccumulator(
            total, head.topk, unknown.topk, torch.device("cpu"), self.lm_head_VD, head, unknown
        )

        def record(info: GenerationStepInfo) -> None:
            outputs, positions, tokens = info.outputs, info.committed_positions, info.committed_token_ids
            assert isinstance(outputs, InterpretableOutput) and outputs.known_topk_logits is not None
            indices, logits = _compute_unknown_topk(unknown, outputs.hidden[:, positions], k=unknown.topk)
            assert indices is not None and logits is not None and outputs.known_topk_indices is not None
            targets = info.logits[0, positions].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            keeper.commit(
                CommitRecord(
                    commit_order=0,
                    denoising_step=info.step,
                    positions=positions,
                    token_ids=tokens,
                    target_logits=targets,
                    known_indices=outputs.known_topk_indices[0, positions],
                    known_logits=outputs.known_topk_logits[0, positions],
                    unk_indices=indices[0],
                    unk_logits=logits[0],
                )
            )

        config = GenerationConfig(
            max_new_tokens=max_tokens, temperature=0.0, use_entropy_sampling=False, repetition_penalty=1.0
        )
        ids = torch.tensor([list(prompt)], dtype=torch.long).reshape(1, -1)
        self.generator.generate_full(ids, config, steering=steering, step_callback=record)

        def pairs(indices: Tensor, weights: Tensor, contributions: Tensor) -> dict[int, tuple[float, float]]:
            rows = zip(indices.tolist(), weights.tolist(), contributions.tolist(), strict=True)
            return {concept: (weight, contribution) for concept, weight, contribution in rows}

        kept = keeper.committed.nonzero().flatten().tolist()
        return {
            p: Attribution(
                known=pairs(keeper.known_indices[0, p], keeper.known_weights[0, p], keeper.known_contributions[0, p]),
                discovered=pairs(keeper.unk_indices[0, p], keeper.unk_weights[0, p], keeper.unk_contributions[0, p]),
                epsilon=float(keeper.residual_contribution[0, p]),
                epsilon_by_vector=None,
            )
            for p in kept
        }

    def input_attributions(
        self, prompt: Sequence[int], max_tokens: int, *, tokens_per_step: int = 1, num_steps: int, every: int
    ) -> dict[int, tuple[int, list[float]]]:
        """The package's integrated gradients over its own greedy generation: position -> (token, contributions).

        Of each `every`-th denoising step. Prompt and max_tokens must be multiples of the block.
        """
        assert len(prompt) % self.block == 0 and max_tokens % self.block == 0
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            steps=max_tokens // tokens_per_step,
            temperature=0.0,
            use_entropy_sampling=False,
            repetition_penalty=1.0,
        )
        attributor, recorder = FaithfulOutputToInputAttributor.from_generator(self.generator), _TraceRecorder()
        ids = torch.tensor([list(prompt)], dtype=torch.long).reshape(1, -1)
        self.generator.generate_full(ids, config, step_callback=recorder)
        trace = attributor._build_trace(ids, config, recorder.groups)
        # What it sees was fixed when it was built; this only says for which steps it is asked.
        trace.groups[:] = trace.groups[every - 1 :: every]
        found = attributor.attribute_from_trace(trace, n_steps=num_steps)
        positions, tokens = found.target_positions.tolist(), found.target_token_ids.tolist()
        rows = zip(tokens, found.attributions.tolist(), strict=True)
        return dict(zip(positions, rows, strict=True))


def _guided_concepts(
    conditional: dict[int, tuple[float, float]], unconditional: dict[int, tuple[float, float]], scale: float
) -> dict[int, tuple[float, float]]:
    """Weights of the conditional pass; one that is active in the other alone has none."""
    nothing = (0.0, 0.0)
    return {
        id_: (
            conditional.get(id_, nothing)[0],
            (scale + 1) * conditional.get(id_, nothing)[1] - scale * unconditional.get(id_, nothing)[1],
        )
        for id_ in conditional | unconditional
    }
