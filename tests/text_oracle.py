"""The analyses of text written plainly over the reference package's model: dense forwards over explicit token ids."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.oracle import Oracle

Concepts = list[tuple[int, float, float]]
"""(id, weight, contribution), largest weight first."""


def plain_scores(oracle: Oracle, token_ids: Sequence[int], context: int) -> list[Tensor | None]:
    """Log-softmax (V,) at each position, with it and all that follows in its block masked; None for the first."""
    found: list[Tensor | None] = [None]
    for position in range(1, len(token_ids)):
        end = min((position // oracle.block + 1) * oracle.block, context)
        seen = [*token_ids[:position], *[oracle.mask_id] * (end - position)]
        found.append(oracle.forward(seen).logits_SV[position].log_softmax(dim=-1))
    return found


@torch.no_grad()
def plain_embedding(oracle: Oracle, token_ids: Sequence[int], kind: str, pooling: str) -> Tensor:
    """What the package's `get_embeddings` gives for these tokens, by its own code."""
    text = oracle.generator.tokenizer.decode(list(token_ids))
    published = {"discovered": "unknown"}.get(kind, kind)
    return oracle.generator.get_embeddings(text, pooling=pooling, embedding_type=published)


@torch.no_grad()
def plain_concepts(oracle: Oracle, token_ids: Sequence[int], k: int) -> list[tuple[Concepts, Concepts]]:
    """Known and discovered concepts of each position, from the package's own logits of every concept."""
    hidden_SD = oracle.forward(token_ids).outputs.hidden[0]
    found = []
    for position, token_id in enumerate(token_ids):
        heads: list[Concepts] = []
        for head in (oracle.model.known_head, oracle.model.unknown_head):
            if head is None:
                heads.append([])
                continue
            most = min(k, head.n_concepts)
            by_id = oracle.top_contributions(head, hidden_SD[position], oracle.lm_head_VD[token_id], most, {})
            heads.append([(concept, *values) for concept, values in by_id.items()])
        found.append((heads[0], heads[1]))
    return found


@dataclass(frozen=True)
class PlainLikelihood:
    """What the package's evaluation gave, and the masks that it drew."""

    log_likelihood: float
    masks: list[tuple[int, ...]]


def plain_likelihood(
    oracle: Oracle,
    prompt: Sequence[int],
    continuation: Sequence[int],
    *,
    num_samples: int,
    batch_size: int,
    cfg_scale: float = 0.0,
    seed: int = 0,
) -> PlainLikelihood:
    """The package's own estimate, by the code of its evaluation wrapper."""
    with _harness():
        from steerling.evaluation.lm_harness_wrapper import SteerlingLM

    class Recording(SteerlingLM):  # type: ignore[misc]
        def __init__(self) -> None:
            self._torch_device = torch.device("cpu")
            self.model, self.is_interpretable = oracle.model, True
            self.mask_token_id = oracle.mask_id
            self.mc_num, self.mc_batch_size, self.cfg = num_samples, batch_size, cfg_scale
            self.masks: list[tuple[int, ...]] = []

        def _forward_process(self, batch: Tensor, prompt_len: int) -> tuple[Tensor, Tensor]:
            noisy, share = super()._forward_process(batch, prompt_len)
            rows = noisy[:, prompt_len:] == self.mask_token_id
            self.masks += [tuple(row.nonzero().flatten().tolist()) for row in rows]
            return noisy, share

    torch.manual_seed(seed)
    package = Recording()
    value, _ = package._compute_mc_loglikelihood(list(prompt), list(continuation))
    return PlainLikelihood(value, package.masks)


@contextmanager
def _harness() -> Iterator[None]:
    """Stands for the evaluation harness, which the wrapper registers itself with and which nothing here needs."""
    names = ("", ".evaluator", ".api", ".api.instance", ".api.model", ".api.registry")
    modules: dict[str, Any] = {f"lm_eval{name}": ModuleType(f"lm_eval{name}") for name in names}
    modules["lm_eval"].evaluator = modules["lm_eval.evaluator"]
    modules["lm_eval.api.instance"].Instance = object
    modules["lm_eval.api.model"].LM = object
    modules["lm_eval.api.registry"].register_model = lambda name: lambda kind: kind
    missing = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
