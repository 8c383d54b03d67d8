"""What the autoscaler asks Prometheus parses and names metrics and labels that the gateway has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from chart_rendering import CI_SETS, needs_helm, of_kind, render_set

PROMTOOL = shutil.which("promtool")
README = Path(__file__).parents[2] / "docs" / "gateway-metrics.md"


def queries() -> list[str]:
    return [
        trigger["metadata"]["query"]
        for name in CI_SETS
        for document in of_kind(render_set(name), "ScaledObject")
        for trigger in document["spec"]["triggers"]
    ]


@needs_helm
@pytest.mark.skipif(PROMTOOL is None, reason="NO promtool HERE: queries are NOT parsed")
def test_queries_parse(tmp_path: Path):
    rules = [{"record": f"q{number}", "expr": expr} for number, expr in enumerate(queries())]
    assert len(rules) == 4
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
def test_queries_name_documented_metrics():
    documented = README.read_text()
    used = {name for query in queries() for name in re.findall(r"taut_\w+", query)}
    assert len(used) == 5
    for name in used:
        assert f"`{name.removesuffix('_bucket')}`" in documented, name


def series(namespace: str, name: str, values: str, **labels: str) -> dict[str, str]:
    shown = {"job": "taut-gateway", "namespace": namespace, **labels}
    inside = ",".join(f'{key}="{value}"' for key, value in shown.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def in_flight() -> list[dict[str, str]]:
    """Two gateways that know two workers of the baseline and one of another variant."""
    model = "smollm2-135m-instruct"
    found = []
    for instance in ("g1", "g2"):
        found.append(series("ns", "taut_inflight_requests", "3x20", instance=instance))
        for worker, variant, tokens in (
            ("w1", "baseline", "100"),
            ("w2", "baseline", "200"),
            ("w3", "w8a8", "7000"),
        ):
            labels = {"instance": instance, "worker": worker}
            found.append(series("ns", "taut_worker_outstanding_tokens", f"{tokens}x20", **labels))
            labels |= {"model": model, "variant": variant}
            found.append(series("ns", "taut_worker_info", "1x20", **labels))
    found.append(
        series("elsewhere", "taut_worker_outstanding_tokens", "9x20", instance="g", worker="w1")
    )
    return found


def waits(per_minute: int) -> list[dict[str, str]]:
    """Requests that waited between 2 and 4 seconds."""
    return [
        series(
            "ns",
            "taut_queue_wait_seconds_bucket",
            f"0+{0 if bound == '2' else per_minute}x20",
            model="smollm2-135m-instruct",
            le=bound,
        )
        for bound in ("2", "4", "+Inf")
    ]


def of_baseline(name: str) -> str:
    (scaled,) = of_kind(render_set("canary"), "ScaledObject")
    (trigger,) = [each for each in scaled["spec"]["triggers"] if each["name"] == name]
    query: str = trigger["metadata"]["query"]
    return query


@needs_helm
@pytest.mark.skipif(PROMTOOL is None, reason="NO promtool HERE: queries are NOT evaluated")
@pytest.mark.parametrize(
    ("trigger", "input_series", "value"),
    [
        ("tokens-in-flight", in_flight(), 600),
        ("tokens-in-flight", [], None),
        ("queue-wait", in_flight() + waits(60), 3.8),
        ("queue-wait", in_flight() + waits(0), 0),
        ("queue-wait", [], None),
    ],
    ids=["all gateways", "no gateway", "waiting", "nobody asks", "no gateway at all"],
)
def test_query_gives(
    trigger: str, input_series: list[dict[str, str]], value: float | None, tmp_path: Path
):
    expected = [] if value is None else [{"labels": "{}", "value": value}]
    case = {
        "interval": "1m",
        "input_series": input_series,
        "promql_expr_test": [
            {"expr": of_baseline(trigger), "eval_time": "10m", "exp_samples": expected}
        ],
    }
    path = tmp_path / "queries.test.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
