"""Per-sequence state on the device. A request's arrival or departure rewrites a lane and nothing else.

Whatever can differ between two rows of one lane (counts of commits, masks, page table) is computed or passed per row;
a lane holds what belongs to the sequence.

Shapes: N lanes, R rows, K picks a row, S positions of a whole context, C canvas positions, V vocabulary, G steering
groups, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..config import ModelConfig
from ..decoding import sampler
from ..decoding.overrides import OverridePlan
from ..decoding.policies import policy_id
from ..decoding.steering import SteeringPlan
from ..limits import MAX_STEERING_GROUPS
from ..request import SamplingParams
from ..scheduling import PlannedRow, Sequence
from .transfer import to_device


class Lanes:
    """Tensors with one entry a lane, indexed by the lanes of a pass's rows."""

    def __init__(
        self, config: ModelConfig, num_lanes: int, device: torch.device, dtype: torch.dtype, num_drafts: int = 0
    ) -> None:
        block_size = config.diff_block_size
        context = -(-config.block_size // block_size) * block_size
        self.config = config
        self.device = device
        self.idle_lane = num_lanes
        """A lane of nobody: rows that fill a bucket stand on it, and writes that must not happen go to it. Behind it
        are the lanes of drafts."""

        # Kernels read vectors of tokens 16 at a time, which takes rows that start at multiples of 16.
        padded = -(-config.vocab_size // 16) * 16

        def lane_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_lanes + 1 + num_drafts, *shape, dtype=dtype, device=device)

        self.token_ids_NS = lane_tensor(context, dtype=torch.int64)
        self.limit_N = lane_tensor(dtype=torch.int64)
        """Positions at or past prompt + max_tokens do not exist."""
        self.end_N = lane_tensor(dtype=torch.int64)
        """Position of the end token; the limit while there is none."""
        self.num_committed_N = lane_tensor(dtype=torch.int64)
        self.seed_N = lane_tensor(dtype=torch.int64)
        self.choice_index_N = lane_tensor(dtype=torch.int64)
        self.first_end_N = lane_tensor(dtype=torch.int64)
        """End tokens are banned below this position (min_tokens)."""
        self.policy_N = lane_tensor(dtype=torch.int64)
        """As `policies.policy_id` numbers them."""
        self.policy_parameter_N = lane_tensor(dtype=torch.float32)
        self.penalty_N = lane_tensor(dtype=torch.float32)
        self.guidance_N = lane_tensor(dtype=torch.float32)
        """cfg_scale + 1: how far from the unconditional logits towards the conditional ones, and past them."""
        self.temperature_N = lane_tensor(dtype=torch.float32)
        self.top_p_N = lane_tensor(dtype=torch.float32)
        self.top_k_N = lane_tensor(dtype=torch.int64)
        self.min_p_N = lane_tensor(dtype=torch.float32)
        self.is_entropy_N = lane_tensor(dtype=torch.bool)
        self.is_greedy_N = lane_tensor(dtype=torch.bool)
        self.offset_NV = lane_tensor(padded, dtype=torch.float32)[:, : config.vocab_size]
        """Logit bias minus suppression."""
        self.is_end_NV = lane_tensor(padded, dtype=torch.bool)[:, : config.vocab_size]
        self.present_NV = lane_tensor(padded, dtype=torch.bool)[:, : config.vocab_size]
        """Tokens of the prompt and those committed left of the end. Masks, padding and end of text may count too: they
        are banned."""
        self._banned_V = torch.zeros(padded, dtype=torch.bool, device=device)[: config.vocab_size]
        self._banned_V[list(config.banned_token_ids)] = True
        self.vector_NGD = lane_tensor(MAX_STEERING_GROUPS, config.n_embd, dtype=torch.float32)
        self.layer_NG = lane_tensor(MAX_STEERING_GROUPS, dtype=torch.int64)
        self.cutoff_NG = lane_tensor(MAX_STEERING_GROUPS, dtype=torch.int64)
        self.draft_position_N = lane_tensor(dtype=torch.int64)
        """The commit that is expected next of a lane with drafts. Any will do: a wrong one is not confirmed."""
        self.draft_token_N = lane_tensor(dtype=torch.int64)
        self.hidden_NCD = lane_tensor(2 * block_size, config.n_embd, dtype=dtype)
        """Hidden state of the pass that committed each position, kept until it is explained: of this canvas and of the
        one before, which the host may learn of when this one has begun. See `hidden_place`."""

        # Not a tensor over all lanes: few requests set weights, and the host tells their rows apart.
        self._overrides: dict[int, OverridePlan | None] = {}

    def overrides(self, lane: int) -> OverridePlan | None:
        """The concept weights that a lane's sequence sets; None where it sets none."""
        return self._overrides.get(lane)

    def overridden(self, rows: Iterable[PlannedRow]) -> dict[int, OverridePlan]:
        """Which of these rows set concept weights: by index, what they set. A draft sets what its sequence sets."""
        found = ((index, self.overrides(row.lane)) for index, row in enumerate(rows))
        return {index: plan for index, plan in found if plan is not None}

    def tensors(self) -> list[Tensor]:
        """All that a lane consists of."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    @property
    def concept_bytes(self) -> int:
        """Bytes of a lane that steering and attribution need."""
        tensors = (self.vector_NGD, self.layer_NG, self.cutoff_NG, self.offset_NV, self.hidden_NCD)
        return sum(tensor[0].nbytes for tensor in tensors)

    def hidden_place(self, position: Tensor) -> Tensor:
        """Where `hidden_NCD` keeps the hidden state of a position (int64, any shape)."""
        return position % self.hidden_NCD.shape[1]

    def write(
        self,
        lane: int,
        sequence: Sequence,
        sampling: SamplingParams,
        seed: int,
        steering: SteeringPlan,
        *,
        is_shadow: bool = False,
    ) -> None:
        """Put a sequence, new or resumed, into a lane, or its unconditional copy."""
        known = sequence.unconditional_token_ids if is_shadow else sequence.token_ids
        token_ids = to_device(known, torch.int64, self.device)
        self.token_ids_NS[lane].fill_(self.config.pad_token_id)
        self.token_ids_NS[lane, : len(token_ids)] = token_ids
        self._write_numbers(lane, sequence, sampling, seed)
        self.present_NV[lane] = sampler.presence(self.token_ids_NS[lane : lane + 1], self.config.vocab_size)[0]
        self.offset_NV[lane].zero_()
        if sampling.logit_bias:
            biased = to_device(list(sampling.logit_bias), torch.int64, self.device)
            biases = to_device(list(sampling.logit_bias.values()), torch.float32, self.device)
            self.offset_NV[lane, biased] = biases
        if steering.suppression_V is not None:
            self.offset_NV[lane] -= steering.suppression_V
        self.is_end_NV[lane].zero_()
        ends = to_device(sorted(sequence.end_token_ids), torch.int64, self.device)
        self.is_end_NV[lane].index_fill_(0, ends, True)
        for tensor in steering.tensors():
            if tensor.is_cuda:
                # They were made beside the passes: their memory must outlive this stream's reading.
                tensor.record_stream(torch.cuda.current_stream(self.device))
        self._overrides[lane] = steering.overrides
        # A zero vector switches a group off, whatever its layer and cutoff.
        num_groups = len(steering.vector_GD)
        self.vector_NGD[lane].zero_()
        self.vector_NGD[lane, :num_groups] = steering.vector_GD
        self.layer_NG[lane, :num_groups] = steering.layer_G
        self.cutoff_NG[lane, :num_groups] = steering.cutoff_G

    def _write_numbers(self, lane: int, sequence: Sequence, sampling: SamplingParams, seed: int) -> None:
        end = sequence.limit if sequence.end is None else sequence.end
        whole = (
            (self.limit_N, sequence.limit),
            (self.end_N, end),
            (self.num_committed_N, sequence.num_committed),
            (self.first_end_N, sequence.prompt_length + sampling.min_tokens),
            (self.seed_N, seed),
            (self.choice_index_N, sampling.choice_index),
            (self.policy_N, policy_id(sampling.policy)),
            (self.top_k_N, min(sampling.top_k or self.config.vocab_size, self.config.vocab_size)),
            (self.is_entropy_N, sampling.uses_entropy),
            (self.is_greedy_N, sampling.is_greedy),
        )
        real = (
            (self.policy_parameter_N, sampling.policy_parameter or 0.0),
            (self.penalty_N, sampling.repetition_penalty),
            (self.guidance_N, sampling.cfg_scale + 1),
            (self.temperature_N, sampling.effective_temperature),
            (self.top_p_N, sampling.effective_top_p),
            (self.min_p_N, sampling.min_p or 0.0),
        )
        # A plain number would be copied by itself, and the host would wait for each copy.
        for numbers, dtype in ((whole, torch.int64), (real, torch.float32)):
            values = to_device([number for _, number in numbers], dtype, self.device)
            for (tensor, _), value in zip(numbers, values, strict=True):
                tensor[lane] = value

    @property
    def choice(self) -> sampler.Choice:
        """Every lane's sampling parameters."""
        return sampler.Choice(
            temperature_M=self.temperature_N,
            top_p_M=self.top_p_N,
            top_k_M=self.top_k_N,
            min_p_M=self.min_p_N,
            is_entropy_M=self.is_entropy_N,
            is_greedy_M=self.is_greedy_N,
        )

    def begin_drafts(self, lane_R: Tensor, base_lane_R: Tensor) -> None:
        """Make each draft's lane its sequence's, with the expected commit made. Others have themselves for a base."""
        for tensor in self.tensors():
            # A draft keeps its hidden state in its sequence's lane; what is banned belongs to no lane.
            if tensor is not self.hidden_NCD and tensor is not self._banned_V:
                tensor[lane_R] = tensor[base_lane_R]
        # Of what is no draft nothing changes but the idle lane.
        draft_R = torch.where(lane_R == base_lane_R, self.idle_lane, lane_R)
        token_R = self.draft_token_N[base_lane_R]
        self.token_ids_NS[draft_R, self.draft_position_N[base_lane_R]] = token_R
        self.present_NV[draft_R, token_R] = torch.ones_like(token_R, dtype=torch.bool)
        self.num_committed_N[draft_R] = self.num_committed_N[base_lane_R] + 1

    def adjustment(self, lane_R: Tensor) -> sampler.Adjustment:
        """What changes the logits of rows of these lanes."""
        return sampler.Adjustment(
            lane_R=lane_R,
            offset_NV=self.offset_NV,
            present_NV=self.present_NV,
            penalty_N=self.penalty_N,
            is_end_NV=self.is_end_NV,
            first_end_N=self.first_end_N,
            banned_V=self._banned_V,
        )

    def commit(
        self,
        lane_R: Tensor,
        position_RC: Tensor,
        hidden_RCD: Tensor,
        pick_RK: Tensor,
        token_RK: Tensor,
        is_commit_RK: Tensor,
    ) -> None:
        """Write the commits, at offsets `pick_RK` of the rows' canvases, into the lanes; then the end-of-text rule.

        Rows may share a lane; a position of a lane is committed once at most. Of a lane that commits nothing, nothing
        changes but the idle lane's.
        """
        position_RK = position_RC.gather(1, pick_RK)
        # What is no commit goes to the idle lane, where nobody reads it.
        lane_RK = torch.where(is_commit_RK, lane_R[:, None], self.idle_lane)
        self.token_ids_NS[lane_RK, position_RK] = token_RK
        self.hidden_NCD[lane_RK, self.hidden_place(position_RK)] = sampler.gather_positions(hidden_RCD, pick_RK)
        self.num_committed_N.index_add_(0, lane_R, is_commit_RK.sum(dim=-1))
        limit_R = self.limit_N[lane_R]
        is_end_RK = is_commit_RK & self.is_end_NV[lane_RK, token_RK]
        found_R = torch.where(is_end_RK, position_RK, limit_R[:, None]).amin(dim=-1)
        self.end_N.scatter_reduce_(0, lane_R, found_R, reduce="amin")
        is_past_RC = (position_RC > self.end_N[lane_R, None]) & (position_RC < limit_R[:, None])
        past_lane_RC = torch.where(is_past_RC, lane_R[:, None], self.idle_lane)
        # A plain number would be copied from the host, which a graph cannot capture.
        self.token_ids_NS[past_lane_RC, position_RC] = torch.full_like(position_RC, self.config.eos_token_id)
        # Anew, because a token right of the end is no longer there.
        self.present_NV[lane_R] = sampler.presence(self.token_ids_NS[lane_R], self.config.vocab_size)
