"""The fused-op benchmark without a GPU: refusal, bytes, report, table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from taut_kernels import tiles_fused
from taut_kernels.bench import fused, fused_report, report, timing, tune_fused
from taut_kernels.bench.fused_cases import FORMS, bytes_moved
from taut_kernels.tiles_fused import FusedTile


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("more", [[], ["--tune"]])
def test_without_a_gpu_the_command_says_so(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fused.main(["--output", str(tmp_path), *more]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_bytes_are_what_a_call_cannot_avoid() -> None:
    M, N = 3, 64
    assert bytes_moved(FORMS["rms_norm"], N, M) == M * N * 4 + 2 * N
    assert bytes_moved(FORMS["add_rms_norm_int8"], N, M) == M * N * (2 + 4 + 1) + 2 * N
    assert bytes_moved(FORMS["silu_mul"], N, M) == M * N * 6
    assert bytes_moved(FORMS["silu_mul_fp8"], N, M) == M * N * 5
    assert bytes_moved(FORMS["rope"], 40, M) == 4 * M * 40 * 128 + 8 * M


def test_every_form_is_of_an_op_with_tiles() -> None:
    assert {form.op for form in FORMS.values()} == set(tiles_fused.OPS)


def test_widths_are_the_models_or_those_asked_for() -> None:
    assert fused.widths_of("silu_mul", None, ["8b"]) == [14336]
    assert fused.widths_of("rope", None, ["8b", "70b"]) == [40, 72]
    assert fused.widths_of("rope", [7], ["8b"]) == [7]


def test_report_names_the_best_rival_and_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    times = {"taut": 10.0, "vLLM": 14.0, "Liger": 12.0, "copy": 8.0}
    rows = [
        fused_report.Row("rms_norm", 4096, 64, kernel, timing.Timing(us, us, us), 8_000_000, 1.6e12)
        for kernel, us in times.items()
    ]
    fused_report.write(rows, ["host µs a call"], 1.6e12, tmp_path)
    text = (tmp_path / "fused.md").read_text()
    assert "1.20 (Liger) | 50% |" in text
    assert "- host µs a call" in text
    with (tmp_path / "fused.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert [(c["kernel"], c["us"]) for c in cells][1] == ("vLLM", "14.000")
    assert cells[0]["GB_per_s"] == "800.0"


def test_table_takes_the_least_sum_over_forms_and_joins_equal_neighbours() -> None:
    one, two = (FusedTile(1, block, 4) for block in (1024, 2048))
    results = [
        tune_fused.Timed(form, "rms_norm_quant", 4096, M, us, tile)
        for form, times in (
            ("rms_norm_fp8", {1: (1.0, 2.0), 64: (1.0, 3.0), 4096: (9.0, 5.0)}),
            ("rms_norm_int8", {1: (1.5, 2.0), 64: (4.0, 3.0), 4096: (9.0, 5.0)}),
        )
        for M, pair in times.items()
        for us, tile in zip(pair, (one, two), strict=True)
    ]
    results.append(
        tune_fused.Timed("rms_norm_fp8", "rms_norm_quant", 4096, 64, 0.1, FusedTile(2, 64, 2))
    )
    rows = tune_fused.table_rows(results)
    assert [(row["max_m"], row["tile"]["block"], row["us"]) for row in rows] == [
        (64, 1024, [1.0, 4.0]),
        (None, 2048, [5.0, 5.0]),
    ]


def test_table_takes_the_neighbours_tile_where_times_are_equal() -> None:
    one, two = (FusedTile(1, block, 4) for block in (1024, 2048))
    times = {1: (1.00, 1.01), 64: (1.0, 1.5), 4096: (10.0, 9.0), 8192: (20.1, 20.0)}
    results = [
        tune_fused.Timed("rms_norm", "rms_norm", 4096, M, us, tile)
        for M, pair in times.items()
        for us, tile in zip(pair, (one, two), strict=True)
    ]
    rows = tune_fused.table_rows(results)
    assert [(row["max_m"], row["tile"]["block"]) for row in rows] == [(64, 1024), (None, 2048)]


def test_candidates_fit_the_registers() -> None:
    for name, form in FORMS.items():
        for N in fused.widths_of(name, None, ["8b", "70b"]):
            for M in (1, 64, 4096):
                found = list(tune_fused.candidates(form, N, M))
                assert found, name
                assert len(set(found)) == len(found)
                assert all(tile.rows <= M or form.op == "rope" for tile in found)


def test_long_activations_are_tried_with_32_warps() -> None:
    found = set(tune_fused.candidates(FORMS["silu_mul_fp8"], 28672, 4096))
    assert {FusedTile(1, 8192, 32), FusedTile(1, 16384, 32)} <= found
    # Where two rows of it would be held, 64 registers are too few.
    assert FusedTile(2, 8192, 32) not in found
