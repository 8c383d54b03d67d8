"""What rules and dashboards ask for, against the ``/metrics`` of a real worker and its gateway.

The name sorts before test_serve.py, whose last tests end the instance that all files share.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import pytest
from serving import MODEL, post

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))

from observability_queries import (
    OF_WORKERS,
    declared,
    labels_shown,
    labels_used,
    listed_of_vllm,
    names_shown,
    names_used,
    recorded,
    samples_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(1200)]
OF_VLLM = {"model_name", "engine"}


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        return response.read().decode()


@pytest.fixture(scope="module")
def pages(served) -> tuple[str, str]:
    """The worker's page and the gateway's, after a request through both."""
    status, _ = post(
        f"{served.url}/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 3}
    )
    assert status == 200
    return metrics(served.worker_url), metrics(served.url)


def test_listed_vllm_metrics_are_those_of_a_real_worker(pages):
    live = declared(pages[0])
    listed = {name: kind for name, (kind, _) in listed_of_vllm().items()}
    assert len(listed) > 15
    # A histogram whose own name ends in _total stays as it is; counters are declared without it.
    assert {name: kind for name, kind in listed.items() if live.get(name) != kind} == {}


def test_listed_labels_are_those_of_a_real_worker(pages):
    shown = labels_shown(pages[0])
    wrong = {}
    for name, (kind, labels) in listed_of_vllm().items():
        (sample, *_) = sorted(samples_of(kind, name))
        expected = (
            (OF_VLLM if name.startswith("vllm:") else set())
            | labels
            | ({"le"} if kind == "histogram" else set())
        )
        if shown.get(sample) != expected:
            wrong[sample] = shown.get(sample)
    assert wrong == {}


def test_every_metric_named_exists_on_a_real_worker_or_gateway(pages):
    worker, gateway = (names_shown(page) for page in pages)
    used = names_used()
    of_workers = {name for name in used if name.startswith(OF_WORKERS)}
    assert len(of_workers) > 5
    assert of_workers - worker == set()
    assert used - of_workers - recorded() - gateway == set()


def test_every_label_matched_exists_on_a_real_worker_or_gateway(pages):
    for page in pages:
        shown = labels_shown(page)
        used = labels_used(shown)
        missing = {name: labels - shown[name] for name, labels in used.items()}
        assert {name: labels for name, labels in missing.items() if labels} == {}
