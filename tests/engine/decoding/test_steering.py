"""Directions, alphas, groups, injection and suppression, against the package and the plain reference."""

from typing import ClassVar

import pytest
import torch
from steerling.configs import SteeringConfig

from engine.admission import check_request
from engine.decoding.steering import (
    NO_CUTOFF,
    added_by_layer,
    added_by_layer_slow,
    inject,
    plan_steering,
    resolve_intervention,
    suppression,
)
from engine.errors import InvalidValue
from engine.model.weights import load_model
from engine.request import GenerateRequest, Intervention, SteeringParams, Suppression
from tests import reference
from tests.checkpoints import RECIPES

RECIPE = RECIPES[1]


@pytest.fixture
def model(checkpoint):
    return load_model(checkpoint(RECIPE), device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("ids", [[3], [3, 7, 20]])
@pytest.mark.parametrize("layer", [None, 0, 1, 2])
@pytest.mark.parametrize("unit", ["logits", "raw"])
def test_one_intervention_with_equal_weights_is_the_package_s(model, oracle, ids, layer, unit):
    theirs = SteeringConfig(
        concept_ids=ids, mai_lm_target=-4.0, normalize_mai_lm_target=unit == "logits", inject_layer=layer
    )
    direction, alpha, first = oracle(RECIPE).generator._prepare_steering(theirs)
    ours, our_direction = resolve_intervention(
        model, Intervention(concept_ids=tuple(ids), strength=-4.0, unit=unit, layer=layer)
    )
    torch.testing.assert_close(our_direction, direction, atol=1e-6, rtol=0)
    assert (ours.alpha, ours.layer) == (pytest.approx(alpha, abs=1e-6), first)
    assert ours.alpha * ours.peak == pytest.approx(-4.0, abs=1e-5) or unit == "raw"


def test_weights_scale_the_embeddings_before_they_are_normalised(model, oracle):
    one = Intervention(concept_ids=(3, 7), weights=(2.0, -0.5), strength=5.0)
    ((_, alpha, direction, _),) = reference.resolve_steering(
        oracle(RECIPE), GenerateRequest(prompt_token_ids=[], steering=SteeringParams(interventions=(one,)))
    )
    ours, our_direction = resolve_intervention(model, one)
    torch.testing.assert_close(our_direction, direction, atol=1e-6, rtol=0)
    assert ours.alpha == pytest.approx(alpha, abs=1e-5)


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_only_the_ratio_of_weights_counts(model, factor):
    """Huge weights overflowed the norm and tiny ones vanished beside its epsilon: both steered nowhere."""
    one, scaled = (
        resolve_intervention(model, Intervention(concept_ids=(3, 7), weights=weights, strength=5.0))
        for weights in ((1.0, -0.25), (factor, -0.25 * factor))
    )
    torch.testing.assert_close(scaled[1], one[1], atol=1e-6, rtol=0)
    assert scaled[0].alpha == pytest.approx(one[0].alpha, abs=1e-5)


def test_weights_that_cancel_or_are_nought_steer_nowhere(model):
    for ids, weights in (((3, 3), (1.0, -1.0)), ((3, 7), (0.0, 0.0))):
        plan = plan_steering(
            model,
            SteeringParams(interventions=(Intervention(concept_ids=ids, weights=weights, strength=1e30),)),
        )
        assert not plan.vector_GD.any()


def test_a_cutoff_past_every_length_never_cuts(model):
    plan = plan_steering(model, SteeringParams(interventions=(steer(schedule="hard_cutoff", cutoff_tokens=10**30),)))
    assert plan.cutoff_G.tolist() == [NO_CUTOFF]


def test_suppression_is_the_package_s_logit_mask(model, oracle):
    theirs = oracle(RECIPE).generator._build_relu_mask({3: 20.0, 9: 1.5})
    ours = suppression(model, (Suppression(concept_id=3, strength=20.0), Suppression(concept_id=9, strength=1.5)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert (ours >= 0).all() and ours.max() > 1


def steer(**values):
    return Intervention(**{"concept_ids": (1,), "strength": 2.0, **values})


def test_equal_layers_and_schedules_share_a_group_and_add_up(model):
    plan = plan_steering(model, SteeringParams(interventions=(steer(), steer(concept_ids=(2,)), steer(layer=2))))
    parts = [resolve_intervention(model, steer(concept_ids=(c,))) for c in (1, 2)]
    expected = sum(outcome.alpha * direction for outcome, direction in parts)
    torch.testing.assert_close(plan.vector_GD[0], expected, atol=1e-6, rtol=0)
    assert plan.layer_G.tolist() == [RECIPE.model_config.n_layers // 2, 2]
    assert len(plan.resolved) == 3


def test_eight_groups_fit_and_a_ninth_is_refused_by_name(model):
    def groups(count):
        return SteeringParams(
            interventions=tuple(steer(schedule="hard_cutoff", cutoff_tokens=n + 1) for n in range(count))
        )

    plan = plan_steering(model, groups(8))
    assert plan.vector_GD.any(dim=1).all() and plan.cutoff_G.tolist() == list(range(1, 9))
    check_request(GenerateRequest(prompt_token_ids=(), steering=groups(8)), model.config)
    with pytest.raises(InvalidValue, match=r"9 .* at most 8") as caught:
        check_request(GenerateRequest(prompt_token_ids=(), steering=groups(9)), model.config)
    assert caught.value.param == "steering.interventions"


class TestAddedByLayer:
    layers: ClassVar = torch.tensor([[1, 3]])
    vectors: ClassVar = torch.tensor([[[1.0, 0.0], [0.0, 10.0]]])

    def added(self, num_committed, cutoffs=(2**62, 2**62)):
        added = added_by_layer(self.vectors, self.layers, torch.tensor([cutoffs]), torch.tensor([num_committed]), 3)
        return added[:, 0].tolist()

    def test_layers_count_from_one(self):
        assert self.added(0) == [[1.0, 0.0], [1.0, 0.0], [1.0, 10.0]]

    @pytest.mark.parametrize(("committed", "first"), [(4, 1.0), (5, 0.0)])
    def test_a_cutoff_counts_the_tokens_committed_when_the_pass_begins(self, committed, first):
        assert self.added(committed, (5, 2**62))[2] == [first, 10.0]

    def test_rows_have_their_own_schedules(self):
        added_LRD = added_by_layer(
            self.vectors.expand(2, -1, -1),
            self.layers.expand(2, -1),
            torch.tensor([[1, 1], [9, 9]]),
            torch.tensor([3, 3]),
            3,
        )
        assert not added_LRD[:, 0].any() and added_LRD[2, 1].all()


def test_what_is_added_is_a_product_of_who_acts_and_the_vectors():
    generator = torch.Generator().manual_seed(2)
    vector_RGD = torch.randn(5, 8, 24, generator=generator)
    layer_RG = torch.randint(1, 8, (5, 8), generator=generator)
    cutoff_RG = torch.randint(0, 9, (5, 8), generator=generator)
    committed_R = torch.arange(5)
    acts_RLG = (committed_R[:, None] < cutoff_RG)[:, None] & (layer_RG[:, None] <= torch.arange(1, 7)[:, None])
    product_LRD = (acts_RLG.float() @ vector_RGD).transpose(0, 1)
    added_LRD = added_by_layer(vector_RGD, layer_RG, cutoff_RG, committed_R, 6)
    assert added_LRD.is_contiguous()
    torch.testing.assert_close(added_LRD, product_LRD, atol=1e-5, rtol=0)


@pytest.mark.parametrize("row", [0, 3])
def test_a_row_s_sums_are_bit_equal_alone_and_in_company(row):
    """A batched product chose another order of its sums for another number of rows."""
    generator = torch.Generator().manual_seed(3)
    vector_RGD = torch.randn(4, 8, 24, generator=generator)
    layer_RG = torch.randint(1, 8, (4, 8), generator=generator)
    cutoff_RG, committed_R = torch.full((4, 8), 9), torch.arange(4)
    together = added_by_layer_slow(vector_RGD, layer_RG, cutoff_RG, committed_R, 6)
    one = slice(row, row + 1)
    alone = added_by_layer_slow(vector_RGD[one], layer_RG[one], cutoff_RG[one], committed_R[one], 6)
    assert torch.equal(alone, together[:, one])


def test_only_masked_positions_are_steered():
    x = inject(torch.zeros(1, 3, 2), torch.tensor([[1.0, 10.0]]), torch.tensor([[True, False, True]]))
    assert x[0].tolist() == [[1.0, 10.0], [0.0, 0.0], [1.0, 10.0]]


def test_a_direction_that_is_not_a_number_stays_where_it_is_asked_for():
    """Times a mask of 0, NaN is NaN: one bad concept reached the pages of a prompt, which others share."""
    x = inject(torch.ones(1, 3, 2), torch.full((1, 2), torch.nan), torch.tensor([[True, False, True]]))
    assert x.isnan().any(dim=-1).tolist() == [[True, False, True]]
