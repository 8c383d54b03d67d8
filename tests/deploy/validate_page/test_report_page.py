"""The page of a validation: in a real browser, from disk, light and dark, wide and narrow; and the
report's published schema."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
from browser import needs_chromium, tab
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families
from validate_setup import FakeServer, add_noise, job_for, write_model, write_text

from taut_deploy.validate import Verdict, run_validation
from taut_deploy.validate.latency.plan import LatencyPlan
from taut_deploy.validate.page.render import render_page
from taut_deploy.validate.textfile import render_textfile

POLICY = """
name: p
require: {perplexity_ratio: {max: 1000}, mean_kl: {max: 0.001}}
tasks: {any: {recovery: {min: 0.2}}}
latency: {itl_p50_ratio_at_most: 1.5, required: false}
"""
NASTY = "<script>alert(1)</script> & $x$"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of two directories and of two servers, tasks, slices and latency among them."""
    path = tmp_path_factory.mktemp("page")
    write_model(path / "baseline")
    add_noise(path / "baseline", path / "candidate", 0.1)
    write_text(path / "text.txt", 400)
    rows = [{"prompt": f"w{i} w2", "choices": [" w1", " w2"], "answer": 0} for i in range(12)]
    task = path / "a$b$c.jsonl"
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "p.yaml").write_text(POLICY)
    asked = {"tasks": (task,), "policy": path / "p.yaml", "slices": ("languages", "chat")}
    local = run_validation(job_for(path, **asked, output=path / "local"))
    baseline, candidate = FakeServer(path / "baseline"), FakeServer(path / "candidate")
    plan = LatencyPlan(requests=32, concurrency=(1, 4), prompt_tokens=8, output_tokens=4)
    with baseline.listening() as first, candidate.listening() as second:
        urls = {"baseline": first, "candidate": second, "latency_plan": plan}
        served = run_validation(job_for(path, **asked, **urls, output=path / "served"))
    return {"local": local, "served": served}


@pytest.mark.parametrize("kind", ["local", "served"])
def test_reports_keep_to_the_published_schema(reports, kind):
    file = resources.files("taut_deploy.validate") / "report.schema.json"
    schema = json.loads(file.read_text())
    Draft202012Validator.check_schema(schema)
    report = json.loads(reports[kind].report_json.read_text())
    validator = Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(report)] == []
    assert list(validator.iter_errors({**report, "verdict": "MAYBE"}))
    assert list(validator.iter_errors({**report, "unknown": 1}))


@pytest.mark.parametrize("kind", ["local", "served"])
def test_prometheus_reads_the_verdict(reports, kind):
    result = reports[kind]
    text = (result.report_json.parent / "report.prom").read_text()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    samples = [sample for found in families.values() for sample in found]
    assert len({(s.name, *sorted(s.labels.items())) for s in samples}) == len(samples)
    said = {s.labels["verdict"]: s.value for s in families["taut_validation_verdict"]}
    assert said == {v.value: float(v is result.verdict) for v in Verdict}
    report = result.report
    for sample in families["taut_validation_metric"]:
        assert sample.value == report["metrics"][sample.labels["metric"]][sample.labels["end"]]
    margins = {
        (s.labels["metric"], s.labels["subject"]): s.value for s in samples if "side" in s.labels
    }
    assert margins["mean_kl", ""] < 0 < margins["perplexity_ratio", ""]
    (ended,) = families["taut_validation_finished_timestamp_seconds"]
    assert abs(ended.value - result.report_json.stat().st_mtime) < 60


def test_names_are_escaped_for_prometheus(reports):
    report = json.loads(reports["local"].report_json.read_text())
    report["policy"]["name"] = name = 'a "quoted" \\ name\nin two lines'
    (first, *_), *_ = (f.samples for f in text_string_to_metric_families(render_textfile(report)))
    assert first.labels["policy"] == name


def test_the_histogram_counts_every_position(reports):
    report = reports["local"].report
    histogram = report["kl"]["histogram"]
    assert sum(histogram["counts"]) + histogram["below"] == report["text"]["predictions"]
    assert histogram["edges"][-1] > report["kl"]["max"]


def test_several_numbers_of_requests_in_flight_are_a_sweep(reports):
    report = json.loads(reports["served"].report_json.read_text())
    page = render_page(report)
    (drawn,) = re.findall(r'<div class="charts" id="sweep">(.*?)</div>', page, re.DOTALL)
    assert drawn.count("<svg") == 2
    assert "requests in flight" in drawn and "tokens/s" in drawn
    first, second = report["latency"]["levels"]
    second["candidate"]["ttft_ms"]["p50"] = None  # no answer at all
    render_page(report)
    report["latency"]["levels"] = [first]
    assert 'id="sweep"' not in render_page(report)
    assert 'id="sweep"' not in reports["local"].report_page.read_text()


def test_the_page_has_no_script_and_no_address(reports):
    for result in reports.values():
        text = result.report_page.read_text()
        assert "<script" not in text
        addresses = {found.rstrip(":.,;)") for found in re.findall(r"https?://[^\s\"'<]+", text)}
        ours = {str(model.get("url")) for model in result.report["models"].values()}
        assert {a for a in addresses if not a.startswith("http://www.w3.org/")} <= ours
    assert "a$b$c" in reports["local"].report_page.read_text()
    assert "math" not in reports["local"].report_page.read_text(), "formulas are not drawn"


def test_text_of_models_is_shown_and_not_run(reports):
    report = json.loads(reports["local"].report_json.read_text())
    report["worst_positions"][0]["context"] = NASTY
    report["policy"]["description"] = NASTY
    text = render_page(report)
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x$") == 2


@needs_chromium
@pytest.mark.parametrize("kind", ["local", "served"])
async def test_the_page_draws_in_a_browser_from_disk(reports, kind, tmp_path):
    result = reports[kind]
    url = result.report_page.resolve().as_uri()
    backgrounds = set()
    async with tab(tmp_path / "profile") as page:
        for scheme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            await page.call("Emulation.setEmulatedMedia", features=media)
            for width in (390, 1280):
                await page.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=800,
                    deviceScaleFactor=1,
                    mobile=width < 600,
                )
                await page.open(url)
                assert await page.value("document.documentElement.scrollWidth") <= width
                assert await page.value("innerWidth") == width
                charts = await page.value(
                    "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect())"
                    ".map(r => r.width > 100 && r.height > 50)"
                )
                assert len(charts) >= 4
                assert all(charts)
            backgrounds.add(await page.value("getComputedStyle(document.body).backgroundColor"))
            bar = "getComputedStyle(document.querySelector('#histogram svg path[clip-path]')).fill"
            backgrounds.add(await page.value(bar))
        assert len(backgrounds) == 4, "paper and bars change with the scheme"
        verdict = await page.value("document.querySelector('h1 span').textContent")
        assert verdict == result.verdict.value
        marked = await page.value("document.querySelectorAll('.worst mark').length")
        assert marked == len(result.report["worst_positions"])
        assert page.requested() == {url}
        assert page.complaints() == []
