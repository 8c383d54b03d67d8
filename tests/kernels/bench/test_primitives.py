"""The primitives' benchmark and tuning without a GPU: refusal, gate, report, candidates, tables."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import pytest
import torch

from taut_bench import primitives, primitives_cases, report
from taut_bench.primitives_cases import PARTS, Case, Subjects
from taut_kernels.primitives import conv2d_tiles, gemm_tiles
from taut_kernels.tuner import timing
from tuning import tune_primitives
from tuning.tune_primitives_jobs import BUCKETS, jobs_of, row_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [primitives.main, tune_primitives.main])
def test_without_a_gpu_the_commands_say_so(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    assert command(["--output", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_every_size_of_the_bars_is_run() -> None:
    cases = list(primitives_cases.cases(PARTS))
    assert {case.part for case in cases} == set(PARTS)
    names = {case.name for case in cases}
    assert {"4096×4096×4096 bf16", "8192×8192×8192 bf16", "4096×28672×4096 bf16"} <= names
    for N in (32, 128):
        for C, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
            assert f"{N}×{C}×{side}×{side}, 3×3, bf16 channels_last" in names
    products = [case for case in cases if case.part == "gemm"]
    assert products[0].flops == 2 * 4096**3
    assert products[0].bytes_moved == 3 * 2 * 4096**2
    layer = next(case for case in cases if case.name.startswith("32×64×56×56"))
    assert layer.flops == 2 * 32 * 56 * 56 * 64 * 64 * 9


def case(part: str = "transpose", flops: int = 0) -> Case:
    def make() -> Subjects:
        raise AssertionError("not to be made")

    return Case(part, "64×64", flops, 2**20, 4, make)


def row(kernel: str, us: float, of: Case) -> primitives.Row:
    return primitives.Row(of, kernel, timing.Timing(us, us, us), 4e12)


def test_wrong_and_failing_rungs_are_reported_and_not_timed() -> None:
    right = torch.ones(4, dtype=torch.bfloat16)

    def refuses(i: int) -> torch.Tensor:
        raise RuntimeError(f"no such tile {i}\nmore")

    subjects = Subjects(
        {"taut v1": lambda i: right, "taut v2": lambda i: right * 2, "taut v3": refuses},
        {"rival": lambda i: right * 3, "other": refuses},
        1,
        right.double(),
        right,
    )
    notes: list[str] = []
    assert set(primitives._checked(subjects, "here", notes)) == {"taut v1", "rival"}
    assert len(notes) == 3
    assert notes[0].startswith("taut v2 here: WRONG, not timed: error")
    assert notes[1:] == [
        "taut v3 here: FAILED: no such tile 0",
        "other here: not run: no such tile 0",
    ]


def test_report_compares_with_the_best_rival_and_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    moved, computed = case(), case("gemm", 2 * 10**9)
    rows = [row("taut v1", 40.0, moved), row("taut v4", 10.0, moved), row("torch", 20.0, moved)]
    rows += [row("copy", 8.0, moved), row("taut v4", 5.0, computed), row("cuBLAS", 4.0, computed)]
    primitives.write(rows, ["taut v5: FAILED: why"], 4e12, tmp_path)
    text = (tmp_path / "primitives.md").read_text()
    assert "taut v4 2.00 × torch; 0.80 of a copy" in text
    assert "taut v4 5.0 [5.0, 5.0] 400 TFLOP/s" in text
    assert "taut v4 0.80 × cuBLAS" in text
    assert "- taut v5: FAILED: why" in text
    with (tmp_path / "primitives.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert (cells[4]["TFLOP_per_s"], cells[0]["TFLOP_per_s"]) == ("400.0", "")
    assert cells[1]["GB_per_s"] == f"{2**20 / 10e-6 / 1e9:.1f}"


def test_winners_make_tables_that_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    rows = {
        part: [found for job in jobs_of(part) if (found := row_of(job, job.candidates[0], 2, 3))]
        for part in ("gemm", "conv2d")
    }
    tune_primitives.write_tables(rows, tmp_path)
    text = (tmp_path / "gemm-h100-80gb-hbm3.json").read_text()
    products = gemm_tiles.parse(text, "gemm")
    assert json.loads(text)["gpu"] == products.gpu == "NVIDIA H100 80GB HBM3"
    assert [limit for limit, _ in products.choices[4096, 4096]] == list(BUCKETS.values())
    layers = conv2d_tiles.parse((tmp_path / "conv2d-h100-80gb-hbm3.json").read_text(), "conv2d")
    assert [limit for limit, _ in layers.choices[64, 64, 3, 3, 56, 56]] == [64, None]


@pytest.mark.parametrize("part", ["gemm", "conv2d", "transpose"])
def test_every_shape_has_candidates_that_other_processes_can_compile(part: str) -> None:
    for job in jobs_of(part):
        assert len(set(job.candidates)) == len(job.candidates) >= 5, job.name
        assert pickle.loads(pickle.dumps(job)) == job
