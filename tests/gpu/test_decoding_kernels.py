"""The kernels of token choice against their slow twins.

Where there is no GPU, `TRITON_INTERPRET=1` runs them on the CPU, with small vocabularies.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")

from triton import knobs

from engine.config import ConceptConfig, ModelConfig
from engine.decoding import guidance, policies, sampler
from engine.decoding.kernels.choose import choose
from engine.decoding.kernels.confidence import confidence
from engine.decoding.kernels.guide import guide
from engine.decoding.kernels.pack import pack
from engine.decoding.kernels.pick import pick
from engine.decoding.random import uniform
from engine.decoding.sampler import Adjustment, Choice
from engine.runner.fused_backend import FusedBackend
from engine.runner.lanes import Lanes

IS_INTERPRETED = bool(knobs.runtime.interpret)
pytestmark = [] if IS_INTERPRETED else [pytest.mark.gpu]
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
VOCABS = [(700, 256)] if IS_INTERPRETED else [(3000, 512), (100_281, 2048)]
"""Sizes of vocabularies and of their slices."""
CANVAS, LANES = 8, 5
TOLERANCE = 1e-5
"""What is left to rounding: how far from a boundary a random number has to be to give the same token."""


def make_adjustment(vocab_size: int, lane_R: torch.Tensor, generator: torch.Generator) -> Adjustment:
    """Lanes with biases, bans, penalties below and above 1, and end tokens that are banned up to some position."""
    padded = -(-vocab_size // 16) * 16

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    offset = torch.where(rand(LANES, padded) > 0.9, 2 * torch.randn(LANES, padded, generator=generator), 0.0)
    offset[rand(LANES, padded) > 0.98] = -math.inf
    present, is_end = rand(LANES, padded) > 0.9, rand(LANES, padded) > 0.97
    banned = torch.zeros(padded, dtype=torch.bool)
    banned[[3, 7, vocab_size - 1]] = True
    # What lies past the vocabulary must not matter.
    offset[:, vocab_size:] = 1e30
    return Adjustment(
        lane_R=lane_R.to(DEVICE),
        offset_NV=offset.to(DEVICE)[:, :vocab_size],
        present_NV=present.to(DEVICE)[:, :vocab_size],
        penalty_N=torch.tensor([1.0, 1.3, 0.7, 2.0, 1.0], device=DEVICE),
        is_end_NV=is_end.to(DEVICE)[:, :vocab_size],
        first_end_N=torch.tensor([0, 3, 200, 5, 8], device=DEVICE),
        banned_V=banned.to(DEVICE)[:vocab_size],
    )


MODES = {
    "greedy": (1.0, 1.0, 0, 0.0, False, True),
    "entropy": (1.0, 0.8, 0, 0.0, True, False),
    "entropy_narrow": (1.0, 0.1, 0, 0.0, True, False),
    "entropy_zero": (1.0, 0.0, 0, 0.0, True, False),
    "entropy_all": (1.0, 0.9, 30, 0.01, True, False),
    "plain": (1.0, 1.0, 0, 0.0, False, False),
    "cold": (1e-30, 1.0, 0, 0.0, False, False),
    "hot": (1.8, 0.95, 0, 0.0, False, False),
    "very_hot": (1e6, 0.5, 7, 0.0, False, False),
    "top_p": (0.7, 0.6, 0, 0.0, False, False),
    "top_k": (1.3, 1.0, 20, 0.0, False, False),
    "top_k_one": (1.0, 1.0, 1, 0.0, False, False),
    "top_k_wide": (1.0, 1.0, 200, 0.0, False, False),
    "min_p": (1.3, 1.0, 0, 0.2, False, False),
    "all_three": (1.5, 0.8, 40, 0.02, False, False),
}
"""temperature, top_p, top_k (0: off), min_p, is_entropy, is_greedy."""


def choice_of(mode: str, vocab_size: int) -> Choice:
    temperature, top_p, top_k, min_p, is_entropy, is_greedy = MODES[mode]

    def all_lanes(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((LANES,), value, dtype=dtype, device=DEVICE)

    return Choice(
        temperature_M=all_lanes(temperature, torch.float32),
        top_p_M=all_lanes(top_p, torch.float32),
        top_k_M=all_lanes(top_k or vocab_size, torch.int64),
        min_p_M=all_lanes(min_p, torch.float32),
        is_entropy_M=all_lanes(is_entropy, torch.bool),
        is_greedy_M=all_lanes(is_greedy, torch.bool),
    )


def make_logits(shape: str, rows: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, CANVAS, W]; what lies past the vocabulary is NaN."""
    padded = -(-vocab_size // 64) * 64
    noise = torch.randn(rows, CANVAS, padded, generator=generator)
    logits = {
        "wide": 3 * noise - 5,
        "flat": 0.05 * noise,
        "peaked": torch.where(noise > 2.5, 12 + noise, noise),
        "tied": (2 * noise).round(),
        "equal": torch.zeros_like(noise),
        "tiny": 1e-6 * noise,
        "huge": 1e8 * noise,
        "bfloat16": (3 * noise).bfloat16(),
    }[shape]
    logits[..., vocab_size:] = math.nan
    return logits.to(DEVICE)


SHAPES = ["wide", "flat", "peaked", "tied", "equal", "tiny", "huge", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Case:
    logits: torch.Tensor
    position: torch.Tensor
    pick: torch.Tensor
    is_commit: torch.Tensor
    adjustment: Adjustment
    choice: Choice
    seed: torch.Tensor
    choice_index: torch.Tensor

    @property
    def given(self) -> tuple[object, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def make_case(mode: str, shape: str, seed: int, vocab_size: int, rows: int = 3, picks: int = 2) -> Case:
    generator = torch.Generator().manual_seed(seed)
    lane_R = torch.randint(0, LANES, (rows,), generator=generator)
    block_R = torch.randint(0, 3, (rows,), generator=generator)
    pick = torch.stack([torch.randperm(CANVAS, generator=generator)[:picks] for _ in range(rows)])
    return Case(
        logits=make_logits(shape, rows, vocab_size, generator),
        position=(block_R[:, None] * CANVAS + torch.arange(CANVAS)).to(DEVICE),
        pick=pick.to(DEVICE),
        is_commit=(torch.rand(rows, picks, generator=generator) > 0.2).to(DEVICE),
        adjustment=make_adjustment(vocab_size, lane_R, generator),
        choice=choice_of(mode, vocab_size),
        seed=torch.randint(0, 2**62, (LANES,), generator=generator).to(DEVICE),
        choice_index=torch.arange(LANES).to(DEVICE),
    )


def slack(case: Case, token_RK: torch.Tensor) -> torch.Tensor:
    """How far each pick's random number lies outside its token's interval of the slow twin's distribution function."""
    adjustment, choice = case.adjustment, case.choice
    raw_RKV = sampler.gather_positions(case.logits, case.pick)[..., : adjustment.vocab_size].float()
    position_RK = case.position.gather(1, case.pick)
    logits_MV = adjustment.apply(raw_RKV, position_RK).flatten(0, 1)
    lane_M = adjustment.lane_R[:, None].expand_as(case.pick).flatten()
    probs_MV = sampler.kept_probabilities(logits_MV, choice.at(lane_M)).double()
    probs_MV = probs_MV / probs_MV.sum(dim=-1, keepdim=True)
    upper_M = probs_MV.cumsum(dim=-1).gather(1, token_RK.flatten()[:, None])[:, 0]
    lower_M = upper_M - probs_MV.gather(1, token_RK.flatten()[:, None])[:, 0]
    number_M = uniform(case.seed[lane_M], position_RK.flatten(), case.choice_index[lane_M])
    outside_M = torch.maximum(lower_M - number_M, number_M - upper_M).clamp(min=0)
    return torch.where(choice.at(lane_M).is_greedy_M, 0.0, outside_M).view_as(token_RK)


@pytest.mark.parametrize(("vocab_size", "slice_size"), VOCABS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_a_choice_without_a_sort_equals_the_slow_twin(mode: str, shape: str, vocab_size: int, slice_size: int) -> None:
    """Up to random numbers next to a boundary. Nothing but the last digits of the running sums may move one."""
    # Where a hundred thousand tokens are nearly alike each has a hundred-thousandth of the mass, and the twin's float32
    # running sum, by which it cuts at top-p, is off by some of them.
    is_even = shape in ("flat", "equal", "tiny")
    tolerance = 10 * TOLERANCE if is_even else TOLERANCE
    num_different = 0
    for seed in range(1 if IS_INTERPRETED else 6):
        case = make_case(mode, shape, seed, vocab_size, rows=2)
        fast, slow = choose(*case.given, slice_size=slice_size), sampler.choose(*case.given)
        marked = case.is_commit
        is_equal = (fast.token_RK == slow.token_RK) | ~marked
        num_different += int((~is_equal).sum())
        assert (is_equal | (slack(case, fast.token_RK) < tolerance)).all()
        assert ((fast.token_RK == slow.token_RK) | ~marked | (not MODES[mode][5])).all(), "greedy has no boundaries"
        raw = sampler.gather_positions(case.logits, case.pick)[..., :vocab_size].float()
        target = raw.gather(2, fast.token_RK[:, :, None])[:, :, 0]
        assert torch.equal(fast.target_logit_RK[marked], target[marked])
        logprob = target - raw.logsumexp(dim=-1)
        torch.testing.assert_close(fast.logprob_RK[marked], logprob[marked], atol=1e-4, rtol=1e-5)
    assert num_different <= 1 or is_even


@pytest.mark.parametrize("mode", ["entropy_all", "all_three", "greedy"])
def test_a_choice_depends_neither_on_the_run_nor_on_the_batch_nor_on_how_many_picks_a_row_has(mode: str) -> None:
    vocab_size, slice_size = VOCABS[0]
    case = make_case(mode, "wide", 11, vocab_size, rows=4, picks=3)
    whole = choose(*case.given, slice_size=slice_size)
    again = choose(*case.given, slice_size=slice_size)
    for row in range(4):
        alone = dataclasses.replace(
            case,
            logits=case.logits[row : row + 1],
            position=case.position[row : row + 1],
            pick=case.pick[row : row + 1, 1:2].contiguous(),
            is_commit=case.is_commit[row : row + 1, 1:2].contiguous(),
            adjustment=dataclasses.replace(case.adjustment, lane_R=case.adjustment.lane_R[row : row + 1]),
        )
        for name in ("token_RK", "target_logit_RK", "logprob_RK"):
            ours = getattr(choose(*alone.given, slice_size=slice_size), name)
            assert torch.equal(ours, getattr(whole, name)[row : row + 1, 1:2])
            assert torch.equal(getattr(again, name), getattr(whole, name))


def test_a_pick_that_is_no_commit_gets_a_valid_token_whatever_its_logits_are() -> None:
    vocab_size, slice_size = VOCABS[0]
    case = make_case("all_three", "wide", 12, vocab_size)
    case.logits[:] = math.nan
    case.is_commit[:] = False
    chosen = choose(*case.given, slice_size=slice_size)
    assert not chosen.token_RK.any() and not chosen.target_logit_RK.any() and not chosen.logprob_RK.any()


@pytest.mark.parametrize("mode", MODES)
def test_the_one_token_that_is_left_is_chosen(mode: str) -> None:
    """Also where its logit is far below those that are banned, and the largest bias there is lifts it."""
    vocab_size, slice_size = VOCABS[0]
    for bias in (0.0, -1e30, 1e30):
        case = make_case(mode, "wide", 13, vocab_size)
        case.is_commit[:] = True
        case.adjustment.offset_NV.fill_(-math.inf)
        case.adjustment.offset_NV[:, 201] = bias
        case.adjustment.is_end_NV[:, 201] = False
        assert (choose(*case.given, slice_size=slice_size).token_RK == 201).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "slice_size"), VOCABS)
def test_confidence_and_entropy_in_one_reading_equal_the_slow_twin(
    vocab_size: int, slice_size: int, dtype: torch.dtype
) -> None:
    """A row with 0, one with a few and one with all positions masked; rows that are not finite in each way."""
    generator = torch.Generator().manual_seed(4)
    rows = 4
    adjustment = make_adjustment(vocab_size, torch.tensor([1, 0, 4, 2]), generator)
    logits = make_logits("wide", rows, vocab_size, generator).to(dtype)
    logits[0] = make_logits("peaked", rows, vocab_size, generator).to(dtype)[0]
    masked = torch.rand(rows, CANVAS, generator=generator) > 0.4
    masked[0], masked[1], masked[2, 0], masked[3, :3] = True, False, True, True
    adjustment.offset_NV[4, :] = -math.inf
    logits[3, 0, 5], logits[3, 1, vocab_size - 2], logits[3, 2, 3] = math.nan, -math.inf, math.inf
    position = 3 + torch.arange(CANVAS).expand(rows, -1).contiguous()
    given = (logits, masked.to(DEVICE), position.to(DEVICE), adjustment)
    tokens, entropies, is_finite = confidence(*given, slice_size=slice_size, columns=128, num_positions=2)
    slow_tokens, slow_entropies, slow_is_finite = sampler.confidence(*given)
    torch.testing.assert_close(tokens, slow_tokens, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropies, slow_entropies, atol=1e-4, rtol=1e-5)
    assert torch.equal(is_finite, slow_is_finite)
    assert is_finite[:2].all() and not is_finite[2, 0] and not is_finite[3, :3].any()


def test_a_position_has_the_same_confidence_whatever_else_is_masked() -> None:
    vocab_size, slice_size = VOCABS[0]
    generator = torch.Generator().manual_seed(5)
    adjustment = make_adjustment(vocab_size, torch.tensor([1]), generator)
    logits = make_logits("wide", 1, vocab_size, generator)
    position = torch.arange(CANVAS, device=DEVICE)[None]

    def confidence_of(*offsets: int) -> torch.Tensor:
        masked = torch.zeros(1, CANVAS, dtype=torch.bool, device=DEVICE)
        masked[0, list(offsets)] = True
        given = (logits, masked, position, adjustment)
        return torch.stack(confidence(*given, slice_size=slice_size, num_positions=2)[:2])[:, 0, 5]

    assert torch.equal(confidence_of(5), confidence_of(0, 2, 4, 5, 6))
    assert torch.equal(confidence_of(5), confidence_of(5, 7))


def test_positions_picked_in_one_launch_equal_the_slow_twin() -> None:
    """Every policy, with ties, rows that are not finite, without masked positions, or with a quota of nothing."""
    num_picked, names = 0, ("confidence", "threshold", "factor", "entropy_bound")
    policy = torch.tensor([policies.policy_id(name) for name in names], device=DEVICE)
    parameter = torch.tensor([0.0, 0.6, 1.2, 0.9], device=DEVICE)
    for seed in range(10 if IS_INTERPRETED else 200):
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.rand(*shape, generator=generator)

        rows = 12
        masked = (rand(rows, CANVAS) > 0.3) & (rand(rows, 1) > 0.1)
        confidence_RC = torch.where(masked, (8 * rand(rows, CANVAS).sqrt()).ceil() / 8, 0.0)
        given = (
            confidence_RC,
            torch.where(masked, rand(rows, CANVAS), 0.0),
            ~masked | (rand(rows, CANVAS) > 0.02),
            masked,
            CANVAS * torch.arange(rows)[:, None] + torch.arange(CANVAS),
            torch.randint(0, CANVAS, (rows,), generator=generator),
            torch.randint(0, 4, (rows,), generator=generator),
        )
        moved = [tensor.to(DEVICE) for tensor in given]
        for num_picks in (CANVAS, CANVAS - 3):
            fast = pick(*moved, policy, parameter, num_picks)
            slow = policies.pick(*moved, policy, parameter, num_picks)
            for field in dataclasses.fields(slow):
                assert torch.equal(getattr(fast, field.name), getattr(slow, field.name)), field.name
        num_picked += int(slow.is_pick_RK.sum())
    assert num_picked > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [size for size, _ in VOCABS])
def test_guided_logits_in_place_equal_the_slow_twin(vocab_size: int, dtype: torch.dtype) -> None:
    """Rows that are not guided, shadows, and positions without a mask keep every bit."""
    generator = torch.Generator().manual_seed(8)
    padded = -(-vocab_size // 64) * 64
    fast = (3 * torch.randn(6, CANVAS, padded, generator=generator)).to(DEVICE, dtype)
    fast[4, 1, 5] = math.inf
    fast[5, 6, 9] = math.nan
    masked_RC = (torch.rand(6, CANVAS, generator=generator) > 0.4).to(DEVICE)
    masked_RC[0, 1], masked_RC[1, 6] = True, True
    shadow_R = torch.tensor([4, 5, 2, 3, 4, 5], device=DEVICE)
    guidance_R = torch.tensor([2.5, 1.25, 9.0, 4.0, 2.5, 1.25], device=DEVICE)
    before, slow = fast.clone(), fast.clone()
    guide(fast, masked_RC, shadow_R, guidance_R)
    guidance.guide(slow, masked_RC, shadow_R, guidance_R)
    is_changed_RC = masked_RC & (torch.arange(6, device=DEVICE) < 2)[:, None]
    assert torch.equal(fast[~is_changed_RC].nan_to_num(), before[~is_changed_RC].nan_to_num())
    assert not torch.equal(fast[is_changed_RC], before[is_changed_RC])
    # A kernel may add a product without rounding it first.
    torch.testing.assert_close(fast, slow, equal_nan=True)
    assert not fast[0, 1, 5].isfinite() and not fast[1, 6, 9].isfinite()


def test_what_the_host_reads_in_one_launch_equals_the_slow_twin() -> None:
    generator = torch.Generator().manual_seed(5)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2**53, shape, generator=generator).to(DEVICE)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    for rows, picks in ((1, 1), (3, 8)):
        made = policies.Picks(
            pick_RK=whole(rows, picks),
            is_pick_RK=real(rows, picks) > 0,
            position_RK=whole(rows, picks),
            confidence_RK=real(rows, picks),
            is_finite_R=real(rows) > 0,
        )
        chosen = sampler.Chosen(whole(rows, picks), real(rows, picks), real(rows, picks))
        lane_R = torch.randint(0, LANES, (rows,), generator=generator).to(DEVICE)
        given = (made, chosen, real(rows, picks) > 0, lane_R, whole(LANES), whole(LANES))
        assert torch.equal(pack(*given), policies.pack(*given))


def lanes_of(config: ModelConfig, generator: torch.Generator) -> Lanes:
    """Lanes in the middle of their second canvas."""
    lanes = Lanes(config, LANES, DEVICE, torch.float32)
    for lane in range(LANES):
        lanes.token_ids_NS[lane] = config.mask_token_id
        # Some tokens of the canvas, where an end token may overwrite them, stand in the prompt too.
        lanes.token_ids_NS[lane, :CANVAS] = torch.arange(CANVAS)
        for block in (1, 2) if lane == 0 else (1,):
            tokens = torch.randint(0, 2 * CANVAS, (2,), generator=generator)
            lanes.token_ids_NS[lane, [block * CANVAS + 2, block * CANVAS + 5]] = tokens.to(DEVICE)
        lanes.present_NV[lane] = sampler.presence(lanes.token_ids_NS[lane : lane + 1], config.vocab_size)[0]
        lanes.limit_N[lane] = lanes.end_N[lane] = 3 * CANVAS - 2 * lane
        lanes.num_committed_N[lane] = lane
    lanes.end_N[3] = CANVAS + 4
    lanes.is_end_NV[:] = (torch.rand(lanes.is_end_NV.shape, generator=generator) > 0.6).to(DEVICE)
    return lanes


def test_commits_in_one_launch_equal_the_slow_twin() -> None:
    """Rows of one lane, rows that commit nothing, end tokens left and right of one that is there."""
    config = ModelConfig(
        vocab_size=61,
        n_embd=20,
        block_size=4 * CANVAS,
        diff_block_size=CANVAS,
        n_head=2,
        n_kv_heads=1,
        concept=ConceptConfig(concept_dim=20),
        mask_token_id=60,
        eos_token_id=59,
        pad_token_id=58,
    )
    num_ended = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        fast = lanes_of(config, generator)
        slow = copy.deepcopy(fast)
        lane_R = torch.tensor([0, 3, fast.idle_lane, 2, 0], device=DEVICE)
        block_R = torch.tensor([1, 1, 0, 1, 2], device=DEVICE)
        position = block_R[:, None] * CANVAS + torch.arange(CANVAS, device=DEVICE)
        masked = torch.tensor([0, 1, 3, 4, 6, 7])
        pick = torch.stack([masked[torch.randperm(6, generator=generator)[:3]] for _ in lane_R]).to(DEVICE)
        token = torch.randint(0, 58, pick.shape, generator=generator).to(DEVICE)
        is_commit = (torch.rand(pick.shape, generator=generator) > 0.4).to(DEVICE)
        is_commit[2] = False
        hidden = torch.randn(len(lane_R), CANVAS, 20, generator=generator).to(DEVICE)
        slow.commit(lane_R, position, hidden, pick, token, is_commit)
        FusedBackend.commit(fast, lane_R, position, hidden, pick, token, is_commit)
        for name, tensor in vars(slow).items():
            if isinstance(tensor, torch.Tensor) and not name.startswith("_"):
                ours, theirs = getattr(fast, name)[:LANES], tensor[:LANES]
                if name == "present_NV":
                    ours, theirs = ours[:, :58], theirs[:, :58]
                assert torch.equal(ours, theirs), name
        assert not fast.token_ids_NS[fast.idle_lane].any() and not fast.present_NV[fast.idle_lane].any()
        num_ended += int((fast.end_N < fast.limit_N).sum())
    assert num_ended > 8, "only one lane had ended before"
