"""Latency inside a whole validation: when it is measured, what the report says, the verdict."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner
from validate_setup import FakeServer, job_for, write_model, write_text

from taut_deploy.cli import app
from taut_deploy.validate import CouldNotValidateError, Verdict, run_validation
from taut_deploy.validate.latency.plan import LatencyPlan

pytestmark = pytest.mark.usefixtures("charts_undrawn")
ACCURACY = "name: p\nrequire: {perplexity_ratio: {max: 2}}\n"
PLAN = LatencyPlan(requests=32, concurrency=(4,), prompt_tokens=8, output_tokens=4)
FAIL_AT_TWICE = "latency: {itl_p50_ratio_at_most: 1.4, error_rate_at_most: 0.2}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("latency")
    write_model(path / "baseline")
    write_text(path / "text.txt", 400)
    return path


@pytest.fixture
def servers(folder):
    baseline, candidate = FakeServer(folder / "baseline"), FakeServer(folder / "baseline")
    with baseline.listening() as baseline_url, candidate.listening() as candidate_url:
        yield baseline, candidate, baseline_url, candidate_url


@pytest.fixture
def validate(folder, tmp_path):
    def validate(latency_policy: str, **changes):
        (tmp_path / "p.yaml").write_text(ACCURACY + latency_policy)
        defaults = {
            "candidate": str(folder / "baseline"),
            "policy": tmp_path / "p.yaml",
            "output": tmp_path / "report",
            "noise_sequences": 0,
            "latency_plan": PLAN,
        }
        return run_validation(job_for(folder, **(defaults | changes)))

    return validate


def judged(report) -> dict[str, str]:
    """The parts that were judged, and how."""
    return {part: verdict for part, verdict in report["verdicts"].items() if verdict is not None}


def cases(result) -> dict[str, str | None]:
    """Test case → the element that says it did not pass."""
    root = ElementTree.fromstring(result.report_junit.read_text())
    found = root.findall("testsuite/testcase")
    return {case.get("name"): next((child.tag for child in case), None) for case in found}


def test_a_slow_candidate_fails_though_it_is_accurate(servers, validate):
    baseline, candidate, baseline_url, candidate_url = servers
    baseline.itl_s, candidate.itl_s = 0.02, 0.05
    calls = []
    result = validate(
        FAIL_AT_TWICE,
        baseline=baseline_url,
        candidate=candidate_url,
        progress=lambda *call: calls.append(call),
    )
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 1)
    report = json.loads(result.report_json.read_text())
    assert judged(report) == {"accuracy": "PASS", "latency": "FAIL"}
    (level,) = report["latency"]["levels"]
    assert (level["concurrency"], level["blocks"], level["candidate"]["requests"]) == (4, 8, 32)
    assert level["ratios"]["itl_p50_ratio"]["low"] > 1.4
    assert level["candidate"]["itl_ms"]["p50"] >= 50
    assert level["candidate"]["output_tokens"] == 32 * 4
    assert report["latency"]["error_rate"]["candidate"]["sent"] == 32
    assert cases(result) == {
        "perplexity_ratio max 2": None,
        "default_sampling max 0.25": None,
        "itl_p50_ratio max 1.4 at concurrency 4": "failure",
        "error_rate max 0.2": None,
    }
    text = result.report_markdown.read_text()
    assert "Accuracy: PASS. Latency: FAIL." in text
    assert "| ITL p50 ratio, concurrency 4 | max 1.4 | **FAIL** |" in text
    assert "Concurrency 4, 8 blocks, 32 requests each" in text
    assert calls[-1] == ("latency", 8, 8)


def test_requests_of_both_models_differ_in_nothing_but_the_cache_salt(servers, validate):
    baseline, candidate, baseline_url, candidate_url = servers
    validate("", baseline=baseline_url, candidate=candidate_url)

    def streamed(server):
        return [body for _, body, _ in server.requests if body.get("stream")]

    sent = streamed(baseline), streamed(candidate)
    salts = [body.pop("cache_salt") for bodies in sent for body in bodies]
    assert len(set(salts)) == len(salts) == 2 * 36, "32 measured and a warm-up block of 4"
    keys = sorted(json.dumps(body, sort_keys=True) for body in sent[0])
    assert keys == sorted(json.dumps(body, sort_keys=True) for body in sent[1])
    assert len({tuple(body["prompt"]) for body in sent[0]}) == 36
    first = sent[0][0]
    expected = {"max_tokens": 4, "min_tokens": 4, "ignore_eos": True, "temperature": 0.0}
    assert {name: first[name] for name in expected} == expected
    assert (first["seed"], len(first["prompt"]), first["model"]) == (0, 8, "tiny")


def test_without_bounds_latency_is_reported_and_not_judged(servers, validate):
    _, candidate, baseline_url, candidate_url = servers
    candidate.itl_s = 0.02
    result = validate("", baseline=baseline_url, candidate=candidate_url)
    assert result.verdict is Verdict.PASS
    assert judged(result.report) == {"accuracy": "PASS"}
    assert result.report["latency"]["measured"] is True
    assert "nothing of this was judged" in result.report_markdown.read_text()


@pytest.mark.parametrize(
    ("policy", "verdict", "case"),
    [
        ("", Verdict.PASS, None),
        ("latency: {itl_p50_ratio_at_most: 1.4}", Verdict.INCONCLUSIVE, "error"),
        ("latency: {required: false, itl_p50_ratio_at_most: 1.4}", Verdict.PASS, "skipped"),
    ],
)
@pytest.mark.parametrize("why", ["a directory", "--no-latency"])
def test_what_was_not_measured_passes_only_where_it_is_not_required(
    servers, validate, policy, verdict, case, why
):
    _, _, baseline_url, candidate_url = servers
    urls = {"baseline": baseline_url, "candidate": candidate_url, "latency": False}
    result = validate(policy, **(urls if why == "--no-latency" else {}))
    assert result.verdict is verdict
    assert result.report["latency"]["measured"] is False
    assert why in result.report["latency"]["why_not"]
    assert f"Not measured: {result.report['latency']['why_not']}" in (
        result.report_markdown.read_text()
    )
    found = cases(result)
    assert found.pop("perplexity_ratio max 2") is None
    if why == "--no-latency":  # two servers
        assert found.pop("default_sampling max 0.25") is None
    assert found == (
        {} if case is None else {"itl_p50_ratio max 1.4": case, "error_rate max 0.05": case}
    )


def test_built_in_policies_judge_directories_as_before(folder, tmp_path):
    job = job_for(folder, candidate=str(folder / "baseline"), output=tmp_path / "r")
    result = run_validation(job)
    assert (result.verdict, result.report["verdicts"]["latency"]) == (Verdict.PASS, None)
    assert {"itl_p50_ratio max 1.05", "throughput_ratio min 0.95"} <= set(cases(result))


def test_headers_and_key_go_with_every_request_and_stay_out_of_the_report(servers, validate):
    baseline, candidate, baseline_url, candidate_url = servers
    result = validate(
        "",
        baseline=baseline_url,
        candidate=candidate_url,
        api_key="s3cret",
        baseline_headers=(("X-Taut-Variant", "bf16"), ("X-Other", "hush")),
        candidate_headers=(("X-Taut-Variant", "w8a8"),),
    )
    assert (baseline.pins, candidate.pins) == ({"bf16"}, {"w8a8"})
    assert {key for _, _, key in baseline.requests} == {"Bearer s3cret"}
    models = result.report["models"]
    assert models["candidate"]["headers"] == {"X-Taut-Variant": "w8a8"}
    assert models["baseline"]["headers"]["X-Other"] == "(not shown)"
    text = result.report_json.read_text() + result.report_markdown.read_text()
    assert "s3cret" not in text
    assert "hush" not in text


def replaced_stream(answer):
    return lambda path, body: (
        answer if path == "/v1/completions" and answer_is_stream(body) else body
    )


def answer_is_stream(body) -> bool:
    return not isinstance(body, (dict, int))


def test_a_server_that_cannot_stream_is_one_line_and_leaves_no_report(servers, validate, tmp_path):
    _, candidate, baseline_url, candidate_url = servers
    candidate.alter = replaced_stream(400)
    with pytest.raises(CouldNotValidateError, match=r"400.*--no-latency") as caught:
        validate("", baseline=baseline_url, candidate=candidate_url)
    assert "\n" not in str(caught.value)
    # No report; the text had been scored, and that is kept and marked.
    kept = {file.name: file for file in (tmp_path / "report").iterdir()}
    partial = json.loads(kept["partial.json"].read_text())
    assert (set(kept), partial["complete"]) == ({"partial.json", "answers.jsonl"}, False)
    assert partial["error"] in str(caught.value)


def test_a_candidate_that_fails_every_stream_fails(servers, validate):
    _, candidate, baseline_url, candidate_url = servers
    candidate.alter = replaced_stream(500)
    result = validate(FAIL_AT_TWICE, baseline=baseline_url, candidate=candidate_url)
    assert result.verdict is Verdict.FAIL
    rules = {rule.metric: rule for rule in result.rules if rule.part == "latency"}
    assert rules["error_rate"].verdict is Verdict.FAIL
    assert rules["itl_p50_ratio"].verdict is Verdict.INCONCLUSIVE
    assert rules["itl_p50_ratio"].margin is None
    text = result.report_markdown.read_text()
    assert "**Broken off**" in text
    assert "refused with 500" in text


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"latency": True}, "--latency: baseline .* is a directory; latency takes two servers"),
        ({"baseline_headers": (("A", "b"),)}, "--baseline-header: .* is a directory"),
        ({"candidate_headers": (("A", "b"),)}, "--candidate-header: .* is a directory"),
    ],
)
def test_what_only_servers_have_is_refused_for_directories(validate, changes, fragment):
    with pytest.raises(CouldNotValidateError, match=fragment):
        validate("", **changes)


def test_lengths_beyond_the_server_are_refused(servers, validate):
    _, _, baseline_url, candidate_url = servers
    urls = {"baseline": baseline_url, "candidate": candidate_url}

    def plan(prompt_tokens):
        return LatencyPlan(
            requests=32, concurrency=(4,), prompt_tokens=prompt_tokens, output_tokens=4
        )

    with pytest.raises(CouldNotValidateError, match=r"125 \+ 4 are more than the 128 positions"):
        validate("", latency_plan=plan(125), **urls)
    assert validate("", latency_plan=plan(124), **urls).verdict is Verdict.PASS


ARGUMENTS = [
    "validate",
    "--baseline=a",
    "--candidate=b",
    "--policy=balanced",
    "--output=o",
    "--text=t",
]


@pytest.mark.parametrize(
    ("extra", "fragment"),
    [
        (["--latency-concurrency=1,x"], "--latency-concurrency: '1,x' is not a list of whole"),
        (["--latency-concurrency="], "--latency-concurrency: '' is not a list"),
        (["--latency-concurrency=0"], "--latency-concurrency: 0 is not in"),
        (["--latency-requests=-1"], "--latency-requests: -1 is below 1"),
        (["--latency-output-tokens=0"], "--latency-output-tokens: 0 is below 2"),
        (["--latency-timeout-s=-3"], "--latency-timeout-s: -3.0 is not a positive"),
        (["--candidate-header=X-Taut-Variant"], "--candidate-header: expected 'Name: value'"),
        (["--baseline-header=Authorization: Bearer k"], "set TAUT_API_KEY or give --api-key-file"),
        (["--api-key-file=/nowhere/key"], "--api-key-file /nowhere/key: No such file"),
    ],
)
def test_wrong_flags_are_one_line(extra, fragment):
    result = CliRunner().invoke(app, [*ARGUMENTS, *extra])
    assert isinstance(result.exception, CouldNotValidateError)
    assert fragment in str(result.exception)
    assert "\n" not in str(result.exception)


def test_the_command_line_carries_everything_to_the_servers(servers, folder, tmp_path, monkeypatch):
    baseline, candidate, baseline_url, candidate_url = servers
    monkeypatch.delenv("TAUT_API_KEY", raising=False)
    (tmp_path / "key").write_text("s3cret\n")
    (tmp_path / "p.yaml").write_text(ACCURACY + "latency: {error_rate_at_most: 0.2}")
    arguments = ["validate", f"--baseline={baseline_url}", f"--candidate={candidate_url}"]
    arguments += [f"--policy={tmp_path / 'p.yaml'}", f"--output={tmp_path / 'r'}"]
    arguments += [f"--text={folder / 'text.txt'}", "--sequences=6", "--sequence-length=24"]
    arguments += ["--noise-sequences=0", "--bootstrap=200", f"--api-key-file={tmp_path / 'key'}"]
    arguments += ["--latency-requests=30", "--latency-concurrency=2,3", "--latency-timeout-s=30"]
    arguments += ["--latency-prompt-tokens=9", "--latency-output-tokens=3", "--json"]
    arguments += ["--baseline-header=X-Taut-Variant: bf16", "--candidate-header=X-Taut-Variant:w8"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == {
        "verdict": "PASS",
        "verdicts": {"accuracy": "PASS", "tasks": None, "slices": None, "latency": "PASS"},
        "report": str(tmp_path / "r" / "report.json"),
        "junit": str(tmp_path / "r" / "junit.xml"),
        "page": str(tmp_path / "r" / "report.html"),
    }
    plan = json.loads((tmp_path / "r" / "report.json").read_text())["latency"]["plan"]
    assert plan == {
        "requests": 30,
        "concurrency": [2, 3],
        "prompt_tokens": 9,
        "output_tokens": 3,
        "timeout_s": 30.0,
    }
    assert (baseline.pins, candidate.pins) == ({"bf16"}, {"w8"})
    keys = {key for server in (baseline, candidate) for _, _, key in server.requests}
    assert keys == {"Bearer s3cret"}


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    crt, pem = folder / "tls.crt", folder / "tls.key"
    crt.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return crt, pem


def test_both_parts_trust_the_same_certificates(folder, validate, tmp_path, monkeypatch):
    """Or a server behind a private authority would be accurate and, to the other client, dead."""
    crt, pem = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, pem)
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)
    with FakeServer(folder / "baseline").listening(context) as url:
        monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
        with pytest.raises(CouldNotValidateError, match="SSLError"):
            validate("", baseline=url, candidate=url)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(crt))
        result = validate("", baseline=url, candidate=url)
    assert result.report["latency"]["error_rate"]["candidate"]["failed"] == 0
