"""Who may import whom, held by reading every import statement of the product.

A unit is a module or a folder directly under a package; a folder counts as one. A unit imports only
units of a lower level. Imports inside functions count: they would only hide the cycle.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LEVEL = {
    "engine": {
        "checks": 0,
        "errors": 0,
        "limits": 0,
        "output": 0,
        "config": 1,
        "metrics": 1,
        "request": 1,
        "admission": 2,
        "scheduling": 2,
        "model": 2,
        "trace": 2,
        "analysis": 3,
        "decoding": 3,
        "lifecycle": 3,
        "load": 3,
        "runner": 4,
        "analyzing": 5,
        "outbox": 5,
        "core": 6,
        "async_engine": 7,
        "__init__": 8,
    },
    "serve_app": {
        "__init__": 0,
        "autoscaling": 0,
        "client_key": 0,
        "error_codes": 0,
        "errors": 0,
        "metrics_table": 0,
        "playground_api": 0,
        "routing": 0,
        "strict_keys": 0,
        "tokenizer": 0,
        "chat_template": 1,
        "concepts": 1,
        "config": 1,
        "lease_messages": 1,
        "middleware": 1,
        "presets": 1,
        "prometheus_text": 1,
        "schemas": 1,
        "span_files": 1,
        "telemetry": 1,
        "text_assembly": 1,
        "api_keys": 2,
        "attribution": 2,
        "lease_desk": 2,
        "replica_calls": 2,
        "replica_choice": 2,
        "router_notes": 2,
        "streaming": 2,
        "tracing": 2,
        "translation": 2,
        "block_router": 3,
        "capabilities": 3,
        "checkpoint": 3,
        "disconnect": 3,
        "engine_spans": 3,
        "preset_steering": 3,
        "rendering": 3,
        "replica_reports": 3,
        "completions": 4,
        "analyses": 5,
        "router_client": 5,
        "service": 5,
        "concepts_api": 6,
        "embeddings_api": 6,
        "engine_server": 6,
        "generate_api": 6,
        "input_attribution_api": 6,
        "likelihoods_api": 6,
        "models_api": 6,
        "operations_api": 6,
        "presets_api": 6,
        "tokenizer_api": 6,
        "api": 7,
        "ingress": 8,
        "local": 8,
        "app": 9,
        "capacity": 10,
        "cli": 10,
        "deploy_check": 10,
        "run": 11,
    },
}

STANDARD_LIBRARY = sys.stdlib_module_names

MODULE_OF = {"PyYAML": "yaml", "opentelemetry-api": "opentelemetry", "opentelemetry-sdk": "opentelemetry"}
"""Distributions whose module has another name."""
COMES_ALONG = {"fastapi", "starlette", "uvicorn", "pydantic_core", "triton"}
"""Brought by ray[serve], by pydantic, and by the CUDA builds of torch."""

# What the engine stands on besides the standard library. Text, HTTP, Ray and data frames are not its business.
ENGINE_LIBRARIES = {"safetensors", "torch", "triton"}


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and the line that names it."""

    module: str
    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def unit_of(package: str, file: Path) -> str:
    """The module or folder directly under the package that holds the file."""
    return file.relative_to(ROOT / package).parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[Import]:
    """Every import of a file, those inside functions included, relative ones made absolute."""
    parents = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, file, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                # `from . import x` names a unit; `from .x import y` names something in one.
                yield Import(f"{module}.{alias.name}", file, node.lineno)


def import_edges(package: str) -> set[tuple[str, str]]:
    """Pairs (unit, unit it imports) within a package."""
    edges = set()
    units = {unit_of(package, file) for file in source_files(package)}
    for file in source_files(package):
        for found in imports_of(file):
            parts = found.module.split(".")
            if parts[0] == package:
                target = parts[1] if len(parts) > 1 and parts[1] in units else "__init__"
                edges.add((unit_of(package, file), target))
    return {(a, b) for a, b in edges if a != b}


def foreign_imports(package: str) -> list[Import]:
    return [i for file in source_files(package) for i in imports_of(file) if i.module.split(".")[0] != package]


@pytest.mark.parametrize("package", LEVEL)
def test_every_unit_has_a_level_and_every_level_a_unit(package):
    units = {unit_of(package, file) for file in source_files(package)}
    assert units == set(LEVEL[package])


@pytest.mark.parametrize("package", LEVEL)
def test_imports_point_down(package):
    level = LEVEL[package]
    upward = {f"{a} -> {b}" for a, b in import_edges(package) if level[b] >= level[a]}
    assert not upward, f"a lower layer of {package} imports a higher or equal one: {sorted(upward)}"


@pytest.mark.parametrize(("column", "package"), list(enumerate(LEVEL)))
def test_the_page_shows_each_unit_at_its_level(column, package):
    _, table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## The layers of the code")
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", table, flags=re.MULTILINE)
    shown = {unit: int(level) for level, cells in rows for unit in re.findall(r"`(\w+)`", cells.split("|")[column])}
    assert shown == {unit: level for unit, level in LEVEL[package].items() if unit != "__init__"}


def test_the_engine_knows_no_text_no_http_and_no_ray():
    allowed = ENGINE_LIBRARIES | STANDARD_LIBRARY
    strangers = [str(i) for i in foreign_imports("engine") if i.module.split(".")[0] not in allowed]
    assert not strangers


def test_scheduling_is_standard_library_only():
    found = [i for i in foreign_imports("engine") if unit_of("engine", i.file) == "scheduling"]
    strangers = [str(i) for i in found if i.module.split(".")[0] not in STANDARD_LIBRARY]
    assert not strangers


def test_serve_app_imports_only_the_top_level_of_the_engine():
    names = set(importlib.import_module("engine").__all__)
    deep = [
        str(i)
        for i in foreign_imports("serve_app")
        if i.module.split(".")[0] == "engine" and (i.module.count(".") != 1 or i.module.split(".")[1] not in names)
    ]
    assert not deep


@pytest.mark.parametrize("package", LEVEL)
def test_the_product_never_imports_the_reference_package(package):
    assert not [str(i) for i in foreign_imports(package) if i.module.split(".")[0] == "steerling"]


def test_the_module_that_holds_the_builder_keeps_its_annotations_as_objects():
    """Ray decides by the annotation object whether to validate a builder's argument: a string is skipped silently."""
    source = (ROOT / "serve_app" / "app.py").read_text(encoding="utf-8")
    futures = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    assert not futures


def test_the_public_surface_of_the_engine_is_what_all_says():
    engine = importlib.import_module("engine")
    defined = {
        name
        for name, value in vars(engine).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("engine.")
    }
    # A union of classes and a choice of strings have no module of their own.
    nameless = {"Analysis", "AnalysisResult", "EmbeddingKind", "Event", "Head", "Policy", "Pooling"}
    assert set(engine.__all__) == defined | nameless | {"limits"}
    assert len(engine.__all__) == len(set(engine.__all__))


def test_every_exception_of_the_engine_is_public():
    engine = importlib.import_module("engine")
    errors = importlib.import_module("engine.errors")
    raised = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.EngineError)}
    assert raised <= set(engine.__all__)


def test_what_the_product_imports_is_declared_and_what_is_declared_is_imported():
    declared = set()
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name = re.split(r"[\[<>=~! ]", requirement)[0]
        declared.add(MODULE_OF.get(name, name.replace("-", "_")))
    roots = {i.module.split(".")[0] for package in LEVEL for i in foreign_imports(package)}
    imported = roots - STANDARD_LIBRARY - set(LEVEL)
    assert imported - declared - COMES_ALONG == set()
    assert declared - imported == set()


@pytest.mark.parametrize("package", LEVEL)
def test_source_is_ascii(package):
    foreign = [str(f.relative_to(ROOT)) for f in source_files(package) if not f.read_text(encoding="utf-8").isascii()]
    assert not foreign
