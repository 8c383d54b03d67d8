"""What a served batch says of a candidate: when it is asked, how it is judged, what stops it."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import write_llama
from validate_setup import job_of

from taut_deploy.errors import WorkerError
from taut_deploy.validate import serving
from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.outcome import Metric, Verdict

NOISE = Metric(0.02, 0.01, 0.03, 0.01, 0.03, noise=0.001)


def job(tmp_path, **changes):
    named = {"baseline": "b", "candidate": str(tmp_path), "policy": "p", "output": tmp_path / "out"}
    return job_of(text=tmp_path / "text", **(named | {"served": True} | changes))


def comparison(kl, difference=0.1):
    zeros = np.zeros((2, 8))
    tokens = np.zeros((2, 8), dtype=np.int64)
    return Comparison(zeros + 1, zeros + 1 + difference, zeros + kl, tokens, tokens, True)


def open_files():
    pytest.fail("only a worker that answers has the files opened")


@pytest.fixture
def answering(monkeypatch):
    """A worker that can be started, and what it is found to answer."""
    found = SimpleNamespace(value=comparison(0.004), batches=[])

    async def ask(_job, batch, _open_files):
        found.batches.append(batch)
        if isinstance(found.value, Exception):
            raise found.value
        return found.value

    monkeypatch.setattr(serving, "_ask", ask)
    monkeypatch.setattr(serving, "installed_platform", lambda: "cpu")
    return found


def test_what_is_served_as_scored_passes(answering, tmp_path):
    result, (rule,) = serving.compare_served(job(tmp_path), [(1, 2, 3)] * 9, NOISE, open_files)
    assert len(answering.batches[0]) == serving.SEQUENCES
    assert result.compared
    assert (rule.metric, rule.side, rule.verdict) == (serving.METRIC, "max", Verdict.PASS)
    assert result.measured["rms_logprob"] == pytest.approx(0.1)
    assert "0.1 (RMS) from those of the files over 16 tokens" in rule.reason


def test_what_is_served_otherwise_fails_whatever_compression_cost(answering, tmp_path):
    answering.value = comparison(1.5 * serving.LEAST_KL)
    _, (rule,) = serving.compare_served(job(tmp_path), [(1, 2)], NOISE, open_files)
    assert rule.verdict is Verdict.FAIL
    assert rule.margin < 0
    assert "what is served is not what was scored" in rule.reason


def test_a_model_that_rounding_moves_far_may_differ_more(answering, tmp_path):
    answering.value = comparison(1.5 * serving.LEAST_KL)
    rounded = Metric(0.1, 0.1, 0.1, 0.1, 0.1, noise=serving.LEAST_KL / 2)
    _, (rule,) = serving.compare_served(job(tmp_path), [(1, 2)], rounded, open_files)
    assert rule.verdict is Verdict.PASS


def test_a_candidate_that_no_worker_serves_is_not_proved(answering, tmp_path):
    answering.value = WorkerError("worker ended 1 times before it was ready: no such op")
    result, (rule,) = serving.compare_served(job(tmp_path), [(1, 2)], NOISE, open_files)
    assert not result.compared
    assert rule.verdict is Verdict.INCONCLUSIVE
    assert "serving was not compared: no worker could be started" in rule.reason
    assert "no such op" in rule.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"served": False}, "serving was not compared: --no-served"),
        ({"candidate": "http://127.0.0.1:1"}, "what was scored is what is served"),
    ],
)
def test_the_verdict_says_that_serving_was_not_compared(changes, reason, answering, tmp_path):
    result, rules = serving.compare_served(job(tmp_path, **changes), [(1, 2)], NOISE, open_files)
    assert rules == ()
    assert reason in result.reason
    assert answering.batches == []


def test_without_vllm_it_says_so(tmp_path, monkeypatch):
    def missing():
        raise WorkerError("vLLM is not installed")

    monkeypatch.setattr(serving, "installed_platform", missing)
    result, rules = serving.compare_served(job(tmp_path), [(1, 2)], NOISE, open_files)
    assert rules == ()
    assert result.reason == "serving was not compared: vLLM is not installed"


@pytest.mark.parametrize("trusted", [False, True])
def test_the_worker_runs_the_models_own_code_only_where_the_validation_may(
    trusted, tmp_path, monkeypatch
):
    started = []

    async def ask_one_worker(child, *_, **__):
        started.append(child.argv)
        return comparison(0.0)

    monkeypatch.setattr(serving, "ask_one_worker", ask_one_worker)
    monkeypatch.setattr(serving, "installed_platform", lambda: "cpu")
    write_llama(tmp_path / "model")
    asked = job(tmp_path, candidate=str(tmp_path / "model"), trust_remote_code=trusted)
    serving.compare_served(asked, [(1, 2)], NOISE, open_files)
    assert ("--trust-remote-code" in started[0]) is trusted


@pytest.mark.parametrize(("length", "asked"), [(64, 64), (127, 127), (128, 127), (500, 127)])
def test_a_worker_is_asked_within_the_models_window(length, asked, tmp_path, monkeypatch):
    """A server writes a token behind each prompt; the tiny model's window is 128."""
    seen = {}

    async def ask_one_worker(child, _url, _name, _golden, score, **_):
        seen["longest"] = child.argv[child.argv.index("--max-model-len") + 1]
        return score()

    def scored(_job, batch, _url, _files):
        seen["tokens"] = [len(tokens) for tokens in batch]
        return comparison(0.0)

    monkeypatch.setattr(serving, "ask_one_worker", ask_one_worker)
    monkeypatch.setattr(serving, "installed_platform", lambda: "cpu")
    monkeypatch.setattr(serving, "_scored", scored)
    write_llama(tmp_path / "model")
    validation = job(tmp_path, candidate=str(tmp_path / "model"), sequence_length=length)
    sequences = [tuple(range(length))] * 2
    serving.compare_served(validation, sequences, NOISE, lambda: None)
    assert seen == {"longest": str(asked + 1), "tokens": [asked, asked]}
