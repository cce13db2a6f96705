"""Per-sequence state on the device. A request's arrival or departure rewrites a lane and nothing else.

Whatever can differ between two rows of one lane (counts of commits, presence, masks, page table) is computed or
passed per row; a lane holds what belongs to the sequence.

Shapes: N lanes, S positions of a whole context, C canvas positions, V vocabulary, G steering groups, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..decoding.policies import policy_id
from ..decoding.steering import SteeringPlan
from ..request import MAX_STEERING_GROUPS, SamplingParams
from ..scheduling import Sequence


class Lanes:
    """Tensors with one entry a lane, indexed by the lanes of a pass's rows."""

    def __init__(self, config: ModelConfig, num_lanes: int, device: torch.device, dtype: torch.dtype) -> None:
        block_size = config.diff_block_size
        context = -(-config.block_size // block_size) * block_size
        self.config = config
        self.device = device
        self.idle_lane = num_lanes
        """A lane of nobody: rows that fill a bucket stand on it, and writes that must not happen go to it."""

        def lane_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_lanes + 1, *shape, dtype=dtype, device=device)

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
        self.temperature_N = lane_tensor(dtype=torch.float32)
        self.top_p_N = lane_tensor(dtype=torch.float32)
        self.top_k_N = lane_tensor(dtype=torch.int64)
        self.min_p_N = lane_tensor(dtype=torch.float32)
        self.is_entropy_N = lane_tensor(dtype=torch.bool)
        self.is_greedy_N = lane_tensor(dtype=torch.bool)
        self.offset_NV = lane_tensor(config.vocab_size, dtype=torch.float32)
        """Logit bias minus suppression."""
        self.is_end_NV = lane_tensor(config.vocab_size, dtype=torch.bool)
        self.vector_NGD = lane_tensor(MAX_STEERING_GROUPS, config.n_embd, dtype=torch.float32)
        self.layer_NG = lane_tensor(MAX_STEERING_GROUPS, dtype=torch.int64)
        self.cutoff_NG = lane_tensor(MAX_STEERING_GROUPS, dtype=torch.int64)
        self.hidden_NCD = lane_tensor(2 * block_size, config.n_embd, dtype=dtype)
        """Hidden state of the pass that committed each position, kept until it is explained: of this canvas and of the
        one before, which the host may learn of when this one has begun. See `hidden_slot`."""

    def tensors(self) -> list[Tensor]:
        """All that a lane consists of."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    @property
    def concept_bytes(self) -> int:
        """Bytes of a lane that steering and attribution need."""
        tensors = (self.vector_NGD, self.layer_NG, self.cutoff_NG, self.offset_NV, self.hidden_NCD)
        return sum(tensor[0].nbytes for tensor in tensors)

    def hidden_slot(self, position: Tensor) -> Tensor:
        """Where `hidden_NCD` keeps the hidden state of a position (int64, any shape)."""
        return position % self.hidden_NCD.shape[1]

    def write(self, lane: int, sequence: Sequence, sampling: SamplingParams, seed: int, steering: SteeringPlan) -> None:
        """Put a sequence, new or resumed, into a lane."""
        token_ids = torch.tensor(sequence.token_ids, dtype=torch.int64)
        self.token_ids_NS[lane].fill_(self.config.pad_token_id)
        self.token_ids_NS[lane, : len(token_ids)] = token_ids.to(self.device)
        self.limit_N[lane] = sequence.limit
        self.end_N[lane] = sequence.limit if sequence.end is None else sequence.end
        self.num_committed_N[lane] = sequence.num_committed
        self.first_end_N[lane] = sequence.prompt_length + sampling.min_tokens
        self._write_sampling(lane, sampling, seed)
        self.offset_NV[lane].zero_()
        if sampling.logit_bias:
            biased = torch.tensor(list(sampling.logit_bias), device=self.device)
            biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=self.device)
            self.offset_NV[lane, biased] = biases
        if steering.suppression_V is not None:
            self.offset_NV[lane] -= steering.suppression_V
        self.is_end_NV[lane].zero_()
        for token_id in sequence.end_token_ids:
            self.is_end_NV[lane, token_id] = True
        # A zero vector switches a group off, whatever its layer and cutoff.
        num_groups = len(steering.vector_GD)
        self.vector_NGD[lane].zero_()
        self.vector_NGD[lane, :num_groups] = steering.vector_GD
        self.layer_NG[lane, :num_groups] = steering.layer_G
        self.cutoff_NG[lane, :num_groups] = steering.cutoff_G

    def _write_sampling(self, lane: int, sampling: SamplingParams, seed: int) -> None:
        self.seed_N[lane] = seed
        self.choice_index_N[lane] = sampling.choice_index
        self.policy_N[lane] = policy_id(sampling.policy)
        self.policy_parameter_N[lane] = sampling.policy_parameter or 0.0
        self.penalty_N[lane] = sampling.repetition_penalty
        self.temperature_N[lane] = sampling.effective_temperature
        self.top_p_N[lane] = sampling.effective_top_p
        self.top_k_N[lane] = min(sampling.top_k or self.config.vocab_size, self.config.vocab_size)
        self.min_p_N[lane] = sampling.min_p or 0.0
        self.is_entropy_N[lane] = sampling.uses_entropy
        self.is_greedy_N[lane] = sampling.is_greedy
