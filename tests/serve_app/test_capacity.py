"""What fits on a GPU that is not here, and what it serves."""

import pytest
import yaml

from engine import Engine, EngineConfig, InvalidConfig, ModelConfig, plan_memory
from engine.runner.memory import MemoryPlan
from serve_app.capacity import Workload, capacity, main, replica_requests_per_s
from serve_app.config import BUILDER, DEMO_CHECKPOINT
from serve_app.routing.pass_times import PassTimes
from tests.checkpoints import EOT

GIB = 2**30


@pytest.fixture(scope="module")
def model():
    return ModelConfig.from_json(DEMO_CHECKPOINT)


def plan(num_pages: int) -> MemoryPlan:
    return MemoryPlan(
        weights=GIB, lanes=1, num_lanes=8, concepts_per_lane=1, page=1, num_pages=num_pages, num_spare_pages=1,
        pass_reserve=1, replay_reserve=1, graphs=0, total=2 * GIB,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"max_lanes": 3}, {"draft_row_limit": 0}, {"max_rows": 2}], ids=str)
def test_the_plan_is_what_an_engine_counts_once_it_is_there(tmp_path, settings):
    folder = EOT.write(tmp_path / "model")
    config = EngineConfig(device="cpu", dtype="float32", num_pages=20, **settings)
    real = Engine.from_checkpoint(folder, config).runner.memory
    planned = plan_memory(ModelConfig.from_json(folder), config, total=GIB)
    for name in (
        "weights",
        "lanes",
        "concepts_per_lane",
        "page",
        "num_pages",
        "num_spare_pages",
        "pass_reserve",
        "replay_reserve",
    ):
        assert getattr(planned, name) == getattr(real, name), name


def test_pages_fill_what_the_rest_leaves(model):
    config = EngineConfig(dtype="bfloat16")
    planned = plan_memory(model, config, total=20 * GIB)
    used = planned.weights + planned.lanes + planned.page * (planned.num_pages + planned.num_spare_pages)
    most = min(int(0.9 * 20 * GIB), 20 * GIB - planned.pass_reserve - planned.replay_reserve)
    assert most - planned.page < used <= most


def test_a_gpu_without_room_for_one_context_is_refused(model):
    with pytest.raises(InvalidConfig, match="one sequence of full context needs"):
        plan_memory(model, EngineConfig(dtype="bfloat16"), total=GIB // 8)


@pytest.mark.parametrize(
    ("num_pages", "settings", "num_running", "limit"),
    [(1000, {"max_rows": 8}, 8, "lanes"), (1000, {"max_rows": 8, "max_lanes": 12}, 8, "rows"), (15, {}, 3, "pages")],
)
def test_the_scarcest_thing_limits_how_many_run(model, num_pages, settings, num_running, limit):
    found = capacity(
        model, EngineConfig(**settings), plan(num_pages), Workload(num_prompt_tokens=100, num_new_tokens=156)
    )
    assert (found.pages_per_request, found.num_running, found.limit) == (4, num_running, limit)


def test_rows_are_prefill_denoising_steps_and_seals(model):
    # 130 prompt tokens: two blocks to prefill. 190 new ones end in block 4: blocks 2 and 3 are sealed.
    workload = Workload(num_prompt_tokens=130, num_new_tokens=190, tokens_per_step=2)
    assert capacity(model, EngineConfig(), plan(100), workload).rows_per_request == 2 + 95 + 2


def test_a_request_beyond_the_context_is_refused(model):
    workload = Workload(num_prompt_tokens=model.block_size, num_new_tokens=1)
    with pytest.raises(ValueError, match=f"context of {model.block_size}"):
        capacity(model, EngineConfig(), plan(100), workload)


def test_a_full_replica_serves_its_rows_over_the_time_of_its_passes(model):
    found = capacity(
        model, EngineConfig(max_rows=4), plan(100), Workload(num_prompt_tokens=0, num_new_tokens=64, tokens_per_step=1)
    )
    assert replica_requests_per_s(PassTimes(((4, 0.01),)), found) == pytest.approx(4 / (64 * 0.01))


def test_the_command_prints_memory_requests_and_replicas(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    args = {"engine": {"max_rows": 4, "dtype": "bfloat16"}}
    file.write_text(yaml.safe_dump({"applications": [{"import_path": BUILDER, "args": args}]}))
    command = [str(file), "--gpu-gib", "16", "--prompt-tokens", "64", "--new-tokens", "64"]
    assert main([*command, "--pass-ms", "1:5,4:8", "--requests-per-s", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("weights") and lines[5].startswith("unused")
    # 65 rows a request, four at once in 8 ms: 7.69 a second, of which 80 % are used.
    assert lines[-2].split() == ["492", "tokens/s,", "7.69", "requests/s", "when", "full,", "8.0", "ms", "a", "pass"]
    assert lines[-1].split() == ["app", "5", "replicas", "for", "30", "requests/s", "at", "80%", "load"]


def test_a_file_without_our_application_is_refused(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text("applications: []\n")
    assert main([str(file), "--gpu-gib", "16"]) == 2
    assert BUILDER in capsys.readouterr().err
