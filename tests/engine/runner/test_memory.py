"""The memory plan that is shown at start, and the profiler trace."""

import json
import os
from types import SimpleNamespace

import pytest

from engine import EngineConfig, GenerateRequest, InvalidConfig, SamplingParams
from engine.runner import device
from engine.runner.kv_cache import page_bytes
from engine.runner.memory import MemoryPlan, tensor_bytes
from tests.checkpoints import EOT


def test_the_plan_counts_every_tensor_of_the_engine(make_engine):
    engine = make_engine(EOT, num_pages=20, max_lanes=3)
    memory, runner = engine.runner.memory, engine.runner
    weights = [*runner.model.parameters(), *runner.model.buffers()]
    assert memory.weights == sum(tensor.nbytes for tensor in weights)
    num_pages = runner.cache.k_LPCGE.shape[1]
    assert num_pages == memory.num_pages + memory.num_spare_pages
    assert num_pages == 20 + 1 + 2, "one page is scratch, and drafts write pages of their own"
    assert memory.page * num_pages == runner.cache.k_LPCGE.nbytes + runner.cache.v_LPCGE.nbytes
    assert (memory.num_pages, memory.page) == (20, page_bytes(runner.config, runner.dtype))
    assert 0 < memory.concepts_per_lane < memory.lanes / 4
    assert (memory.graphs, memory.total) == (0, None)
    assert engine.memory_table() == memory.table()


def test_shared_tensors_are_counted_once(make_engine):
    weight = make_engine(EOT).runner.model.transformer.lm_head.weight
    assert tensor_bytes([weight, weight]) == weight.nbytes


def test_the_table_names_every_purpose_and_what_is_left():
    gib = 2**30
    plan = MemoryPlan(
        weights=16 * gib,
        lanes=2 * gib,
        num_lanes=32,
        concepts_per_lane=2**20,
        page=2**23,
        num_pages=1020,
        num_spare_pages=4,
        pass_reserve=3 * gib,
        replay_reserve=gib,
        graphs=gib,
        total=40 * gib,
    )
    lines = plan.table().splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["weights", "16.00"],
        ["lanes", "2.00"],
        ["pages", "8.00"],
        ["passes", "3.00"],
        ["traces", "1.00"],
        ["unused", "10.00"],
    ]
    assert "1020 pages of 8.00 MiB" in lines[2] and "of 40.00 GiB" in lines[5]


def test_lanes_and_pages_that_no_memory_holds_are_an_error_that_says_what_to_lower(make_engine):
    with pytest.raises(InvalidConfig, match=r"65536 lanes, 2147483648 pages .* lower max_lanes"):
        make_engine(EOT, max_lanes=2**16, num_pages=2**31)


def test_a_trace_of_some_steps_is_written_and_changes_no_result(make_engine, tmp_path):
    assert EngineConfig().profile_dir is None
    asked = GenerateRequest(prompt_token_ids=[3, 4], max_tokens=12, sampling=SamplingParams(seed=1))
    engine = make_engine(EOT, profile_dir=str(tmp_path / "traces"), profile_steps=3, profile_after=2)
    (traced,) = engine.generate([asked])
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name == f"steps-2-4-{os.getpid()}.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"engine step 2", "engine step 3", "engine step 4"} <= names and "engine step 5" not in names
    (plain,) = make_engine(EOT).generate([asked])
    assert plain.commits == traced.commits


@pytest.mark.parametrize(("directory", "expected"), [("/somewhere", "/somewhere"), (None, "as it was")])
def test_compiled_kernels_are_kept_where_the_option_says(monkeypatch, directory, expected):
    cache = SimpleNamespace(dir="as it was")
    monkeypatch.setattr(device, "HAS_TRITON", True)
    monkeypatch.setattr(device, "triton", SimpleNamespace(knobs=SimpleNamespace(cache=cache)), raising=False)
    device.keep_compiled_kernels(directory)
    assert cache.dir == expected
