"""``taut bench gateway --guard``: its figures, its report, what it refuses, one short real run."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from taut_deploy.bench import gateway_guard
from taut_deploy.bench.gateway_guard import LOADS, Compared, Pair, Turn, process_seconds
from taut_deploy.bench.gateway_guard_report import document, markdown, write
from taut_deploy.bench.gateway_process import Running
from taut_deploy.bench.mock_readings import read, tokenized
from taut_deploy.cli import app
from taut_deploy.errors import MeasureError, WorkerError
from taut_service.guard.divergence import diverge, expected, read_distributions

SIDES = ("off", "on")
HOST = {"cpu": "2 x test", "date": "2026-11-27"}


def turn(cpu_ms: float, *latencies: float, compared: int = 0) -> Turn:
    drawn = {"compared": compared, "load": 0} if compared else {}
    return Turn(cpu_ms, latencies, 0, drawn, charged_ms=2.0 * compared)


def found() -> Compared:
    pairs = [
        Pair(turn(2.0, 1.0, 5.0), turn(2.2, 2.0, 6.0, compared=1), on_first=False),
        Pair(turn(2.0, 3.0, 4.0), turn(2.0, 4.0, 3.0, compared=2), on_first=True),
        Pair(turn(4.0, 2.0, 2.0), turn(6.0, 2.0, 2.0, compared=0), on_first=False),
    ]
    return Compared(HOST, 3.0, {load.name: list(pairs) for load in LOADS})


def test_report_has_the_median_of_the_pairs_their_range_and_how_much_was_compared() -> None:
    text = markdown(found())
    # Ratios 1.1, 1.0 and 1.5; medians of 2, 2, 4 and of 2.2, 2, 6.
    assert "| CPU ms an answer | 2 | 2.2 | **1.100** (1.000 to 1.500) |" in text
    # Six latencies a side: 1, 2, 2, 3, 4, 5 and 2, 2, 2, 3, 4, 6.
    assert "| p50 ms | 2 | 2 | 1.000 |" in text
    assert "| p99 ms | 5 | 6 | 1.200 |" in text
    assert "Compared: 3 of 6 answers (50.0%)." in text
    # On two answers each 0.2, 0 and 2 ms more.
    assert "A comparison: 1.5 CPU ms more, 2 by the guard's budget." in text
    assert "3 pairs of 3 s" in text
    assert "2 x test" in text


def test_files_have_a_row_a_turn_and_json_the_ratios(tmp_path: Path) -> None:
    files = write(found(), tmp_path / "out")
    rows = list(csv.DictReader(files[0].open()))
    assert len(rows) == len(LOADS) * 3 * 2
    assert [rows[3][name] for name in ("pair", "guard_first", "guard", "cpu_ms", "compared")] == [
        *("2", "1", "on", "2", "2")
    ]
    told = json.loads(json.dumps(document(found()), allow_nan=False))
    assert told["loads"]["streams"]["cpu_ms"]["ratios"] == [1.1, 1.0, 1.5]
    assert told["loads"]["whole"]["drawn"] == {"compared": 3, "load": 0}


@pytest.mark.parametrize("option", ["--rivals", "--cases", "--cache"])
def test_what_chooses_rivals_is_refused_beside_it(option: str) -> None:
    arguments = ["bench", "gateway", "--guard", option, "none"]
    with pytest.raises(MeasureError, match=f"{option}: --guard compares taut with itself"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_cpu_time_of_a_process_is_its_own() -> None:
    before, spent = process_seconds(os.getpid()), time.process_time()
    while time.process_time() - spent < 0.05:
        pass
    assert 0.05 <= process_seconds(os.getpid()) - before < 1.0
    with pytest.raises(WorkerError, match="has ended"):
        process_seconds(2**22 + 1)  # above the kernel's largest number of a process


def test_mock_reads_as_much_as_it_is_sent() -> None:
    tokens = json.loads(tokenized(b'{"prompt": "123456789"}').partition(b"\r\n\r\n")[2])
    assert (tokens["count"], len(tokens["tokens"])) == (3, 3)
    turns = b'{"messages": [{"role": "user", "content": "12345"}, {"content": "123"}]}'
    assert json.loads(tokenized(turns).partition(b"\r\n\r\n")[2])["count"] == 2
    answer = read(b'{"prompt": [5, 6, 7, 8], "prompt_logprobs": 5}').partition(b"\r\n\r\n")[2]
    places = read_distributions(json.loads(answer), 1, 4)
    assert [len(place) for place in places] == [6, 6, 6]
    assert all(own in place for own, place in zip((6, 7, 8), places, strict=True))
    again = read(b'{"prompt": [5, 6, 7, 8], "prompt_logprobs": 5}').partition(b"\r\n\r\n")[2]
    second = read_distributions(json.loads(again), 1, 4)
    kl, disagreement, _, _ = diverge(expected(places), second, 1.0)
    assert again != answer
    assert (kl < 1e-6, disagreement) == (True, 0.0)
    assert read(b'{"prompt": "x y", "prompt_logprobs": 99}').startswith(b"HTTP/1.1 400 ")
    assert read(b'{"prompt": 3, "prompt_logprobs": 1}').startswith(b"HTTP/1.1 400 ")
    assert tokenized(b'{"prompt": [1]}').startswith(b"HTTP/1.1 400 ")


def test_short_run_compares_answers_and_measures_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_guard, "LAST_COMPARISONS_S", 1.0)
    monkeypatch.setattr(gateway_guard, "SHARE", 0.5)
    # In 0.4 s the clients' work need not earn one comparison.
    monkeypatch.setattr(gateway_guard, "_ROOM", {**gateway_guard._ROOM, "max_cpu_share": None})
    started: list[str] = []

    def start(name: str, *rest: Any) -> Running:
        started.append(name)
        return Running(name, *rest)

    monkeypatch.setattr(gateway_guard, "Running", start)
    arguments = ["bench", "gateway", "--guard", "--rounds", "1", "--seconds", "0.4"]
    arguments += ["--output", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for load in LOADS:
        told = json.loads(done.output)["loads"][load.name]
        assert len(told["cpu_ms"]["ratios"]) == 2
        assert min(told["cpu_ms"]["ratios"]) > 0
        assert told["drawn"]["compared"] > 0
        assert told["comparison_ms"]["charged"] > 0
        assert told["answered_with_guard"] == 2 * int(load.rate * 0.4)
        assert 0 < told["p50_ms"]["on"] <= told["p99_ms"]["on"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"guard.csv", "guard.md"}
    rows = list(csv.DictReader((tmp_path / "out" / "guard.csv").open()))
    assert {row["guard_first"] for row in rows} == {"0", "1"}
    compared = {side: [int(r["compared"]) for r in rows if r["guard"] == side] for side in SIDES}
    assert (max(compared["off"]), min(compared["on"]) > 0) == (0, True)
    assert started == ["the gateway"], "two processes differ by more than a guard costs"
