"""``taut validate`` of two directories: what files score is compared with what vLLM serves of them.

A tiny random model: the worker that is started compiles, and asks itself the known answer, as any.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import run_taut
from tiny_families import write_family
from tiny_models import job_for, w8a8_data, write_calibration_text
from validate_setup import write_text

from taut_deploy.compress import driver

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_worker_of_the_candidate_is_started_and_asked(tmp_path: Path):
    model = write_family(tmp_path / "model", "llama")
    data = w8a8_data(write_calibration_text(tmp_path / "calibration.txt"))
    driver.compress(job_for(model, data, tmp_path / "w8a8"))
    done = run_taut(
        *("validate", "--baseline", model, "--candidate", tmp_path / "w8a8"),
        *("--policy", "aggressive-small-model"),
        *("--text", write_text(tmp_path / "text.txt", 600)),
        *("--sequences", "3", "--sequence-length", "128", "--noise-sequences", "0"),
        *("--output", tmp_path / "report", "--json"),
        timeout_s=600,
    )
    assert done.returncode in {0, 1, 2}, done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["serving"]["compared"], report["serving"]["reason"]
    measured = report["serving"]["measured"]
    assert measured["tokens"] == 3 * 126  # the window is 128, and a server writes a token
    assert 0 < measured["served_kl"] < 0.02
    assert "served_kl" in {rule["metric"] for rule in report["rules"]}
