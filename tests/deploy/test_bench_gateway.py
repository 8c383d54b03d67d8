"""``taut bench gateway``: what it chooses, refuses and writes, and one short real run."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from taut_deploy.bench import gateway as bench
from taut_deploy.bench.gateway import Cell, Results, choose
from taut_deploy.bench.gateway_cases import CASES, percentile
from taut_deploy.bench.gateway_report import document, markdown, write
from taut_deploy.bench.gateway_systems import DIRECT, RIVALS, TAUT
from taut_deploy.cli import app
from taut_deploy.errors import OutputError, TautError, WorkerError

HOST = {"cpu": "2 x test", "date": "2026-11-21"}


def results() -> Results:
    rival = RIVALS["envoy"]
    cells = [
        Cell(DIRECT, "latency", ({"p50_ms": 0.1}, {"p50_ms": 0.3}, {"p50_ms": 0.2})),
        Cell(TAUT, "small", ({"per_cpu_s": 9000.0}, {"per_cpu_s": 8000.0}, {"per_cpu_s": 8500.0})),
        Cell(TAUT, "latency", ({"p50_ms": 0.6}, {"p50_ms": 0.5}, {"p50_ms": 0.7})),
        Cell(rival, "small", ({"per_cpu_s": math.nan},)),
        Cell(rival, "disconnect-whole", ({"p99_ms": math.inf},)),
    ]
    return Results(
        HOST,
        3,
        1.0,
        systems=[DIRECT, TAUT, rival],
        cells=cells,
        not_run={"litellm": "pip failed"},
        failed=["envoy, sse, round 2: ConnectionResetError()"],
    )


def test_report_has_medians_ranges_rivals_and_what_was_not_run() -> None:
    text = markdown(results())
    assert "| taut | **8,500** (8,000 to 9,000) |" in text
    assert "| envoy | – |" in text
    assert "**never**" in text
    assert "**Not run: litellm**: pip failed" in text
    assert "**Failed**: envoy, sse, round 2" in text
    assert "taut +0.40 ms" in text
    assert "2 x test" in text
    assert "2026-11-21" in text


def test_files_are_written_and_the_csv_has_a_row_a_figure(tmp_path: Path) -> None:
    files = write(results(), tmp_path / "out")
    assert [file.suffix for file in files] == [".csv", ".md", ".png"]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(files[0].open()))
    row = next(row for row in rows if (row["system"], row["case"]) == ("taut", "small"))
    assert [row[name] for name in ("median", "lowest", "highest", "rounds")] == [
        "8500",
        "8000",
        "9000",
        "3",
    ]
    assert row["cpu"] == "2 x test"


def test_json_has_null_for_what_is_no_number() -> None:
    text = json.dumps(document(results()), allow_nan=False)
    assert '"p99_ms": null' in text


def test_choice_keeps_direct_and_taut_and_reports_what_cannot_be_had() -> None:
    every, _, _ = choose("vllm-router,vllm-router-round-robin,smg,litellm,envoy", "small")
    policies = [
        system.start(Path("f"), Path("p"), [1], 2).argv
        for system in every
        if system.start is not None and system.name.startswith("vllm-router")
    ]
    assert [argv[argv.index("--policy") + 1] for argv in policies] == ["cache_aware", "round_robin"]
    systems, cases, absent = choose("vllm-router, production-stack", "small,idle")
    assert [system.name for system in systems] == ["direct", "taut", "vllm-router"]
    assert [case.name for case in cases] == ["small"]
    assert "not on the package index" in absent["production-stack"]
    assert len(choose("none", "all")[1]) == len(CASES)


@pytest.mark.parametrize(
    ("rivals", "cases", "message"),
    [("nginx", "all", "--rivals: nginx is unknown"), ("none", "smal", "--cases: smal is unknown")],
)
def test_unknown_names_are_refused_with_the_known_ones(
    rivals: str, cases: str, message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        choose(rivals, cases)


def test_output_that_cannot_be_made_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["bench", "gateway", "--rivals", "none", "--output", str(tmp_path / "file" / "x")]
    with pytest.raises(OutputError, match=r"--output .*: Not a directory"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_one_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(TautError, match="two CPU cores"):
        bench.split_cores()


def test_percentile_is_a_value_that_was_seen() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.99) == 5.0
    assert percentile([1.0, math.inf], 0.99) == math.inf
    assert math.isnan(percentile([], 0.5))


def test_short_run_measures_the_gateway_and_the_direct_row(tmp_path: Path) -> None:
    arguments = ["bench", "gateway", "--rivals", "production-stack", "--rounds", "1"]
    arguments += ["--seconds", "0.3", "--cases", "small,sse,disconnect-whole"]
    arguments += ["--output", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    cells = {(cell["system"], cell["case"]): cell["rounds"][0] for cell in found["cells"]}
    assert list(found["not_run"]) == ["production-stack"]
    assert cells["taut", "small"]["per_cpu_s"] > 0
    assert cells["taut", "small"]["failed"] == 0
    assert cells["taut", "sse"]["per_cpu_s"] > 0
    assert cells["taut", "disconnect-whole"]["never_closed"] == 0
    assert cells["taut", "idle"]["rss_mb"] > 10
    assert cells["taut", "idle"]["ready_s"] > 0
    assert cells["direct", "small"]["done_per_s"] > 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "gateway.csv",
        "gateway.md",
        "gateway.png",
    }
