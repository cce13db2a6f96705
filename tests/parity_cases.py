"""What the engine is compared on: prompts of every length around the block grid, and every setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from steerling.configs import SteeringConfig

from engine import (
    AttributeInputs,
    AttributionParams,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    Output,
    SamplingParams,
    SteeringParams,
    Suppression,
    WeightOverride,
    trace_of,
)
from engine.decoding.random import uniform as uniform_tensor
from tests.checkpoints import Recipe
from tests.oracle import Oracle
from tests.parity import Comparison, compare_commits, compare_output
from tests.reference import generate

PROMPT_LENGTHS = {
    "nothing": lambda block: 0,
    "one token": lambda block: 1,
    "a block less one": lambda block: block - 1,
    "a block": lambda block: block,
    "a block and one": lambda block: block + 1,
    "two blocks": lambda block: 2 * block,
    "two blocks and two": lambda block: 2 * block + 2,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a request differs from plain greedy generation, and how the package is told the same."""

    sampling: dict[str, Any] = field(default_factory=dict)
    steering: SteeringParams | None = None
    package_steering: SteeringConfig | None = None
    """The same steering for `generate_full`; None where there is none or the package has no such thing."""
    is_known_to_package: bool = True
    """`generate_full` can do it with the same random numbers: greedy, without bias or several interventions."""


def inject(**values: Any) -> Intervention:
    return Intervention(**{"concept_ids": (3,), "strength": 6.0, "layer": 1, **values})


OVERRIDES = (
    WeightOverride(concept_id=2, weight=4.0),
    WeightOverride(concept_id=11, weight=0.0),
    WeightOverride(concept_id=4, head="discovered", weight=-3.0),
    WeightOverride(concept_id=0, head="discovered", weight=0.5),
)

SETTINGS = {
    "greedy": Setting(),
    "injection": Setting(
        steering=SteeringParams(
            interventions=(inject(concept_ids=(2, 5), strength=8.0, schedule="hard_cutoff", cutoff_tokens=9),)
        ),
        package_steering=SteeringConfig.injection([2, 5], 8.0, inject_layer=1, cutoff_tokens=9),
    ),
    "injection_relu": Setting(
        steering=SteeringParams(
            interventions=(inject(concept_ids=(3, 7), strength=-7.0, unit="raw", layer=None),),
            suppress=(Suppression(concept_id=3, strength=2.0),),
        ),
        package_steering=SteeringConfig.injection_relu(3, [7], -7.0, relu_strength=2.0),
    ),
    "suppression": Setting(
        steering=SteeringParams(
            suppress=(Suppression(concept_id=1, strength=3.0), Suppression(concept_id=4, strength=1.0))
        ),
        package_steering=SteeringConfig(relu_logit_mask={1: 3.0, 4: 1.0}),
    ),
    "repetition penalty": Setting(sampling={"repetition_penalty": 1.3}),
    "four commits a pass": Setting(sampling={"tokens_per_step": 4}),
    "penalty, steering and two commits": Setting(
        sampling={"repetition_penalty": 1.15, "tokens_per_step": 2},
        steering=SteeringParams(interventions=(inject(),)),
        package_steering=SteeringConfig(concept_ids=[3], mai_lm_target=6.0, inject_layer=1),
    ),
    "five commits, several layers, weights and bias": Setting(
        sampling={"tokens_per_step": 5, "repetition_penalty": 1.1, "logit_bias": {7: 2.0, 11: -3.0, 20: float("-inf")}},
        steering=SteeringParams(
            interventions=(
                inject(weights=(-1.0,)),
                inject(concept_ids=(4, 6), weights=(2.0, 0.5), layer=2, schedule="hard_cutoff", cutoff_tokens=6),
                inject(concept_ids=(8,), layer=0, unit="raw", strength=3.0),
            )
        ),
        is_known_to_package=False,
    ),
    "threshold": Setting(sampling={"policy": "threshold", "threshold": 0.4}, is_known_to_package=False),
    "factor, at most four": Setting(
        sampling={"policy": "factor", "factor": 2.5, "tokens_per_step": 4, "repetition_penalty": 1.2},
        is_known_to_package=False,
    ),
    "entropy bound, steered": Setting(
        sampling={"policy": "entropy_bound", "entropy_bound": 4.0},
        steering=SteeringParams(
            interventions=(inject(schedule="hard_cutoff", cutoff_tokens=7),),
            suppress=(Suppression(concept_id=2, strength=2.0),),
        ),
        is_known_to_package=False,
    ),
    "guidance": Setting(sampling={"cfg_scale": 1.5}),
    "guidance, steered up to a cutoff": Setting(
        sampling={"cfg_scale": 0.8},
        steering=SteeringParams(
            interventions=(inject(concept_ids=(2, 5), strength=8.0, schedule="hard_cutoff", cutoff_tokens=9),)
        ),
        package_steering=SteeringConfig.injection([2, 5], 8.0, inject_layer=1, cutoff_tokens=9),
    ),
    "guidance, injection and suppression": Setting(
        sampling={"cfg_scale": 2.0},
        steering=SteeringParams(
            interventions=(inject(concept_ids=(3, 7), strength=-7.0, unit="raw", layer=None),),
            suppress=(Suppression(concept_id=3, strength=2.0),),
        ),
        package_steering=SteeringConfig.injection_relu(3, [7], -7.0, relu_strength=2.0),
    ),
    "guidance, sampled, a threshold and two cutoffs": Setting(
        sampling={
            "cfg_scale": 1.2,
            "temperature": 1.1,
            "top_p": 0.9,
            "seed": 77,
            "repetition_penalty": 1.2,
            "policy": "threshold",
            "threshold": 0.3,
            "tokens_per_step": 3,
        },
        steering=SteeringParams(
            interventions=(
                inject(schedule="hard_cutoff", cutoff_tokens=5),
                inject(concept_ids=(6,), layer=2, schedule="hard_cutoff", cutoff_tokens=13),
            )
        ),
        is_known_to_package=False,
    ),
    "sampled, entropy-adaptive": Setting(
        sampling={"temperature": None, "repetition_penalty": 1.1, "seed": 11}, is_known_to_package=False
    ),
    "sampled, everything": Setting(
        sampling={
            "temperature": 1.4,
            "top_p": 0.9,
            "top_k": 12,
            "min_p": 0.02,
            "seed": 2**62 + 5,
            "choice_index": 3,
            "tokens_per_step": 3,
        },
        steering=SteeringParams(interventions=(inject(schedule="hard_cutoff", cutoff_tokens=5),)),
        is_known_to_package=False,
    ),
    "overrides": Setting(steering=SteeringParams(overrides=OVERRIDES), is_known_to_package=False),
    "overrides, steered, entropy bound": Setting(
        sampling={"policy": "entropy_bound", "entropy_bound": 2.0, "repetition_penalty": 1.1},
        steering=SteeringParams(
            interventions=(inject(),), suppress=(Suppression(concept_id=2, strength=2.0),), overrides=OVERRIDES[1:]
        ),
        is_known_to_package=False,
    ),
    "overrides as the package's": Setting(
        steering=SteeringParams(overrides=OVERRIDES, override_mode="reference"), is_known_to_package=False
    ),
    "overrides as the package's, steered and sampled": Setting(
        sampling={"temperature": 0.9, "seed": 4, "tokens_per_step": 2, "repetition_penalty": 1.2},
        steering=SteeringParams(
            interventions=(inject(strength=3.0),),
            suppress=(Suppression(concept_id=4, strength=1.0),),
            overrides=OVERRIDES[:2],
            override_mode="reference",
        ),
        is_known_to_package=False,
    ),
    "discovered overrides as the package's": Setting(
        steering=SteeringParams(overrides=OVERRIDES[2:], override_mode="reference"), is_known_to_package=False
    ),
}


GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
"""The package's end rule drops what is left of an end; ends are compared with the plain reference elsewhere."""


@dataclass(frozen=True)
class Case:
    """One request on one checkpoint, and what it is compared with."""

    length: str
    setting: str
    request: GenerateRequest
    is_on_grid: bool
    """Prompt and max_tokens are multiples of the block, so `generate_full` must give the same."""

    @property
    def name(self) -> str:
        return f"prompt: {self.length}; {self.setting}"


def cases(recipe: Recipe) -> list[Case]:
    """Every length with two settings, taking turns; one length on and one off the grid with all of them."""
    made = []
    for index, (length, make_length) in enumerate(PROMPT_LENGTHS.items()):
        num_prompt = make_length(recipe.block)
        is_on_grid = num_prompt % recipe.block == 0
        names = list(SETTINGS)
        if length not in ("a block", "a block and one"):
            names = [names[(2 * index + offset) % len(names)] for offset in range(2)]
        for name in names:
            setting = SETTINGS[name]
            sampling = SamplingParams(**{**GREEDY, **setting.sampling})
            request = GenerateRequest(
                prompt_token_ids=recipe.plain_ids(num_prompt, seed=index),
                max_tokens=recipe.block if is_on_grid else recipe.block + recipe.block // 2 + 1,
                sampling=sampling,
                steering=fitting(recipe, setting.steering),
                attribution=AttributionParams(),
            )
            made.append(Case(length, name, request, is_on_grid))
    return made


def fitting(recipe: Recipe, steering: SteeringParams | None) -> SteeringParams | None:
    """The steering as far as a checkpoint can be told it."""
    if steering is None:
        return None
    concept = recipe.concept_config
    kept = tuple(one for one in steering.overrides if one.head == "known" or concept.use_unknown)
    mode = "delta" if concept.topk_on_logits else steering.override_mode
    return replace(steering, overrides=kept, override_mode=mode)


def uniform(seed: int, position: int, choice_index: int) -> float:
    """The engine's random number for one key."""
    return float(uniform_tensor(torch.tensor(seed), torch.tensor(position), torch.tensor(choice_index)))


def run_engine(recipe: Recipe, folder: Path) -> Iterator[tuple[Case, Output]]:
    """All cases of a checkpoint in one engine, sixteen at a time in mixed phases."""
    engine = Engine.from_checkpoint(
        folder, EngineConfig(device="cpu", dtype="float32", num_pages=256, max_rows=20, max_lanes=16)
    )
    todo = cases(recipe)
    yield from zip(todo, engine.generate([case.request for case in todo]), strict=True)
    engine.check_integrity()


def compare(oracle: Oracle, case: Case, output: Output) -> Comparison:
    """An output with the plain reference and, where it knows the case, with the package's own generation."""
    result = compare_output(output, generate(oracle, case.request, uniform))
    setting = SETTINGS[case.setting]
    # From nothing, all positions are alike at first, and the package leaves the choice to rounding.
    if case.is_on_grid and case.request.prompt_token_ids and setting.is_known_to_package:
        sampling = case.request.sampling
        prompt, max_tokens, steering = case.request.prompt_token_ids, case.request.max_tokens, setting.package_steering
        if sampling.cfg_scale:
            choices = oracle.generate_guided(prompt, max_tokens, cfg_scale=sampling.cfg_scale, steering=steering)
        else:
            choices = oracle.generate_full(
                prompt,
                max_tokens,
                tokens_per_step=sampling.tokens_per_step or 1,
                repetition_penalty=sampling.repetition_penalty,
                steering=steering,
            )
        result.add(compare_commits(output.commits, choices))
    return result


def compare_inputs(oracle: Oracle, engine: Engine, *, tokens_per_step: int, num_steps: int = 3) -> Comparison:
    """What inputs contributed, against the package's integrated gradients; of two steps in each of two blocks.

    Layouts agree where the prompt and the text fill whole blocks.
    """
    recipe, block = oracle.recipe, oracle.block
    request = GenerateRequest(
        prompt_token_ids=recipe.plain_ids(block),
        max_tokens=2 * block,
        sampling=SamplingParams(**{**GREEDY, "tokens_per_step": tokens_per_step}),
    )
    (output,) = engine.generate([request])
    theirs = oracle.input_attributions(
        request.prompt_token_ids,
        request.max_tokens,
        tokens_per_step=tokens_per_step,
        num_steps=num_steps,
        every=block // 2 // tokens_per_step,
    )
    ask = AttributeInputs(trace=trace_of(request, output), targets=tuple(theirs), num_steps=num_steps)
    found = engine.analyze(ask)
    result = Comparison(num_commits=len(found.targets))
    assert [target.position for target in found.targets] == sorted(theirs)
    for target in found.targets:
        token_id, contributions = theirs[target.position]
        assert target.token_id == token_id
        for ours, one in zip(target.contributions, contributions, strict=True):
            result.note("input contribution", ours, one)
    return result
