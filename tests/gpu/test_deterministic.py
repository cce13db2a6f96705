"""A row gives the same bits alone and in any company: each product, each other step of a pass, and the whole engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")

from engine import (
    AttributionParams,
    ConceptConfig,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    ModelConfig,
    Output,
    SamplingParams,
    SteeringParams,
    Suppression,
)
from engine.decoding import sampler, steering
from engine.decoding.kernels.choose import choose
from engine.decoding.kernels.confidence import confidence
from engine.model.attention import PAGES_PER_SPLIT
from engine.model.batch_invariant import BatchInvariantLinear, float32_product, make_batch_invariant
from engine.model.concept_heads import plain_product
from engine.model.kernels.matmul import Plan, Tile, matmul, matmul_slow, plan_for
from engine.model.kernels.norm import residual_norm
from engine.model.kernels.swiglu import swiglu
from engine.model.steerling import SteerlingModel

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
PAGE = 64
COMPANY = [(2, 0), (2, 1), (3, 1), (8, 0), (8, 5), (16, 15)]
"""Rows in the batch, and the place in it of the row that is looked at."""
RELEASED = [(5120, 4096), (4096, 4096), (32768, 4096), (4096, 16384), (100288, 4096)]


def assert_alone_equals_in_company(
    compute: Callable[..., Tensor | tuple[Tensor, ...]], row: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> None:
    """`row` has one row in each tensor, `others` 16; `compute` takes tensors of any number of rows."""

    def computed(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = compute(*(item.contiguous() for item in inputs))
        return results if isinstance(results, tuple) else (results,)

    alone = computed(*row)
    pairs = list(zip(row, others, strict=True))
    for num_rows, place in COMPANY:
        batch = [torch.cat((other[:place], one, other[place : num_rows - 1])) for one, other in pairs]
        for ours, theirs in zip(alone, computed(*batch), strict=True):
            assert torch.equal(theirs[place : place + 1], ours), f"row {place} of {num_rows}"


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """One row and 16 others."""
    return tuple((scale * torch.randn(rows, *shape, device=DEVICE)).to(dtype) for rows in (1, 16))  # type: ignore[return-value]


@pytest.mark.parametrize(("num_columns", "width"), [*RELEASED, (64, 64), (272, 328), (900, 256)])
def test_a_product_does_not_depend_on_the_number_of_rows(num_columns: int, width: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(width, num_columns, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    plan = plan_for(num_columns, width, torch.bfloat16, DEVICE)
    invariant = BatchInvariantLinear(linear, plan)
    row, others = random_rows(PAGE, width, dtype=torch.bfloat16)
    assert_alone_equals_in_company(invariant, (row,), (others,))
    slow = matmul_slow(row[0], linear.weight, plan, out_dtype=torch.float32)
    wide = matmul(row[0], linear.weight, plan, out_dtype=torch.float32)
    assert (wide - slow).norm() < 1e-4 * slow.norm()
    torch.testing.assert_close(invariant(row)[0], slow.bfloat16(), rtol=2**-7, atol=1e-3)


def test_a_float32_product_does_not_depend_on_the_number_of_rows() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(200, 72, bias=True, device=DEVICE).requires_grad_(False)
    invariant = BatchInvariantLinear(linear, plan_for(72, 200, torch.float32, DEVICE))
    row, others = random_rows(PAGE, 200)
    assert_alone_equals_in_company(invariant, (row,), (others,))
    torch.testing.assert_close(invariant(row), linear(row), rtol=1e-5, atol=1e-5)


def test_slices_give_the_same_bits_side_by_side_and_one_after_another_and_in_any_tile() -> None:
    torch.manual_seed(2)
    x = torch.randn(300, 4096, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(384, 4096, device=DEVICE, dtype=torch.bfloat16)
    plan = Plan(short=Tile(64, 128, 64, 3, 4), slices=4, side_by_side_to=300)
    counters = torch.zeros(plan.num_counters(384), dtype=torch.int32, device=DEVICE)
    results = [matmul(x, w, plan, counters=counters) for _ in range(3)]
    assert not counters.any()
    results.append(matmul(x, w, plan))
    results.append(matmul(x, w, dataclasses.replace(plan, tall=Tile(128, 128, 64, 3, 8), tall_from=1)))
    for result in results[1:]:
        assert torch.equal(result, results[0])
    other_sum = matmul(x, w, dataclasses.replace(plan, slices=1), out_dtype=torch.float32)
    # Not vacuous: another order of the sum does give other bits.
    assert not torch.equal(other_sum, matmul(x, w, plan, out_dtype=torch.float32))


@pytest.mark.parametrize("num_commits", [1, 5, 64, 200])
def test_concept_logits_do_not_depend_on_how_many_commits_are_explained(num_commits: int) -> None:
    torch.manual_seed(3)
    table = torch.randn(964, 4096, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.randn(200, 4096, device=DEVICE, dtype=torch.bfloat16)
    together = float32_product(hidden, table)
    assert torch.equal(float32_product(hidden[:num_commits], table), together[:num_commits])
    torch.testing.assert_close(together, hidden.float() @ table.float().T, rtol=1e-4, atol=5e-3)


def test_norm_and_swiglu_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(4)
    weight = torch.randn(4096, device=DEVICE, dtype=torch.bfloat16)
    row, others = random_rows(PAGE, 4096, dtype=torch.bfloat16)
    branch, branches = random_rows(PAGE, 4096, dtype=torch.bfloat16)

    def norm(x: Tensor, branch: Tensor) -> Tensor:
        return residual_norm(x, branch[None], weight, 1e-5)

    assert_alone_equals_in_company(norm, (row, branch), (others, branches))
    assert_alone_equals_in_company(swiglu, (row,), (others,))


def lanes_of(num_rows: int, vocab_size: int) -> sampler.Adjustment:
    """A lane for each row, all alike."""
    padded = -(-vocab_size // 16) * 16

    def tokens(dtype: torch.dtype, rows: int = num_rows) -> Tensor:
        return torch.zeros(rows, padded, dtype=dtype, device=DEVICE)[:, :vocab_size]

    adjustment = sampler.Adjustment(
        lane_R=torch.arange(num_rows, device=DEVICE),
        offset_NV=tokens(torch.float32),
        present_NV=tokens(torch.bool),
        penalty_N=torch.full((num_rows,), 1.2, device=DEVICE),
        is_end_NV=tokens(torch.bool),
        first_end_N=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
        banned_V=tokens(torch.bool, 1)[0],
    )
    adjustment.offset_NV[:, 5::7] = -1.5
    adjustment.present_NV[:, ::11] = True
    return adjustment


@pytest.mark.parametrize("vocab_size", [100281, 100284])
def test_confidence_does_not_depend_on_the_batch(vocab_size: int) -> None:
    torch.manual_seed(5)
    row, others = random_rows(PAGE, 100288, dtype=torch.bfloat16, scale=3.0)

    def confidences(logits: Tensor) -> tuple[Tensor, ...]:
        rows = len(logits)
        masked = torch.ones(rows, PAGE, dtype=torch.bool, device=DEVICE)
        position = torch.arange(PAGE, device=DEVICE).expand(rows, -1).contiguous()
        return confidence(logits, masked, position, lanes_of(rows, vocab_size))

    assert_alone_equals_in_company(confidences, (row,), (others,))


@pytest.mark.parametrize("vocab_size", [100281, 100284])
@pytest.mark.parametrize("is_entropy", [False, True])
def test_chosen_tokens_and_their_logprobs_do_not_depend_on_the_batch(vocab_size: int, is_entropy: bool) -> None:
    """Sums over the vocabulary: torch picks their order by the number of rows, and by how a row is aligned."""
    torch.manual_seed(6)
    row, others = random_rows(PAGE, 100288, dtype=torch.bfloat16, scale=2.0)
    seed, seeds = (torch.randint(0, 2**40, (rows,), device=DEVICE) for rows in (1, 16))

    def chosen(logits: Tensor, seed_N: Tensor) -> tuple[Tensor, ...]:
        rows = len(logits)

        def all_lanes(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=DEVICE)

        choice = sampler.Choice(
            temperature_M=all_lanes(0.8),
            top_p_M=all_lanes(0.9),
            top_k_M=all_lanes(5000, torch.int64),
            min_p_M=all_lanes(1e-6),
            is_entropy_M=all_lanes(is_entropy, torch.bool),
            is_greedy_M=all_lanes(False, torch.bool),
        )
        pick = torch.tensor([3, 60, 17], device=DEVICE).expand(rows, -1).contiguous()
        position = torch.arange(PAGE, device=DEVICE).expand(rows, -1).contiguous()
        is_commit = torch.ones_like(pick, dtype=torch.bool)
        found = choose(
            logits, position, pick, is_commit, lanes_of(rows, vocab_size), choice, seed_N, torch.zeros_like(seed_N)
        )
        tops = sampler.top_logprobs(logits, pick, vocab_size, 5, found.target_logit_RK, found.logprob_RK)
        return found.token_RK, found.target_logit_RK, found.logprob_RK, *tops

    assert_alone_equals_in_company(chosen, (row, seed), (others, seeds))


def test_what_steering_adds_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(7)
    vector, vectors = random_rows(8, 4096)
    layer, layers = (torch.randint(1, 33, (rows, 8), device=DEVICE) for rows in (1, 16))
    cutoff, cutoffs = (torch.randint(0, 9, (rows, 8), device=DEVICE) for rows in (1, 16))

    def added(vector: Tensor, layer: Tensor, cutoff: Tensor) -> Tensor:
        count = torch.full((len(vector),), 3, device=DEVICE)
        return steering.added_by_layer(vector, layer, cutoff, count, 32).transpose(0, 1)

    assert_alone_equals_in_company(added, (vector, layer, cutoff), (vectors, layers, cutoffs))


VOCAB = 211
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    n_layers=3,
    n_head=4,
    n_embd=128,
    n_kv_heads=2,
    # Two lengths of page table, and rows that attention cuts into splits.
    block_size=2048,
    mlp_ratio=2,
    concept=ConceptConfig(
        n_concepts=50,
        n_discovered=90,
        concept_dim=128,
        topk_known=6,
        topk_known_features=6,
        factorize_rank=16,
        discovered_topk=9,
    ),
    mask_token_id=VOCAB - 1,
    eos_token_id=VOCAB - 2,
    pad_token_id=VOCAB - 3,
)


@pytest.fixture(scope="module")
def model() -> SteerlingModel:
    torch.manual_seed(5)
    model = SteerlingModel(CONFIG, vocab_multiple=64).requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    model = model.to(DEVICE, torch.bfloat16)
    assert model.transformer.rotary is not None
    model.transformer.rotary.float()
    return model


def test_every_linear_map_is_replaced_and_weights_stay_shared(model: SteerlingModel) -> None:
    changed = make_batch_invariant(model)
    assert not [name for name, module in changed.named_modules() if type(module) is nn.Linear]
    assert changed.transformer.lm_head.weight is changed.transformer.embedding.weight
    assert [id(ours) for ours in changed.parameters()] == [id(theirs) for theirs in model.parameters()]
    assert type(model.transformer.lm_head) is nn.Linear and model.known_head.product is plain_product
    ids = torch.randint(0, VOCAB - 3, (2, 128), device=DEVICE)
    before, after = (m.transformer.logits(m.hidden_dense(ids)).float() for m in (model, changed))
    assert (after - before).norm() < 0.03 * before.norm()


PROMPT_LENGTHS = (0, 1, 64, 65, 130, 200, 1100, 128)
KINDS: list[dict[str, Any]] = [
    {"num_logprobs": 3},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 1e-4},
    {"top_k": 40, "tokens_per_step": 3},
    {"policy": "lossless"},
    {"policy": "threshold", "threshold": 0.3},
    {"policy": "factor"},
    {"policy": "entropy_bound", "num_logprobs": 20},
]


def test_the_longest_request_is_cut_into_splits() -> None:
    """Otherwise the tests below would leave out that part of attention."""
    assert (max(PROMPT_LENGTHS) + 70) // PAGE > PAGES_PER_SPLIT


def requests() -> list[GenerateRequest]:
    """16 of every kind of sampling, policy and steering, some prompts prefixes of others."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, VOCAB - 3, (max(PROMPT_LENGTHS),), generator=generator).tolist()
    steered = SteeringParams(
        interventions=(
            Intervention(concept_ids=(3, 9), strength=2.0, schedule="hard_cutoff", cutoff_tokens=20),
            Intervention(concept_ids=(4,), strength=1.0, layer=1),
            Intervention(concept_ids=(7,), strength=1.5, layer=2),
        ),
        suppress=(Suppression(concept_id=5, strength=0.5),),
    )
    return [
        GenerateRequest(
            prompt_token_ids=tuple(prompt[: PROMPT_LENGTHS[(index + index // 8) % 8]]),
            max_tokens=70,
            sampling=SamplingParams(seed=index, **KINDS[index % 8]),
            steering=steered if index % 2 else None,
            attribution=AttributionParams(top_k=None if index % 3 else 4),
        )
        for index in range(16)
    ]


@pytest.fixture(scope="module")
def alone(model: SteerlingModel) -> list[Output]:
    """Each request in an engine of its own, plainly: no drafts, nothing shared, one pass after another."""
    plain = {"draft_row_limit": 0, "share_prefixes": False, "async_scheduling": False, "use_graphs": False}
    return [serve(model, [request], **plain)[0] for request in requests()]


def serve(model: SteerlingModel, asked: list[GenerateRequest], **settings: object) -> list[Output]:
    values = {"num_pages": 256, "max_rows": 16, "deterministic": True, **settings}
    engine = Engine(model, EngineConfig(**values))  # type: ignore[arg-type]
    outputs = engine.generate(asked)
    engine.check_integrity()
    return outputs


def assert_equal_to_alone(alone: list[Output], together: list[Output]) -> None:
    """With ==, so to the last bit of every float, contributions of concepts too."""
    for index, (ours, theirs) in enumerate(zip(alone, together, strict=True)):
        assert theirs.token_ids == ours.token_ids, f"request {index}"
        for one, other in zip(ours.commits, theirs.commits, strict=True):
            assert other == one, f"request {index}"


@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 8])
def test_a_request_is_bit_equal_alone_and_in_a_batch(
    model: SteerlingModel, alone: list[Output], num_requests: int, first: int
) -> None:
    batch = slice(first, first + num_requests)
    assert_equal_to_alone(alone[batch], serve(model, requests()[batch]))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_graphs": False},
        {"max_prefill_rows": 1},
        {"share_prefixes": False},
        {"num_pages": 24},
        {"max_rows": 3},
        {"async_scheduling": False},
        {"draft_row_limit": 0},
        {"draft_row_limit": 16},
        {"explain_interval_s": 0.0},
        {"explain_interval_s": 1000.0},
        {"batching": "lockstep"},
    ],
    ids=str,
)
def test_sixteen_requests_are_bit_equal_alone_and_together(
    model: SteerlingModel, alone: list[Output], settings: dict[str, object]
) -> None:
    """Graphs, chunks of a prompt, prefix hits, preemption for want of pages, drafts, and when what is explained."""
    assert_equal_to_alone(alone, serve(model, requests(), **settings))


def test_without_the_option_company_shows_in_the_last_bits() -> None:
    """Otherwise the tests above would say nothing."""
    torch.manual_seed(0)
    differing = []
    for num_columns, width in RELEASED:
        linear = nn.Linear(width, num_columns, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
        row, others = random_rows(PAGE, width, dtype=torch.bfloat16)
        together = linear(torch.cat((row, others[1:])))
        differing.append(not torch.equal(linear(row), together[:1]))
    assert any(differing)
