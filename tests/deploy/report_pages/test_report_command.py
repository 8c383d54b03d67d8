"""``taut report``: the page of a validation or a rollout, found or drawn, and what is none."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import typer
from browser import needs_chromium, tab

from taut_deploy.cli import main
from taut_deploy.pages.rollout import read_log, render_rollout

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLES / "validation", tmp_path / "validated")


@pytest.fixture
def rolled(tmp_path: Path) -> Path:
    """A rehearsal's output: the log lies in a folder of its own."""
    folder = tmp_path / "rehearsal"
    (folder / "rollout").mkdir(parents=True)
    shutil.copy(EXAMPLES / "rollout" / "audit.jsonl", folder / "rollout")
    return folder


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    found: dict[str, str] = json.loads(capsys.readouterr().out)
    return found


def test_a_validations_page_is_the_one_beside_its_report(validated, capsys):
    page = validated / "report.html"
    before = page.read_bytes()
    assert main(["report", str(validated), "--json"]) == 0
    assert told(capsys) == {"kind": "validation", "page": str(page), "log": ""}
    assert page.read_bytes() == before
    page.unlink()
    assert main(["report", str(validated), "--json"]) == 0
    assert "Where they differ most" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda report: report.pop("verdict"), "the report: 'verdict' is a required property"),
        (lambda report: report.update(verdict="PAS"), "verdict: 'PAS' is not one of"),
        (
            lambda report: report["metrics"]["mean_kl"].update(high=math.nan),
            "metrics.mean_kl.high is not a finite number",
        ),
        (
            lambda report: report["metrics"]["mean_kl"].pop("low"),
            "metrics.mean_kl: 'low' is a required property",
        ),
    ],
)
@pytest.mark.parametrize("drawn", [True, False])
def test_a_report_that_no_validation_wrote_is_refused_by_place(
    validated, capsys, change, problem, drawn
):
    file = validated / "report.json"
    report = json.loads(file.read_text(encoding="utf-8"))
    change(report)
    file.write_text(json.dumps(report))
    if not drawn:
        (validated / "report.html").unlink()
    assert main(["report", str(validated)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file}: {problem}" in line
    assert (validated / "report.html").exists() == drawn


@pytest.mark.parametrize("where", ["rehearsal", "the gateway's own folder"])
def test_a_rollouts_page_is_drawn_from_its_log(rolled, capsys, where):
    folder = rolled if where == "rehearsal" else rolled / "rollout"
    assert main(["report", str(folder), "--json"]) == 0
    found = told(capsys)
    assert found["kind"] == "rollout"
    assert found["log"].startswith("ok, 7 line(s), newest hash 372f2f51")
    text = Path(found["page"]).read_text(encoding="utf-8")
    assert text.index("rehearsed: candidate") < text.index("rehearsed: harmed"), "the newest first"
    assert text.count("<svg") == 2
    assert "harm: kl of all answers is 0.2033 over 119" in text
    assert "136 answers, 7288 tokens, cut -0.0294" in text


def test_it_opens_what_it_found_where_that_is_asked_for(validated, rolled, tmp_path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(typer, "launch", opened.append)
    assert main(["report", str(validated), "--open"]) == 0
    output = tmp_path / "elsewhere.html"
    assert main(["report", str(rolled), "--output", str(output), "--open"]) == 0
    assert main(["report", str(rolled), "--no-open"]) == 0
    assert main(["report", str(rolled)]) == 0, "a pipe has no screen"
    assert opened == [(validated / "report.html").as_uri(), output.as_uri()]


def altered(folder: Path) -> None:
    log = folder / "rollout" / "audit.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([lines[0], lines[1].replace('"tokens":7288', '"tokens":9'), *lines[2:]]))


def of_another(folder: Path) -> None:
    shutil.rmtree(folder / "rollout")
    (folder / "report.json").write_text('{"schema": "taut-frontier"}')


def of_another_version(folder: Path) -> None:
    shutil.rmtree(folder / "rollout")
    (folder / "report.json").write_text('{"schema": "taut-validation-report", "schema_version": 1}')


def broken_off(folder: Path) -> None:
    shutil.rmtree(folder / "rollout")
    (folder / "partial.json").write_text("{}")


BAD = {
    "a changed log": (altered, "line 2: was changed: its hash does not match"),
    "no log": (lambda folder: shutil.rmtree(folder / "rollout"), "has neither report.json"),
    "an empty log": (
        lambda folder: (folder / "rollout" / "audit.jsonl").write_text(""),
        "the log is empty",
    ),
    "another report": (of_another, "is no report of taut validate"),
    "an old report": (of_another_version, "schema_version is 1, and this version draws"),
    "a validation that broke off": (broken_off, "broke off and has no report"),
    "no folder": (shutil.rmtree, "no such directory"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_page_is_one_line(rolled, capsys, name):
    change, problem = BAD[name]
    change(rolled)
    assert main(["report", str(rolled)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert not list(rolled.rglob("*.html"))


def test_without_the_gateway_the_page_says_that_hashes_were_not_checked(
    rolled, monkeypatch, capsys
):
    monkeypatch.setattr("taut_deploy.pages.folder._GATEWAY", "not_there")
    assert main(["report", str(rolled), "--json"]) == 0
    found = told(capsys)
    assert found["log"] == "hashes not checked: taut[service] is not installed"
    assert found["log"] in Path(found["page"]).read_text(encoding="utf-8")


@needs_chromium
async def test_a_rollouts_page_draws_in_a_browser_from_disk(rolled, tmp_path):
    assert main(["report", str(rolled)]) == 0
    url = (rolled / "rollout.html").resolve().as_uri()
    backgrounds = set()
    async with tab(tmp_path / "profile") as page:
        for scheme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            await page.call("Emulation.setEmulatedMedia", features=media)
            for width in (390, 1280):
                size = {"width": width, "height": 800, "deviceScaleFactor": 1}
                await page.call("Emulation.setDeviceMetricsOverride", mobile=width < 600, **size)
                await page.open(url)
                assert await page.value("document.documentElement.scrollWidth") <= width
            backgrounds.add(await page.value("getComputedStyle(document.body).backgroundColor"))
        drawn = "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)"
        assert min(await page.value(drawn)) > 50
        assert page.requested() == {url}
        assert page.complaints() == []
    assert len(backgrounds) == 2


def test_what_people_wrote_into_a_log_is_shown_and_not_run(rolled):
    lines = read_log(rolled / "rollout" / "audit.jsonl")
    nasty = "<script>alert(1)</script>"
    lines[-1].state.why = lines[-1].actor = nasty
    lines[-1].facts["means"] = {"kl": nasty, "loop": 0.5}
    text = render_rollout(lines, "audit.jsonl", "ok")
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 3  # said above the table as well; no mean is a text
    assert "loop 0.5" in text
