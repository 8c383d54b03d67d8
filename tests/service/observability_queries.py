"""What the alert rules and dashboards name, and what a ``/metrics`` page has; for several tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

HOME = Path(__file__).parents[2] / "docker" / "observability"
RULES = sorted((HOME / "prometheus" / "rules").glob("*.rules.yml"))
TESTS = sorted((HOME / "prometheus" / "tests").glob("*.test.yml"))
DASHBOARDS = sorted((HOME / "grafana" / "dashboards").glob("*.json"))
NAME = re.compile(r"\b(?:taut|vllm)[_:][a-zA-Z0-9_:]+")
SELECTOR = re.compile(r"\b((?:taut|vllm)[_:][a-zA-Z0-9_:]+)\{([^{}]*)\}")
LABEL = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
OF_CLUSTER = re.compile(r"\b((?:kube_|kubelet_|DCGM_)\w+)(\{([^{}]*)\})?")
OF_SCRAPE = {"instance", "job", "le"}
OF_WORKERS = ("vllm:", "taut_kernel")
"""How the names of what workers export begin; all others are the gateway's."""


def rules() -> list[dict[str, Any]]:
    documents = [yaml.safe_load(path.read_text()) for path in RULES]
    return [
        rule for document in documents for group in document["groups"] for rule in group["rules"]
    ]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded() -> set[str]:
    """Names that recording rules make."""
    return {rule["record"] for rule in rules() if "record" in rule}


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


def expressions_used() -> list[str]:
    return [*(rule["expr"] for rule in rules()), *dashboard_expressions()]


def names_used() -> set[str]:
    return {name for expression in expressions_used() for name in NAME.findall(expression)}


def labels_used(names: Iterable[str]) -> dict[str, set[str]]:
    """Labels that selectors of these metrics match on, without those that a scrape adds."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for expression in expressions_used():
        for name, matchers in SELECTOR.findall(in_prometheus_words(expression)):
            if name in found:
                found[name] |= {label for label, _ in LABEL.findall(matchers)} - OF_SCRAPE
    return found


def samples_of(kind: str, name: str) -> set[str]:
    if kind == "histogram":
        return {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    if kind == "counter" and not name.endswith("_total"):
        return {f"{name}_total"}
    return {name}


def declared(text: str) -> dict[str, str]:
    """Kind of every metric that a ``/metrics`` page declares; counters without ``_total``."""
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def names_shown(text: str) -> set[str]:
    """Names of the samples that the metrics of a ``/metrics`` page have, or will have."""
    return {sample for name, kind in declared(text).items() for sample in samples_of(kind, name)}


def labels_shown(text: str) -> dict[str, set[str]]:
    """Label names of every sample of a ``/metrics`` page, by the sample's name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def listed_of_vllm() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of every name in vllm-metrics.txt.

    vLLM's own have ``model_name`` and ``engine`` as well.
    """
    return _listed("vllm-metrics.txt")


def listed_of_cluster() -> dict[str, set[str]]:
    """Labels of every name in cluster-metrics.txt."""
    return {name: labels for name, (_, labels) in _listed("cluster-metrics.txt").items()}


def _listed(file: str) -> dict[str, tuple[str, set[str]]]:
    found = {}
    for line in (HOME / file).read_text().splitlines():
        if line and not line.startswith("#"):
            kind, name, *rest = line.split(maxsplit=2)
            found[name] = (kind, set("".join(rest).strip("{} ").replace(",", " ").split()))
    return found
