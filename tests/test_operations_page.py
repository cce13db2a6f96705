"""docs/operations.md against what it speaks of: alerts, metrics, settings, commands, panels, files and links."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, LoggingConfig, ServeDeploySchema

from deploy.grafana.build import DASHBOARDS, alert_rules, metrics_in
from engine import EngineConfig
from serve_app.config import AppConfig, LiveEngineServerSettings
from serve_app.deploy_check import check
from serve_app.error_codes import ERROR_CODES
from serve_app.lease_messages import RefusalReason
from serve_app.metrics_table import METRICS
from serve_app.routing.messages import RejectionReason
from serve_app.routing.policy import RoutingSettings
from serve_app.schemas import CompletionRequest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operations.md"
TEXT = PAGE.read_text(encoding="utf-8")


def blocks(language: str, marker: str = "") -> list[str]:
    """Fenced blocks of a language; with a marker those that follow `<!-- marker -->`."""
    before = rf"<!-- {re.escape(marker)} -->\n" if marker else ""
    return re.findall(rf"{before}```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(file: Path) -> set[str]:
    """Of each heading, as GitHub makes it."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(file.read_text(encoding="utf-8")), flags=re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


def links() -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", without_blocks(TEXT))


def fields_of(model: type[BaseModel]) -> Iterator[str]:
    """Names of all fields, those of models within included."""
    for name, info in model.model_fields.items():
        yield name
        for kind in [info.annotation, *getattr(info.annotation, "__args__", ())]:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields_of(kind)


def settings() -> set[str]:
    kinds: Iterable[Any] = (EngineConfig, RoutingSettings)
    ours = {field.name for kind in kinds for field in dataclasses.fields(kind)} | set(fields_of(AppConfig))
    serves = {
        name
        for model in (ServeDeploySchema, DeploymentSchema, LoggingConfig, AutoscalingConfig)
        for name in fields_of(model)
    }
    return ours | serves


def words_in_code() -> set[str]:
    """Words with an underscore that stand between backticks in running text. Paths are not looked at."""
    spans = re.findall(r"`([^`\n]+)`", without_blocks(TEXT))
    return {
        word
        for span in spans
        if not span.startswith("/")
        for word in re.findall(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b", span)
    }


def test_every_alert_has_a_heading_where_its_runbook_url_leads():
    rules = alert_rules()
    headings = set(re.findall(r"^### (Glassblock\w+)$", TEXT, flags=re.MULTILINE))
    assert headings == {rule["alert"] for rule in rules}
    for rule in rules:
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / file == PAGE
        assert anchor in anchors(PAGE), rule["alert"]


def sections_of_alerts() -> list[tuple[str, str]]:
    return re.findall(r"^### (Glassblock\w+)\n(.*?)(?=^##)", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "section"), sections_of_alerts(), ids=lambda value: value.split("\n")[0])
def test_each_alert_says_what_it_means_how_to_confirm_it_what_to_do_and_when_to_ignore_it(name, section):
    for part in ("Means", "Confirm", "Do", "Ignore"):
        assert section.count(f"**{part}**") == 1, f"{name}: {part}"
    assert "```promql" in section, name


def test_every_query_asks_for_metrics_that_exist():
    queries = blocks("promql")
    assert len(queries) == len(alert_rules())
    for query in queries:
        # Raises for a name that the table does not have.
        assert metrics_in(query) or "up{" in query


def test_every_query_is_one_that_prometheus_reads(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    rules = [{"record": f"page:query{number}", "expr": query} for number, query in enumerate(blocks("promql"))]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def known_names() -> set[str]:
    codes = set(ERROR_CODES)
    reasons = {reason.value for kind in (RefusalReason, RejectionReason) for reason in kind}
    files = {
        path.stem for folder in ("serve_app", "engine", "load_tests", "tests") for path in (ROOT / folder).rglob("*.py")
    }
    packages = {"serve_app", "load_tests"}
    requests = set(CompletionRequest.model_fields)
    return set(METRICS) | settings() | codes | reasons | files | packages | requests


def test_every_name_in_code_is_a_metric_a_setting_or_a_code():
    unknown = words_in_code() - known_names() - span_words()
    assert not unknown, f"docs/operations.md names what does not exist: {sorted(unknown)}"


def span_words() -> set[str]:
    """Names that spans and log lines use, read where they are made."""
    files = (ROOT / "serve_app" / name for name in ("tracing.py", "engine_spans.py"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', source))


@pytest.mark.parametrize("link", sorted(set(links())))
def test_every_link_leads_somewhere(link):
    if link.startswith("http"):
        return
    file, _, anchor = link.partition("#")
    target = (PAGE.parent / file).resolve() if file else PAGE
    assert target.exists(), link
    if anchor:
        assert anchor in anchors(target), link


def test_every_panel_that_is_named_is_on_its_dashboard():
    rows = re.findall(r"^\| ([A-Z][\w ]+) \| [^|]*\?? \| ([^|]+) \|$", TEXT, flags=re.MULTILINE)
    titles = {d.title.removeprefix("Glassblock / "): {p.title for p in d.panels} for d in DASHBOARDS}
    seen = {name for name, _ in rows if name in titles}
    assert seen == set(titles), "each dashboard has a row"
    for name, cell in rows:
        if name in titles:
            for part in cell.split(";"):
                # Titles, with commas between them and in some; what they tell comes after a colon.
                left = part.partition(":")[0]
                for title in sorted(titles[name], key=len, reverse=True):
                    left = left.replace(title, "")
                assert not left.strip(" ,"), f"{name}: {left} is no panel"
    named = [found for found in re.findall(r"\*\*([A-Z][\w ]+): ([^*]+?)\.?\*\*", TEXT) if found[0] in titles]
    assert named
    for name, panels in named:
        assert set(panels.split(", ")) <= titles[name], f"{name}: {panels}"


def test_every_command_is_one_that_a_shell_reads():
    commands = blocks("sh")
    assert len(commands) > 5
    for command in commands:
        done = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_every_module_that_is_run_exists():
    names = set(re.findall(r"python -m ([\w.]+)", TEXT))
    assert names >= {"serve_app.run", "serve_app.deploy_check", "serve_app.capacity"}
    for name in names - {"pytest"}:
        assert (ROOT / (name.replace(".", "/") + ".py")).is_file(), name


def test_deploy_files_that_are_shown_have_no_fault():
    files = blocks("yaml", "deploy file")
    assert files
    for text in files:
        content = yaml.safe_load(text)
        assert not check(content)
        live = {override["name"]: override["user_config"] for override in content["applications"][0]["deployments"]}
        assert live["EngineServer"].keys() == LiveEngineServerSettings.model_fields.keys()
        LiveEngineServerSettings.model_validate(live["EngineServer"])
        RoutingSettings(**live["BlockRouter"])


def test_parts_of_deploy_files_that_are_shown_have_no_fault():
    parts = blocks("yaml", "deploy file part")
    assert parts
    for text in parts:
        assert not check({"applications": [], **yaml.safe_load(text)})


def test_other_settings_that_are_shown_are_settings():
    shown = [text for text in blocks("yaml") if text.startswith("args:")]
    assert shown
    for text in shown:
        AppConfig.model_validate(yaml.safe_load(text)["args"])
