"""How a text ends: end tokens, stop tokens, min_tokens, exact lengths, and what no longer costs a pass."""

import pytest

from engine import BlockFinished, Committed, Engine, EngineConfig, FinishReason, GenerateRequest, SamplingParams
from tests.checkpoints import EOT
from tests.parity import compare_output
from tests.parity_cases import uniform
from tests.reference import generate

BLOCK = EOT.block
END = EOT.special_ids["eot_id"]


def request(num_prompt=BLOCK + 3, max_tokens=40, seed=0, **sampling):
    values = {"temperature": 0.0, "repetition_penalty": 1.0, **sampling}
    return GenerateRequest(
        prompt_token_ids=EOT.plain_ids(num_prompt, seed), max_tokens=max_tokens, sampling=SamplingParams(**values)
    )


def ending_requests():
    """Ends at many places: a bias makes the end token likely here and there, more or less."""
    return [
        request(num_prompt, seed=num_prompt, tokens_per_step=k, logit_bias={END: bias}, repetition_penalty=penalty)
        for num_prompt in (0, 5, BLOCK, BLOCK + 7)
        for k, bias, penalty in ((1, 2.5, 1.0), (1, 4.0, 1.3), (3, 3.0, 1.0), (5, 6.0, 1.2), (16, 3.0, 1.0))
    ]


@pytest.fixture(scope="module")
def ended(checkpoint):
    engine = Engine.from_checkpoint(checkpoint(EOT), EngineConfig(device="cpu", num_pages=128, max_rows=16))
    requests = ending_requests()
    return list(zip(requests, engine.generate(requests), strict=True))


def test_every_ending_equals_the_plain_reference(ended, oracle):
    for asked, output in ended:
        compare_output(output, generate(oracle(EOT), asked, uniform))


def test_the_requests_end_in_all_the_ways_there_are(ended):
    """Guards the test above: without these it would compare too little."""
    stopped = [(r, o) for r, o in ended if o.finish_reason is FinishReason.STOP]
    assert len(stopped) > len(ended) // 2
    positions = [[c.position for c in o.commits if c.token_id == END] for _, o in stopped]
    assert any(len(found) > 1 for found in positions), "some end token was found left of an earlier one"
    ends = [len(r.prompt_token_ids) + len(o.token_ids) for r, o in stopped]
    assert len({end % BLOCK for end in ends}) > 4
    assert any(max(c.position for c in o.commits) > end for (_, o), end in zip(stopped, ends, strict=True))
    assert any(o.commits[-1].token_id != END for _, o in stopped), "positions left of an end were filled after it"


def test_a_text_holds_no_end_token_and_every_position_before_it(ended):
    for asked, output in ended:
        start, length = len(asked.prompt_token_ids), len(output.token_ids)
        token_at = {c.position: c.token_id for c in output.commits}
        assert output.token_ids == tuple(token_at[p] for p in range(start, start + length))
        assert END not in output.token_ids
        if output.finish_reason is FinishReason.STOP:
            assert token_at[start + length] == END
        else:
            assert length == asked.max_tokens


def test_no_position_is_committed_twice_and_none_past_a_known_end(ended):
    for _, output in ended:
        positions = [c.position for c in output.commits]
        assert len(positions) == len(set(positions))
        end = None
        for step in range(output.num_denoising_steps):
            now = [c for c in output.commits if c.denoising_step == step]
            assert now, "a denoising step commits something"
            assert end is None or all(c.position < end for c in now)
            ends = [c.position for c in now if c.token_id == END]
            end = min([p for p in [end, *ends] if p is not None], default=None)


def test_once_everything_left_of_the_end_is_filled_no_pass_is_spent(ended):
    """Masks right of a decided end were once denoised one by one."""
    for _, output in ended:
        assert output.num_denoising_steps == len({c.denoising_step for c in output.commits})
        # Prefill rides along, and a finished block seals beside the next one's first pass.
        assert output.num_forward_passes == output.num_denoising_steps


def test_a_text_may_end_at_its_very_first_token(make_engine):
    (output,) = make_engine(EOT).generate([request(BLOCK, logit_bias={END: 80.0})])
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.STOP)
    assert (output.num_denoising_steps, output.num_blocks, len(output.commits)) == (1, 1, 1)


@pytest.mark.parametrize("max_tokens", [1, 5, BLOCK - 3, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("num_prompt", [0, 3, BLOCK])
def test_max_tokens_is_exact_and_nothing_past_it_exists(make_engine, oracle, num_prompt, max_tokens):
    """A partial last block was once denoised past the maximum length."""
    asked = request(num_prompt, max_tokens, ignore_eos=True)
    (output,) = make_engine(EOT).generate([asked])
    assert sorted(c.position for c in output.commits) == list(range(num_prompt, num_prompt + max_tokens))
    assert (len(output.token_ids), output.finish_reason) == (max_tokens, FinishReason.LENGTH)
    assert output.num_denoising_steps == max_tokens
    compare_output(output, generate(oracle(EOT), asked))


def test_stop_token_ids_end_the_text_and_are_no_part_of_it(make_engine, oracle):
    engine = make_engine(EOT)
    (free,) = engine.generate([request()])
    stop = free.token_ids[12]
    asked = request(stop_token_ids=(stop,))
    (output,) = engine.generate([asked])
    assert output.finish_reason is FinishReason.STOP
    assert stop not in output.token_ids
    compare_output(output, generate(oracle(EOT), asked))


def test_ignore_eos_makes_the_end_token_an_ordinary_one(make_engine, oracle):
    asked = request(logit_bias={END: 6.0}, ignore_eos=True)
    (output,) = make_engine(EOT).generate([asked])
    assert END in output.token_ids
    assert (len(output.token_ids), output.finish_reason) == (40, FinishReason.LENGTH)
    compare_output(output, generate(oracle(EOT), asked))


@pytest.mark.parametrize("min_tokens", [1, 7, BLOCK + 2, 40])
def test_min_tokens_bans_ends_at_the_first_positions(make_engine, oracle, min_tokens):
    asked = request(logit_bias={END: 50.0}, min_tokens=min_tokens)
    (output,) = make_engine(EOT).generate([asked])
    assert len(output.token_ids) >= min_tokens
    assert not any(c.token_id == END for c in output.commits if c.position < BLOCK + 3 + min_tokens)
    compare_output(output, generate(oracle(EOT), asked))


def test_end_of_text_mask_and_pad_are_never_chosen(make_engine):
    """Positions that predict only the mask token once kept a request running for ever."""
    banned = [EOT.special_ids[name] for name in ("eos_token_id", "mask_token_id", "pad_token_id")]
    asked = [
        request(seed=s, logit_bias=dict.fromkeys(banned, 100.0), temperature=t, ignore_eos=True)
        for s, t in ((1, 0.0), (2, 1.5))
    ]
    for output in make_engine(EOT).generate(asked):
        assert not set(banned) & {c.token_id for c in output.commits}
        assert len(output.token_ids) == 40


def test_a_stop_token_that_is_banned_ends_nothing(make_engine, oracle):
    asked = request(stop_token_ids=(EOT.special_ids["eos_token_id"],), ignore_eos=True)
    (output,) = make_engine(EOT).generate([asked])
    assert output.finish_reason is FinishReason.LENGTH
    compare_output(output, generate(oracle(EOT), asked))


def test_events_tell_the_same_as_the_output(make_engine, ended):
    """A client that only follows events must arrive at the returned text."""
    engine = make_engine(EOT)
    for asked, _ in ended[:8]:
        engine.add_request(asked)
    of = {}
    while engine.has_work:
        for event in engine.step():
            of.setdefault(event.request_id, []).append(event)
    for events in of.values():
        output = events[-1].output
        commits = [c for event in events if isinstance(event, Committed) for c in event.commits]
        assert tuple(commits) == output.commits
        text = {c.position: c.token_id for c in commits}
        finished = [event for event in events if isinstance(event, BlockFinished)]
        positions = [p for event in finished for p in range(event.start, event.end)]
        assert tuple(text[p] for p in positions) == output.token_ids
        assert output.num_blocks == len(finished)
