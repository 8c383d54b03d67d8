"""Alert rules and dashboards: they parse, they fire, and every metric they name exists."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from gateway_harness import COMPLETION, gateway, settings_for
from mock_engine import MockEngine
from observability_queries import (
    DASHBOARDS,
    HOME,
    LABEL,
    OF_CLUSTER,
    OF_WORKERS,
    RULES,
    TESTS,
    alerts,
    dashboard_expressions,
    in_prometheus_words,
    labels_shown,
    labels_used,
    listed_of_cluster,
    listed_of_vllm,
    names_shown,
    names_used,
    panels,
    recorded,
    rules,
    samples_of,
)

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None,
    reason="NO promtool HERE: alert rules are NOT tested; apt-get install prometheus",
)


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


async def live_metrics() -> str:
    """Return what a gateway shows after a streamed request."""
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        await harness.post({**COMPLETION, "stream": True})
        return (await harness.request("GET", "/metrics")).body.decode()


async def test_every_metric_named_exists() -> None:
    """The workers' are compared with a real one in tests/e2e/test_metrics.py."""
    live = names_shown(await live_metrics())
    used = {name for name in names_used() if not name.startswith(OF_WORKERS)}
    assert len(used) > 40
    assert used - live - recorded() == set()
    # The check would notice a misspelt one.
    assert "taut_request_total" not in live


async def test_every_label_matched_exists() -> None:
    shown = labels_shown(await live_metrics())
    used = labels_used(shown)
    assert sum(bool(labels) for labels in used.values()) > 8
    assert {
        name: labels - shown[name] for name, labels in used.items() if labels - shown[name]
    } == {}


def test_metrics_used_are_listed() -> None:
    used = {name for name in names_used() if name.startswith(OF_WORKERS)}
    listed = {
        sample for name, (kind, _) in listed_of_vllm().items() for sample in samples_of(kind, name)
    }
    assert len(used) > 5
    assert used - listed == set()


def test_names_of_the_cluster_are_listed_with_the_labels_that_rules_match() -> None:
    listed = listed_of_cluster()
    used: dict[str, set[str]] = {}
    for rule in rules():
        for name, _, matchers in OF_CLUSTER.findall(rule["expr"]):
            used.setdefault(name, set()).update(label for label, _ in LABEL.findall(matchers))
    assert len(used) > 5
    assert set(used) == set(listed)
    assert {name: used[name] - listed[name] for name in used if used[name] - listed[name]} == {}


def test_vllm_names_are_those_of_the_installed_version() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed: its metric names are not compared with its source")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    of_vllm = [name for name in listed_of_vllm() if name.startswith("vllm:")]
    missing = [name for name in of_vllm if f'"{name}"' not in source]
    assert len(of_vllm) > 15
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
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    for path in DASHBOARDS:
        choice = json.loads(path.read_text())["templating"]["list"][0]
        assert (choice["name"], choice["type"]) == ("datasource", "datasource")
        assert choice["current"]["value"] == source["uid"]


def test_prometheus_keeps_what_the_longest_panel_looks_back_at() -> None:
    days = [int(n) for e in dashboard_expressions() for n in re.findall(r"\[(\d+)d\]", e)]
    assert days
    compose = (HOME.parent / "compose.yaml").read_text()
    kept = re.search(r"TAUT_PROMETHEUS_RETENTION:-(\d+)d", compose)
    assert kept is not None
    assert int(kept[1]) > max(days)


def test_provisioning_points_at_the_dashboards() -> None:
    provider = yaml.safe_load(
        (HOME / "grafana" / "provisioning" / "dashboards" / "taut.yml").read_text()
    )["providers"][0]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    assert len(DASHBOARDS) == 1
