"""Alert rules and dashboards: they parse, they fire, and every metric they name exists."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from gateway_harness import COMPLETION, gateway, settings_for
from mock_engine import MockEngine

HOME = Path(__file__).parents[2] / "docker" / "observability"
RULES = sorted((HOME / "prometheus" / "rules").glob("*.rules.yml"))
TESTS = sorted((HOME / "prometheus" / "tests").glob("*.test.yml"))
DASHBOARDS = sorted((HOME / "grafana" / "dashboards").glob("*.json"))
NAME = re.compile(r"\b(?:taut|vllm)[_:][a-zA-Z0-9_:]+")
SELECTOR = re.compile(r"\b((?:taut|vllm)[_:][a-zA-Z0-9_:]+)\{([^{}]*)\}")
LABEL = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
OF_SCRAPE = {"instance", "job", "le"}
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None,
    reason="NO promtool HERE: alert rules are NOT tested; apt-get install prometheus",
)


def rules() -> list[dict[str, Any]]:
    documents = [yaml.safe_load(path.read_text()) for path in RULES]
    return [
        rule for document in documents for group in document["groups"] for rule in group["rules"]
    ]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def panels() -> list[dict[str, Any]]:
    documents = [json.loads(path.read_text()) for path in DASHBOARDS]
    return [panel for document in documents for panel in document["panels"]]


def dashboard_expressions() -> list[str]:
    expressions = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    for path in DASHBOARDS:
        document = json.loads(path.read_text())
        expressions += [entry["expr"] for entry in document["annotations"]["list"]]
    return expressions


def in_prometheus_words(expression: str) -> str:
    """Replace what Grafana fills in."""
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*")


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    command = [PROMTOOL, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@needs_promtool
def test_configuration_and_rules_are_valid() -> None:
    assert RULES
    configuration = promtool("check", "config", HOME / "prometheus" / "prometheus.yml")
    assert configuration.returncode == 0, configuration.stdout + configuration.stderr
    # --lint-fatal: a duplicate rule is an error too.
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_alerts_fire_and_stay_silent(path: Path) -> None:
    result = promtool("test", "rules", path)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_promtool_would_notice_a_wrong_rule(tmp_path: Path) -> None:
    for folder in ("rules", "tests"):
        shutil.copytree(HOME / "prometheus" / folder, tmp_path / folder)
    worker = tmp_path / "rules" / "worker.rules.yml"
    worker.write_text(worker.read_text().replace("> 0.95", "> 0.99"))
    assert promtool("test", "rules", tmp_path / "tests" / "worker.test.yml").returncode != 0


@needs_promtool
def test_dashboard_expressions_parse(tmp_path: Path) -> None:
    found = [
        {"record": f"x:{i}", "expr": in_prometheus_words(expression)}
        for i, expression in enumerate(dashboard_expressions())
    ]
    assert len(found) > 30
    file = tmp_path / "expressions.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": found}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
async def test_the_scrape_is_clean() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        await harness.post(COMPLETION)
        text = (await harness.request("GET", "/metrics")).body
    assert PROMTOOL is not None
    process = await asyncio.create_subprocess_exec(
        *(PROMTOOL, "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, stderr = await process.communicate(text)
    assert (process.returncode, stderr.decode()) == (0, "")


def test_every_alert_has_a_test_that_fires_and_one_that_does_not() -> None:
    kinds: dict[str, set[str]] = {name: set() for name in alerts()}
    for path in TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            name, kind = case["name"].split(" ")[:2]
            expected = [
                sample["labels"]
                for check in case["promql_expr_test"]
                for sample in check["exp_samples"]
            ]
            fires = any(f'"{name}"' in labels for labels in expected)
            assert kind in ("fires", "stays"), case["name"]
            assert fires == (kind == "fires"), case["name"]
            kinds[name].add(kind)
    missing = {name: found for name, found in kinds.items() if found != {"fires", "stays"}}
    assert missing == {}


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name
        assert rule["annotations"]["summary"], name
        assert rule["annotations"]["action"], name


def vllm_names() -> dict[str, str]:
    lines = (HOME / "vllm-metrics.txt").read_text().splitlines()
    entries = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: kind for kind, name, *_ in entries}


def samples_of(kind: str, name: str) -> set[str]:
    if kind == "histogram":
        return {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    if kind == "counter" and not name.endswith("_total"):
        return {f"{name}_total"}
    return {name}


async def live_metrics() -> tuple[set[str], dict[str, set[str]]]:
    """Return sample names, and the labels of those that have samples, of a running gateway."""
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        await harness.post({**COMPLETION, "stream": True})
        text = (await harness.request("GET", "/metrics")).body.decode()
    names: set[str] = set()
    labels: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            names |= samples_of(kind, name)
        elif not line.startswith("#"):
            name, _, rest = line.partition("{")
            found = labels.setdefault(name.split(" ")[0], set())
            if rest:
                found |= {label for label, _ in LABEL.findall(rest.rsplit("}", 1)[0])}
    return names, labels


def expressions_used() -> list[str]:
    return [*(rule["expr"] for rule in rules()), *dashboard_expressions()]


async def test_every_metric_named_exists() -> None:
    live, _ = await live_metrics()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    vllm = {sample for name, kind in vllm_names().items() for sample in samples_of(kind, name)}
    known = live | recorded | vllm
    used = {name for expression in expressions_used() for name in NAME.findall(expression)}
    assert len(used) > 40
    assert used - known == set()
    # The check would notice a misspelt one.
    assert "taut_request_total" not in known


async def test_every_label_matched_exists() -> None:
    _, labels = await live_metrics()
    checked = 0
    for expression in expressions_used():
        for name, matchers in SELECTOR.findall(in_prometheus_words(expression)):
            used = {label for label, _ in LABEL.findall(matchers)} - OF_SCRAPE
            if name in labels:
                checked += 1
                assert used <= labels[name], f"{name}: {used - labels[name]} in {expression}"
    assert checked > 20


def test_vllm_names_are_those_of_the_installed_version() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed: its metric names are not compared with its source")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    missing = [name for name in vllm_names() if f'"{name}"' not in source]
    assert missing == []


def test_panels_are_whole() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    source = yaml.safe_load(
        (HOME / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"][0]
    places = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["datasource"]["uid"] == source["uid"]
        assert panel["targets"]
        assert all(target["datasource"]["uid"] == source["uid"] for target in panel["targets"])


def test_provisioning_points_at_the_dashboards() -> None:
    provider = yaml.safe_load(
        (HOME / "grafana" / "provisioning" / "dashboards" / "taut.yml").read_text()
    )["providers"][0]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    assert len(DASHBOARDS) == 1
