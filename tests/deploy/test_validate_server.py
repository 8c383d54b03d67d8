"""Servers, through a small fake on loopback (``validate_setup.FakeServer``); no test here runs
vLLM."""

from __future__ import annotations

import pytest
from validate_setup import FakeServer, job_for, perturb, write_model, write_text

from taut_deploy.validate import CouldNotValidateError, Verdict, run_validation

LOOSE = "name: loose\nrequire: {perplexity_ratio: {max: 50}, mean_kl: {max: 50}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("server")
    write_model(path / "baseline")
    perturb(path / "baseline", path / "candidate", lambda _, t: t * 1.05)
    write_text(path / "text.txt", 400)
    (path / "loose.yaml").write_text(LOOSE)
    return path


@pytest.fixture
def servers(folder):
    baseline, candidate = FakeServer(folder / "baseline"), FakeServer(folder / "candidate")
    with baseline.listening() as baseline_url, candidate.listening() as candidate_url:
        yield baseline, candidate, baseline_url, candidate_url


def values(result) -> dict[str, float]:
    return {name: metric.estimate for name, metric in result.metrics.items()}


@pytest.mark.parametrize("kinds", ["url url", "url dir", "dir url"])
def test_servers_give_what_directories_give_and_a_lower_bound_of_the_kl(
    folder, servers, tmp_path, kinds
):
    _, _, baseline_url, candidate_url = servers
    exact = run_validation(job_for(folder, output=tmp_path / "dirs"))
    changes = {"output": tmp_path / "urls", "policy": folder / "loose.yaml", "latency": False}
    kind_of = dict(zip(("baseline", "candidate"), kinds.split(), strict=True))
    if kind_of["baseline"] == "url":
        changes["baseline"] = baseline_url + "/v1"
    if kind_of["candidate"] == "url":
        changes["candidate"] = candidate_url
    served = run_validation(job_for(folder, **changes))

    for name in ("perplexity_ratio", "delta_nll", "top1_agreement", "rms_delta_p"):
        assert values(served)[name] == pytest.approx(values(exact)[name], rel=1e-4)
        assert not served.metrics[name].is_lower_bound
    assert 0.5 * values(exact)["mean_kl"] < values(served)["mean_kl"] < values(exact)["mean_kl"]
    assert served.metrics["mean_kl"].is_lower_bound
    assert served.report["text"]["tokens_sha256"] == exact.report["text"]["tokens_sha256"]
    assert served.verdict is Verdict.INCONCLUSIVE
    assert "lower bound" in served.report_markdown.read_text()
    assert served.report["worst_positions"][0]["token"].startswith("w")


def test_a_lower_bound_passes_when_that_is_asked_for(folder, servers, tmp_path):
    _, _, baseline_url, candidate_url = servers
    job = job_for(
        folder,
        baseline=baseline_url,
        candidate=candidate_url,
        output=tmp_path / "r",
        policy=folder / "loose.yaml",
        accept_lower_bound=True,
        latency=False,
    )
    assert run_validation(job).verdict is Verdict.PASS


def test_the_request_is_the_one_vllm_takes(folder, servers, tmp_path):
    baseline, _, baseline_url, _ = servers
    job = job_for(folder, baseline=baseline_url, output=tmp_path / "r", top_k=7, api_key="secret")
    result = run_validation(job)
    bodies = [body for _, body, _ in baseline.requests if "prompt_logprobs" in body]
    assert len(bodies) == 6 + 2 * 2, "six sequences, and two of them twice for the noise floor"
    assert {key: bodies[0][key] for key in ("model", "max_tokens", "prompt_logprobs")} == {
        "model": "tiny",
        "max_tokens": 1,
        "prompt_logprobs": 7,
    }
    assert len(bodies[0]["prompt"]) == 24
    assert bodies[6:] == [bodies[0], bodies[0], bodies[1], bodies[1]]
    assert result.report["noise_floor"] == "baseline server asked twice, 2 sequences"
    assert result.metrics["mean_kl"].noise == 0.0
    assert {key for _, _, key in baseline.requests} == {"Bearer secret"}
    assert "secret" not in result.report_json.read_text() + repr(job)


def damaged(entry_change):
    def alter(path, body):
        if path == "/v1/completions" and "prompt_logprobs" in body["choices"][0]:
            entry_change(body["choices"][0]["prompt_logprobs"])
        return body

    return alter


def drop_own_token(entries):
    own = min(entries[3], key=lambda key: entries[3][key]["logprob"])
    entries[3] = {key: value for key, value in entries[3].items() if key != own}


def nan_entry(entries):
    for value in entries[3].values():
        value["logprob"] = float("nan")


def logits(entries):
    for value in entries[3].values():
        value["logprob"] += 800.0


def small_logits(entries):
    for value in entries[3].values():
        value["logprob"] = -0.1


def odd_entry(entries):
    entries[3] = ["a"]


def replaced(path_wanted, answer):
    return lambda path, body: answer if path == path_wanted else body


@pytest.mark.parametrize(
    ("alter", "fragment"),
    [
        (replaced("/v1/models", 503), "/v1/models answered 503: refused with 503"),
        (replaced("/v1/models", {}), "without a list of models"),
        (replaced("/v1/models", {"data": []}), "no such model; it serves none"),
        (
            replaced("/v1/models", {"data": [{"id": "a"}, {"id": "b"}]}),
            r"serves several models \(a, b\); choose with --candidate-model",
        ),
        (replaced("/v1/models", b"<html>"), "did not answer with JSON"),
        (replaced("/v1/models", [1]), "did not answer with a JSON object"),
        (replaced("/tokenize", 404), "/tokenize answered 404"),
        (replaced("/tokenize", {"tokens": "abc"}), "without a list of token ids"),
        (replaced("/tokenize", {"tokens": [1, 2]}), "tokenizer differs"),
        (replaced("/v1/completions", {"choices": []}), "without one 'prompt_logprobs' entry per"),
        (replaced("/v1/completions", {"choices": [{"text": ""}]}), "it must be vLLM"),
        (damaged(lambda entries: entries.pop()), "without one 'prompt_logprobs' entry per token"),
        (damaged(drop_own_token), "lacks the prompt's own token"),
        (damaged(nan_entry), "NaN or infinite log-probabilities"),
        (damaged(logits), "add up to more than 1: .* --logprobs-mode raw_logprobs"),
        (damaged(small_logits), "add up to more than 1"),
        (damaged(odd_entry), "entry of unknown shape"),
    ],
)
def test_bad_answers_are_one_line_that_names_the_server(folder, servers, tmp_path, alter, fragment):
    _, candidate, _, candidate_url = servers
    candidate.alter = alter
    job = job_for(folder, candidate=candidate_url, output=tmp_path / "r", top_k=3)
    with pytest.raises(CouldNotValidateError, match=fragment) as caught:
        run_validation(job)
    assert "\n" not in str(caught.value)
    assert "candidate" in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_a_server_that_allows_fewer_logprobs_says_so(folder, servers, tmp_path):
    _, _, _, candidate_url = servers
    job = job_for(folder, candidate=candidate_url, output=tmp_path / "r", top_k=21)
    with pytest.raises(CouldNotValidateError, match="/v1/completions answered 400"):
        run_validation(job)


def test_a_model_name_that_is_not_served_is_refused(folder, servers, tmp_path):
    _, _, _, candidate_url = servers
    job = job_for(folder, candidate=candidate_url, candidate_model="big", output=tmp_path / "r")
    with pytest.raises(CouldNotValidateError, match="--candidate-model big: no such model"):
        run_validation(job)


@pytest.mark.parametrize(
    ("url", "fragment"),
    [
        ("http://127.0.0.1:9", "/v1/models gave no answer"),
        ("http://", "expected http://host:port"),
        ("ftp://example.org", "expected http://host:port"),
    ],
)
def test_bad_urls_are_refused_by_flag(folder, tmp_path, url, fragment):
    job = job_for(folder, candidate=url, output=tmp_path / "r")
    with pytest.raises(CouldNotValidateError, match=fragment):
        run_validation(job)


def test_sequences_longer_than_the_server_takes_are_refused(folder, servers, tmp_path):
    _, candidate, _, candidate_url = servers
    card = {"data": [{"id": "tiny", "max_model_len": 24}]}
    candidate.alter = replaced("/v1/models", card)
    job = job_for(folder, candidate=candidate_url, output=tmp_path / "r")
    with pytest.raises(CouldNotValidateError, match="--sequence-length: 24 is more than the 23"):
        run_validation(job)
