"""The rule by which a W4A16 layer is ours, and the tables it reads."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_kernels import _tile_tables, measured_w4a16
from taut_kernels.bench import measured_table

RESULTS = Path(__file__).parents[2] / "kernels" / "bench_results"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def _row(**change: Any) -> dict[str, Any]:
    row = {"N": 64, "K": 128, "M": [1, 256], "us": [2.0, 4.0], "vllm_us": [4.0, 4.0]}
    return row | change


def _parse(*rows: dict[str, Any]) -> measured_w4a16.MeasuredTable:
    text = json.dumps({"gpu": "card", "source": "here", "rows": list(rows)})
    return measured_w4a16.parse(text, "t.json")


@pytest.mark.parametrize(
    ("ratios", "decode", "overall", "wins"),
    [
        ({1: 2.0, 256: 1.0}, 2.0, math.sqrt(2), True),
        ({1: 2.0, 64: 0.5, 65: 1.0}, 1.0, 1.0, True),  # 64 still is decode
        ({1: 0.9, 256: 4.0}, 0.9, math.sqrt(3.6), False),  # slower in decode: no gain makes it good
        ({1: 1.2, 256: 0.5}, 1.2, math.sqrt(0.6), False),  # prefill costs more than decode gains
        # Prefill counts half, at however many M it was measured.
        ({1: 1.5, 128: 0.8, 256: 0.8, 1024: 0.8, 4096: 0.8}, 1.5, math.sqrt(1.2), True),
    ],
)
def test_the_rule(ratios: dict[int, float], decode: float, overall: float, wins: bool) -> None:
    measured = measured_w4a16.Measured(ratios)
    assert measured.decode == pytest.approx(decode)
    assert measured.overall == pytest.approx(overall)
    assert measured.wins is wins


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([_row(M=[1, 2])], "t.json: N=64 K=128: needs an M of at most 64 and one above"),
        ([_row(us=[1.0])], "the last three of one length"),
        ([_row(bits=4)], "a row needs exactly"),
        ([_row(us=[0.0, 1.0])], "N=64 K=128"),
        ([_row(vllm_us=[0.0, 1.0])], "times must be positive"),
        ([_row(M=[1, 1])], "an M is there twice"),
        ([_row(), _row()], "N=64 K=128 is there twice"),
    ],
)
def test_a_table_that_cannot_be_judged_is_refused(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _parse(*rows)


def test_reasons_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _parse(
        _row(),
        _row(N=80, vllm_us=[1.0, 4.0]),
        _row(N=96, M=[1, 32, 256], us=[1.0, 1.0, 1.0], vllm_us=[4.0, 0.8, 0.9]),
    )
    monkeypatch.setattr(measured_w4a16, "tables", lambda: {"card": table})
    ask, note = measured_w4a16.why_not_preferred, measured_w4a16.slower_in_places
    assert ask("card", 64, 128) is None
    assert ask("card", 64, 256) == "64×256 not measured against vLLM's kernels on card"
    assert ask("other", 64, 128) == "not measured against vLLM's kernels on other"
    assert ask("card", 80, 128) == (
        "slower than vLLM's kernels: 0.50 of their speed up to 64 tokens, 0.71 over all"
    )
    assert ask("card", 96, 128) is None
    assert (
        note("card", 96, 128) == "slower than vLLM's at 32, 256 tokens (0.80 to 0.90 of its speed)"
    )
    assert note("card", 80, 128) == "slower than vLLM's at 1 tokens (0.50 of its speed)"
    for gpu, N in (("card", 64), ("card", 1), ("other", 96), (None, 96)):
        assert note(gpu, N, 128) is None


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ((64, 128, torch.bfloat16, False), None),
        ((64, 32, torch.bfloat16, True), "not in groups of 32 with zero points in bfloat16"),
        ((64, 128, torch.float16, False), "not in groups of 128 in float16"),
        ((64, -1, torch.bfloat16, False), "not in groups of a channel in bfloat16"),
        ((80, 128, torch.bfloat16, False), "slower than vLLM's at 1 tokens (0.50 of its speed)"),
        ((80, 64, torch.bfloat16, False), "1 tokens (0.50 of its speed); timed in symmetric"),
        ((1, 32, torch.float16, True), None),
    ],
)
def test_a_format_nobody_timed_is_said(
    layer: tuple[int, int, torch.dtype, bool], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _parse(_row(K=256), _row(N=80, K=256, vllm_us=[1.0, 9.0]))
    monkeypatch.setattr(measured_w4a16, "tables", lambda: {"card": table})
    N, group_size, dtype, has_zeros = layer
    for gpu in ("card", None):
        found = measured_w4a16.remark(gpu, N, 256, group_size, dtype, has_zeros=has_zeros)
        if gpu is None or said is None:
            assert found is None
        else:
            assert said in str(found)


def test_a_card_is_not_judged_by_the_figures_of_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _tile_tables.TWINS[H100] == H200
    monkeypatch.setattr(measured_w4a16, "tables", lambda: {H200: _parse(_row(vllm_us=[1.0, 9.0]))})
    reason = measured_w4a16.why_not_preferred(H100, 64, 128)
    assert reason == f"not measured against vLLM's kernels on {H100}"
    assert measured_w4a16.slower_in_places(H100, 64, 128) is None
    assert measured_w4a16.slower_in_places(H200, 64, 128) is not None


def test_every_shipped_table_parses() -> None:
    names = sorted(path.name for path in _tile_tables._DIRECTORY.glob("w4a16_measured-*.json"))
    assert names == ["w4a16_measured-h100.json", "w4a16_measured-h200.json"]
    assert set(measured_w4a16.tables()) == {H100, H200}


@pytest.mark.parametrize(
    ("gpu", "slow"),
    [
        (H200, "768, 1024, 1344, 2048, 4096 tokens (0.90 to 0.98 of its speed)"),
        (H100, "512, 1024, 2048, 4096 tokens (0.91 to 0.99 of its speed)"),
    ],
    ids=["h200", "h100"],
)
def test_every_measured_shape_is_ours_on_both_cards(gpu: str, slow: str) -> None:
    shapes = measured_w4a16.tables()[gpu].shapes
    assert len(shapes) == 20
    for N, K in shapes:
        assert measured_w4a16.why_not_preferred(gpu, N, K) is None
    for N, K in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (8192, 8192)):
        assert (N, K) in shapes
    note = measured_w4a16.slower_in_places(gpu, 28672, 4096)
    assert note == f"slower than vLLM's at {slow}"


# --- from the benchmark's CSV --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "results", "later", "shipped", "decode"),
    [
        (
            H200,
            "2026-11-22-h200",
            [
                "2026-11-24-h200/w4a16-128.csv",
                "2026-11-25-h200/w4a16.csv@512",
                "2026-11-25-h200-04h/w4a16.csv",
                "2026-11-25-h200-04h/w4a16-down.csv",
            ],
            "w4a16_measured-h200.json",
            "1.4",
        ),
        (H100, "2026-11-23-h100", [], "w4a16_measured-h100.json", "1.3"),
    ],
    ids=["h200", "h100"],
)
def test_the_shipped_tables_are_what_the_committed_benchmarks_say(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gpu: str,
    results: str,
    later: list[str],
    shipped: str,
    decode: str,
) -> None:
    names = [f"{results}/w4a16-models.csv", f"{results}/w4a16.csv", *later]
    inputs = [str(RESULTS / name) for name in names]
    output = tmp_path / "t.json"
    arguments = [*inputs, "--gpu", gpu, "--source", "x", "--output", str(output)]
    assert measured_table.main(arguments) == 0
    assert f"28672×4096: decode {decode}" in capsys.readouterr().out
    table = json.loads((_tile_tables._DIRECTORY / shipped).read_text())
    assert json.loads(output.read_text())["rows"] == table["rows"]
    assert table["gpu"] == gpu
    for name in (f"{results}/w4a16-models.csv, w4a16.csv", *later):
        assert f"bench_results/{name}" in table["source"]


def _csv(path: Path, *cells: tuple[int, str, float]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["shape", "N", "K", "M", "kernel", "us"])
        writer.writerows(["o", 64, 128, M, kernel, us] for M, kernel, us in cells)
    return path


def test_figures_of_two_runs_never_meet_in_one_ratio(tmp_path: Path) -> None:
    first = _csv(tmp_path / "a.csv", (1, "taut", 5.0), (1, "Marlin", 6.0), (256, "taut", 9.0))
    second = _csv(
        tmp_path / "b.csv",
        (1, "taut", 4.0),  # alone in this run: the first run's pair stays
        (256, "Machete", 8.0),  # likewise alone: the cell is left out
        (512, "taut", 2.0),
        (512, "Marlin", 7.0),
        (512, "Machete", 3.0),
        (512, "gemlite", 1.0),  # no kernel of vLLM's
    )
    cells = measured_table.read([first, second])
    assert cells[64, 128][1] == {"taut": 5.0, "Marlin": 6.0}
    assert 256 not in cells[64, 128]
    (row,) = json.loads(measured_table.table(cells, "card", "s"))["rows"]
    assert row == {"N": 64, "K": 128, "M": [1, 512], "us": [5.0, 2.0], "vllm_us": [6.0, 3.0]}


def test_a_file_may_count_from_some_tokens_on(tmp_path: Path) -> None:
    first = _csv(tmp_path / "a.csv", (1, "taut", 5.0), (1, "Marlin", 6.0))
    cells = [(M, kernel, 2.0) for M in (1, 256, 512, 1024) for kernel in ("taut", "Machete")]
    odd = _csv(tmp_path / "b@512", *cells)
    found = measured_table.read([first, f"{odd}@512"])[64, 128]
    assert sorted(found) == [1, 512, 1024]
    assert found[1] == {"taut": 5.0, "Marlin": 6.0}
    with pytest.raises(FileNotFoundError):  # of a file so named, the end is a number of tokens
        measured_table.read([odd])


def test_a_wrong_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    common = ["--gpu", "c", "--source", "s", "--output", str(tmp_path / "o")]
    assert measured_table.main([str(path), *common]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: not a CSV of a benchmark")
    assert measured_table.main([str(tmp_path / "none.csv"), *common]) == 2
    capsys.readouterr()
    path.write_text("N,K,M,kernel,us,group_size\n64,128,1,taut g32,1.0,32\n")
    assert measured_table.main([str(path), *common]) == 2
    assert "rows of another format" in capsys.readouterr().err
