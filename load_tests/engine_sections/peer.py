"""Section `peer`: the public `steerling` package's generator on the very same weights, an optional dependency."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine import Finished
from engine.model.weights import public_name

from .bench import Bench
from .load import check
from .report import NotAvailable, Section, median, with_spread

PROMPT = 128


@dataclass(frozen=True)
class Tokenizer:
    """As much of a tokenizer as the package's generator looks at."""

    mask_token_id: int
    eos_token_id: int
    pad_token_id: int

    def decode(self, token_ids: list[int]) -> str:
        """Text is not looked at."""
        return " ".join(map(str, token_ids))


def peer(bench: Bench, section: Section) -> None:
    """One request, one token a pass, with both generators in turns."""
    generator = peer_generator(bench)
    block_size = bench.config.diff_block_size
    num_new = max(min(256, bench.load.new_tokens[1]) // block_size, 1) * block_size
    prompt = bench.load.tokens(40_000_000, PROMPT)
    # Once without a clock: both have things to make ready.
    with bench.compiles.expected():
        _theirs(bench, generator, prompt, block_size)
    _ours(bench, prompt, block_size)
    ours, theirs = [], []
    for repeat in range(bench.repeats):
        section.say(f"this engine, {num_new} tokens, run {repeat + 1} of {bench.repeats}")
        ours.append(num_new / _ours(bench, prompt, num_new))
        section.say(f"the steerling package, {num_new} tokens, run {repeat + 1} of {bench.repeats}")
        with bench.compiles.expected():
            theirs.append(num_new / _theirs(bench, generator, prompt, num_new))
    for name, rates in (("this engine", ours), ("steerling package", theirs)):
        section.add(
            "",
            generator=name,
            new_tokens=num_new,
            **with_spread("tokens_per_s", rates),
            token_ms=1e3 / median(rates),
            over_peer_ratio=median(rates) / median(theirs),
        )
    section.note(f"prompt of {PROMPT} tokens, one request, default sampler, the same tensors in memory for both")
    section.note("this engine steers and explains every token; the package runs its concept heads, steers nothing")


def peer_generator(bench: Bench) -> Any:
    """The package's generator over its own model, whose parameters are views of ours. Raises NotAvailable."""
    try:
        configs = importlib.import_module("steerling.configs")
        models = importlib.import_module("steerling.models.interpretable")
        inference = importlib.import_module("steerling.inference.causal_diffusion")
    except ImportError as error:
        raise NotAvailable(f"the optional package steerling cannot be imported: {error}") from error
    config = bench.config
    model_config, concept_config = peer_configs(bench, configs)
    with torch.device("meta"):
        model = models.InterpretableCausalDiffusionLM(model_config, concept_config, config.vocab_size)
    missing, unexpected = model.load_state_dict(peer_tensors(bench), strict=False, assign=True)
    model.transformer._restore_weight_tying()
    on_meta = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if unexpected or on_meta:
        raise RuntimeError(f"the package's model takes other tensors: left over {unexpected}, not filled {on_meta}")
    del missing  # a tied weight goes by one of its two names
    return inference.SteerlingGenerator(
        model.requires_grad_(False).eval(),
        Tokenizer(config.mask_token_id, config.eos_token_id, config.pad_token_id),
        model_config,
        is_interpretable=True,
        device=bench.device,
    )


def peer_configs(bench: Bench, configs: Any) -> tuple[Any, Any]:
    """Our configuration in the package's two classes."""
    config, concept = bench.config, bench.config.concept
    names = [name for name in configs.CausalDiffusionConfig.model_fields if hasattr(config, name)]
    model_config = configs.CausalDiffusionConfig(**{name: getattr(config, name) for name in names}, interpretable=True)
    renamed = {
        "n_unknown_concepts": concept.n_discovered,
        "use_attention_unknown": concept.use_attention_discovered,
        "use_unknown": concept.use_discovered,
        "factorize_unknown": concept.factorize_discovered,
        "unknown_topk": concept.discovered_topk,
        "apply_topk_to_unknown": concept.apply_topk_to_discovered,
    }
    names = [name for name in configs.ConceptConfig.model_fields if hasattr(concept, name)]
    return model_config, configs.ConceptConfig(**{name: getattr(concept, name) for name in names}, **renamed)


def peer_tensors(bench: Bench) -> dict[str, Tensor]:
    """Our parameters under the public names, without the vocabulary's padding; nothing is copied."""
    tensors = {}
    for name, parameter in bench.model.named_parameters():
        public, tensor = public_name(name), parameter.detach()
        if public in ("transformer.tok_emb.weight", "transformer.lm_head.weight"):
            tensor = tensor[: bench.config.vocab_size]
        tensors[public] = tensor
    if bench.config.weight_sharing:
        tensors["transformer.lm_head.weight"] = tensors["transformer.tok_emb.weight"]
    return tensors


def _theirs(bench: Bench, generator: Any, prompt: list[int], num_new: int) -> float:
    """Seconds of the package's generator for one text."""
    configs = importlib.import_module("steerling.configs")
    config = configs.GenerationConfig(max_new_tokens=num_new, seed=0)
    started = time.perf_counter()
    output = generator.generate_full(torch.tensor([prompt], dtype=torch.long), config)
    seconds = time.perf_counter() - started
    if int((output.tokens == bench.config.mask_token_id).sum()):
        raise RuntimeError("the package left positions masked")
    return seconds


def _ours(bench: Bench, prompt: list[int], num_new: int) -> float:
    """Seconds of this engine for the same text, its prompt not in the prefix index."""
    # Another first token each time, so that no page of an earlier run is found.
    drawn = bench.load.tokens(time.perf_counter_ns(), 1)
    request = bench.load.request(drawn + prompt[1:], num_new, 0)
    started = time.perf_counter()
    bench.engine.add_request(request)
    while True:
        for event in bench.engine.step():
            if isinstance(event, Finished):
                seconds = time.perf_counter() - started
                check(event.output, request)
                return seconds
