"""A result depends on the request alone: never on company, arrival, prefill limits, prefix hits or preemption."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import (
    AttributionParams,
    Committed,
    Engine,
    EngineConfig,
    Finished,
    FinishReason,
    GenerateRequest,
    Intervention,
    Output,
    SamplingParams,
    SteeringParams,
    Suppression,
    WeightOverride,
)
from tests.checkpoints import EOT, NO_CORRECTION, Recipe

PLAIN = EOT
BLOCK = PLAIN.block
TOLERANCE = 1e-4

STEERING = SteeringParams(
    interventions=(
        Intervention(concept_ids=(3,), strength=6.0, layer=1, schedule="hard_cutoff", cutoff_tokens=7),
        Intervention(concept_ids=(5, 8), strength=-2.0, unit="raw", layer=2),
    ),
    suppress=(Suppression(concept_id=2, strength=2.0),),
)
OVERRIDING = dataclasses.replace(
    STEERING,
    overrides=(
        WeightOverride(concept_id=6, weight=2.5),
        WeightOverride(concept_id=9, weight=0.0),
        WeightOverride(concept_id=4, head="discovered", weight=-1.0),
    ),
)


def requests(recipe: Recipe = PLAIN) -> list[GenerateRequest]:
    """Eight that differ in everything a request can differ in."""
    mode = "delta" if recipe.concept_config.topk_on_logits else "reference"
    as_the_package = dataclasses.replace(OVERRIDING, override_mode=mode)

    def one(index, num_prompt, max_tokens, *, steering=None, attribution=True, **sampling):
        values = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "seed": index, **sampling}
        return GenerateRequest(
            prompt_token_ids=recipe.plain_ids(num_prompt, seed=index),
            max_tokens=max_tokens,
            sampling=SamplingParams(**values),
            steering=steering,
            attribution=AttributionParams() if attribution else None,
        )

    return [
        one(0, 2 * BLOCK + 5, 30),
        one(1, 0, 21, steering=STEERING),
        one(2, 1, 40, tokens_per_step=3, repetition_penalty=1.3),
        one(3, BLOCK - 1, 19, seed=5, temperature=1.3, top_p=0.9, num_logprobs=3),
        one(4, BLOCK, 2 * BLOCK, seed=5, temperature=None, steering=OVERRIDING),
        one(5, 3 * BLOCK, 25, ignore_eos=False, logit_bias={recipe.vocab_size - 6: 6.0}),
        one(6, 5 * BLOCK + 3, 18, seed=6, temperature=0.8, top_k=9, tokens_per_step=2, attribution=False),
        one(7, BLOCK + 1, 23, seed=6, choice_index=1, temperature=1.0, min_p=0.05, steering=as_the_package),
    ]


def assert_same(ours: Output, alone: Output) -> None:
    """Equal results; what an output cost may differ with company."""
    assert [(c.denoising_step, c.position, c.token_id) for c in ours.commits] == [
        (c.denoising_step, c.position, c.token_id) for c in alone.commits
    ]
    for a, b in zip(ours.commits, alone.commits, strict=True):
        assert_close(dataclasses.asdict(a), dataclasses.asdict(b))
    costs = {"request_id", "commits", "num_forward_passes", "num_cached_tokens", "num_preemptions", "error"}
    for field in dataclasses.fields(Output):
        if field.name not in costs:
            assert getattr(ours, field.name) == getattr(alone, field.name), field.name


def assert_close(ours: object, theirs: object) -> None:
    """Equal structure; floats within the tolerance."""
    if isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_close(ours[key], theirs[key])
    elif isinstance(ours, tuple | list):
        assert len(ours) == len(theirs)
        by_id = all(isinstance(item, dict) and "concept_id" in item for item in [*ours, *theirs])
        if by_id:  # contributions that are equal to rounding may swap places
            ours, theirs = (sorted(side, key=lambda item: item["concept_id"]) for side in (ours, theirs))
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b)
    else:
        assert ours == theirs


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each request in an engine of its own."""
    outputs = {}
    for recipe in (PLAIN, NO_CORRECTION):
        for index, asked in enumerate(requests(recipe)):
            config = EngineConfig(device="cpu", num_pages=64, max_rows=16, share_prefixes=False)
            outputs[recipe.name, index] = Engine.from_checkpoint(checkpoint(recipe), config).generate([asked])[0]
    return outputs


def run(engine, asked, arrivals=None):
    """Outputs in order of the requests; request i is added after arrivals[i] steps."""
    arrivals = arrivals or [0] * len(asked)
    ids, outputs, step = {}, {}, 0
    while len(outputs) < len(asked):
        for index, arrival in enumerate(arrivals):
            if arrival == step:
                ids[engine.add_request(asked[index])] = index
        for event in engine.step():
            if isinstance(event, Finished):
                outputs[ids[event.request_id]] = event.output
        engine.check_integrity()
        step += 1
    return [outputs[index] for index in range(len(asked))]


CONFIGS = {
    "plenty": {},
    "two rows a pass": {"max_rows": 2, "max_lanes": 2},
    "more lanes than rows": {"max_rows": 3, "max_lanes": 8},
    "one prefill row a pass": {"max_prefill_rows": 1},
    "three prefill rows a pass": {"max_prefill_rows": 3, "max_rows": 9},
    "one lane": {"max_lanes": 1},
    "too few pages for all": {"num_pages": 9},
    "too few pages, nothing shared": {"num_pages": 8, "share_prefixes": False, "max_lanes": 8},
    "results one pass late": {"async_scheduling": True},
    "late results, two rows a pass": {"async_scheduling": True, "max_rows": 2, "max_lanes": 2},
    "late results, too few pages for all": {"async_scheduling": True, "num_pages": 9},
    "lockstep": {"batching": "lockstep"},
    "lockstep, late results": {"batching": "lockstep", "async_scheduling": True, "max_rows": 4},
}


@pytest.mark.parametrize("recipe", [PLAIN, NO_CORRECTION], ids=lambda r: r.name)
@pytest.mark.parametrize("config", CONFIGS)
def test_in_a_batch_of_eight_every_request_gives_what_it_gives_alone(make_engine, alone, recipe, config):
    """Rows of different blocks, lengths and phases were once mixed up; parameters and seeds leaked from row to row."""
    outputs = run(make_engine(recipe, **CONFIGS[config]), requests(recipe))
    for index, output in enumerate(outputs):
        assert_same(output, alone[recipe.name, index])
    if "too few" in config:
        assert any(output.num_preemptions for output in outputs), "this config is here to preempt"


@pytest.mark.parametrize(
    "arrivals", [[0, 1, 2, 3, 4, 5, 6, 7], [9, 0, 17, 3, 3, 0, 25, 8], [0, 30, 0, 30, 0, 30, 0, 30]]
)
@pytest.mark.parametrize(
    "config",
    [
        "plenty",
        "one prefill row a pass",
        "too few pages for all",
        "late results, too few pages for all",
        "lockstep, late results",
    ],
)
def test_the_order_of_arrival_changes_nothing(make_engine, alone, arrivals, config):
    outputs = run(make_engine(PLAIN, **CONFIGS[config]), requests(), arrivals)
    for index, output in enumerate(outputs):
        assert_same(output, alone[PLAIN.name, index])


def test_a_second_run_hits_the_prefixes_and_gives_the_same(make_engine, alone):
    """Attributions were once wrong on a repeated call, and steered output differed with the cache."""
    engine = make_engine(PLAIN)
    first, second = run(engine, requests()), run(engine, requests())
    assert any(output.num_cached_tokens for output in second)
    for index, output in enumerate(first + second):
        assert_same(output, alone[PLAIN.name, index % 8])


def test_generated_blocks_are_shared_as_prefixes_too(make_engine):
    """A sealed block holds final keys and values, so a conversation's next turn finds the answer cached."""
    engine = make_engine(PLAIN)
    asked = requests()[4]
    (first,) = engine.generate([asked])
    longer = dataclasses.replace(
        asked, prompt_token_ids=(*asked.prompt_token_ids, *first.token_ids[:BLOCK], 3, 4), steering=None
    )
    (second,) = engine.generate([longer])
    assert second.num_cached_tokens == 2 * BLOCK
    fresh = make_engine(PLAIN, share_prefixes=False)
    assert_same(second, fresh.generate([longer])[0])


def test_prefixes_filled_under_steering_serve_unsteered_requests(make_engine):
    """A sealed block has no masks, so injection has not touched it: its pages are the same under every steering."""
    engine = make_engine(PLAIN)
    prompt = PLAIN.plain_ids(3 * BLOCK, seed=50)
    steered, plain = (
        GenerateRequest(
            prompt_token_ids=prompt, max_tokens=20, steering=steering, sampling=SamplingParams(temperature=0.0, seed=1)
        )
        for steering in (OVERRIDING, None)
    )
    first, second, third = (engine.generate([r])[0] for r in (steered, plain, steered))
    assert (second.num_cached_tokens, third.num_cached_tokens) == (3 * BLOCK, 3 * BLOCK)
    assert_same(third, first)
    assert_same(second, make_engine(PLAIN, share_prefixes=False).generate([plain])[0])
    assert first.token_ids != second.token_ids


def test_the_block_being_denoised_is_never_found_as_a_prefix(make_engine):
    """Unfinished blocks once entered the prefix cache."""
    engine = make_engine(PLAIN)
    asked = requests()[4]
    engine.add_request(asked)
    for _ in range(5):
        engine.step()
    (other,) = run(engine, [dataclasses.replace(asked, max_tokens=9)])
    assert other.num_cached_tokens == BLOCK
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize(("share_prefixes", "is_async"), [(True, False), (False, False), (True, True)])
def test_preempted_at_any_step_a_request_continues_to_the_same_end(make_engine, alone, index, share_prefixes, is_async):
    """One once livelocked, or came back with fewer pages than it needed."""
    engine = make_engine(PLAIN, share_prefixes=share_prefixes, max_prefill_rows=2, async_scheduling=is_async)
    asked = requests()[index]
    stop, num_preempted = 0, 0
    while True:
        request_id = engine.add_request(asked)
        events = [event for _ in range(stop) if engine.has_work for event in engine.step()]
        if any(isinstance(event, Finished) for event in events):
            break
        num_preempted += engine.preempt(request_id)
        engine.check_integrity()
        while engine.has_work:
            events += engine.step()
        output = events[-1].output
        assert output.num_preemptions == (stop > 0)
        assert_same(output, alone[PLAIN.name, index])
        stop += 1
    assert num_preempted == stop - 1 >= 8


def test_a_lane_given_to_another_does_not_lend_its_hidden_states(make_engine, alone):
    """Commits that wait to be explained must be before their lane goes to the next request."""
    engine = make_engine(PLAIN, max_lanes=1, explain_interval_s=1000.0)
    first, second = requests()[0], dataclasses.replace(requests()[4], priority=-1)
    ids = [engine.add_request(first)]
    for _ in range(6):
        assert not any(isinstance(event, Committed) for event in engine.step())
    ids.append(engine.add_request(second))
    assert engine.preempt(ids[0])
    finished = [event for _ in range(200) if engine.has_work for event in engine.step() if isinstance(event, Finished)]
    assert [event.request_id for event in finished] == [ids[1], ids[0]]
    for event, index in zip(finished, (4, 0), strict=True):
        assert_same(event.output, alone[PLAIN.name, index])


def test_preempted_again_and_again_a_request_still_ends_with_the_same(make_engine, alone):
    engine = make_engine(PLAIN)
    for index, asked in enumerate(requests()):
        request_id = engine.add_request(asked)
        events = []
        while engine.has_work:
            # Two steps, because re-admission may need one of its own to prefill.
            events += engine.step() + (engine.step() if engine.has_work else [])
            engine.preempt(request_id)
        assert_same(events[-1].output, alone[PLAIN.name, index])


def test_an_abort_takes_effect_within_one_step_and_gives_everything_back(make_engine, alone):
    engine = make_engine(PLAIN)
    ids = [engine.add_request(asked) for asked in requests()]
    outputs = {}
    for step in range(200):
        if step == 6:
            engine.abort(ids[0])
        if step == 11:
            engine.abort(ids[4])
            engine.abort("nobody")
        finished = [event.output for event in engine.step() if isinstance(event, Finished)]
        outputs |= {output.request_id: output for output in finished}
        engine.check_integrity()
        assert step != 6 or ids[0] in outputs
        assert step != 11 or ids[4] in outputs
        if not engine.has_work:
            break
    for index, request_id in enumerate(ids):
        if index in (0, 4):
            cut = outputs[request_id]
            assert cut.finish_reason is FinishReason.ABORT
            whole = alone[PLAIN.name, index].commits
            assert 0 < len(cut.commits) < len(whole)
            assert [c.token_id for c in cut.commits] == [c.token_id for c in whole[: len(cut.commits)]]
        else:
            assert_same(outputs[request_id], alone[PLAIN.name, index])


def test_a_waiting_request_can_be_aborted(make_engine):
    engine = make_engine(PLAIN, max_lanes=1)
    first, second = (engine.add_request(asked) for asked in requests()[:2])
    engine.step()
    engine.abort(second)
    (event,) = [event for event in engine.step() if event.request_id == second]
    assert (event.output.finish_reason, event.output.commits) == (FinishReason.ABORT, ())
    engine.abort(first)
    engine.step()
    assert not engine.has_work


def test_the_same_seed_gives_the_same_and_another_gives_another(make_engine):
    def sampled(**values):
        sampling = SamplingParams(temperature=1.2, repetition_penalty=1.0, ignore_eos=True, **values)
        return GenerateRequest(prompt_token_ids=PLAIN.plain_ids(9), max_tokens=30, sampling=sampling)

    asked = [sampled(seed=1), sampled(seed=1), sampled(seed=2), sampled(seed=1, choice_index=1), sampled(), sampled()]
    engine = make_engine(PLAIN)
    outputs = engine.generate(asked)
    assert outputs[0].token_ids == outputs[1].token_ids
    assert len({output.token_ids for output in outputs[1:]}) == 5
    assert outputs[4].seed != outputs[5].seed
    (again,) = engine.generate([sampled(seed=outputs[4].seed)])
    assert again.token_ids == outputs[4].token_ids


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("preempt"), st.integers(0, 20)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
    ),
    min_size=3,
    max_size=25,
)


@given(ACTIONS, st.sampled_from([8, 11, 40]), st.sampled_from([2, 3, 7]), st.booleans(), st.booleans())
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_under_any_mix_of_arrivals_aborts_and_preemptions_pages_add_up_and_results_hold(
    checkpoint, alone, actions, num_pages, max_rows, share_prefixes, is_async
):
    config = EngineConfig(
        device="cpu",
        num_pages=num_pages,
        max_rows=max_rows,
        share_prefixes=share_prefixes,
        async_scheduling=is_async,
    )
    engine = Engine.from_checkpoint(checkpoint(PLAIN), config)
    asked = requests()
    ids, aborted, outputs = [], set(), {}

    def step():
        for event in engine.step():
            if isinstance(event, Finished):
                outputs[event.request_id] = event.output
        engine.check_integrity()

    for action, number in actions:
        if action == "add":
            ids.append((engine.add_request(asked[number]), number))
        elif action == "step":
            for _ in range(number):
                step()
        elif ids:
            request_id, _ = ids[number % len(ids)]
            if action == "preempt":
                engine.preempt(request_id)
            else:
                engine.abort(request_id)
                aborted.add(request_id)
    for _ in range(5000):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work, "every request ends"
    assert engine.stats().pages_held == 0
    for request_id, index in ids:
        if request_id not in aborted:
            assert_same(outputs[request_id], alone[PLAIN.name, index])
