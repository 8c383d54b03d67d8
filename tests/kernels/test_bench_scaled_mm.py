"""The bench and tuner of the 8-bit products, without a GPU: what is timed, noted and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from taut_kernels import tiles_scaled_mm
from taut_kernels.bench import report, scaled_mm_rivals, timing, tune_scaled_mm
from taut_kernels.bench.scaled_mm_candidates import BUCKETS
from taut_kernels.bench.scaled_mm_layer import KINDS, SHAPES, Layer
from taut_kernels.testing_scaled_mm import make_scaled_mm_case


def _layer(op: str, *_: Any) -> Layer:
    case = make_scaled_mm_case(op, 4, 64, 128, out_dtype=torch.bfloat16)
    return Layer(
        op, case.x, case.weight, case.x_scale, case.weight_scale, case.gold(), case.reference()
    )


@pytest.mark.parametrize("op", sorted(KINDS.values()))
def test_what_is_wrong_or_cannot_run_is_noted_and_not_timed(op: str) -> None:
    layer = _layer(op)

    def refuses(M: int) -> torch.Tensor:
        raise RuntimeError("no such shape\nand more")

    calls = {
        "taut": [lambda M: layer.reference[:M]],
        "CUTLASS": [lambda M: layer.reference[:M] * 1.1],
        "vLLM Triton": [refuses],
        "_int_mm": [lambda M: layer.reference[:M] * 7],
    }
    notes: list[str] = []
    subjects = scaled_mm_rivals.checked_subjects(layer, calls, 4, notes)
    assert [subject.name for subject in subjects] == ["taut"]
    assert len(notes) == 2
    assert notes[0].startswith(f"CUTLASS on {op} (64, 128), M=4: WRONG, not timed: error")
    assert notes[1] == f"vLLM Triton on {op} (64, 128), M=4: not run: no such shape"


def test_rivals_that_leave_the_scales_out_are_run_but_not_compared() -> None:
    layer = _layer("w8a8_gemm")
    calls = {"_int_mm": [lambda M: layer.reference[:M] * 7]}
    notes: list[str] = []
    # Seventeen tokens are the fewest `torch._int_mm` takes.
    assert scaled_mm_rivals.checked_subjects(layer, calls, 16, notes) == []
    (subject,) = scaled_mm_rivals.checked_subjects(layer, calls, 17, notes)
    assert (subject.name, notes) == ("_int_mm", [])


def test_what_is_not_installed_or_not_for_the_type_leaves_a_note() -> None:
    layer, notes = _layer("w8a8_gemm"), list[str]()
    ready = scaled_mm_rivals.prepare_all(
        layer, ["taut", "_int_mm", "_scaled_mm rows"], [layer.weight], notes
    )
    assert set(ready) == {"taut", "_int_mm"}
    assert notes == ["_scaled_mm rows on w8a8_gemm (64, 128): not run: takes FP8 only"]
    assert layer.why_wrong(ready["taut"][0](3)) is None


def test_tuning_writes_a_table_the_look_up_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(subjects: list[timing.Subject], *_: int) -> list[timing.Timing]:
        return [timing.Timing(10.0 + (s.name == "_int_mm"), 1.0, 1.0) for s in subjects]

    def launch(tile: Any, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        op = torch.ops.taut.w8a8_gemm if x.dtype is torch.int8 else torch.ops.taut.fp8_gemm
        return op(x, weight, *(rest if x.dtype is torch.int8 else rest[:2] + rest[4:]))

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(tune_scaled_mm, "launch", launch)
    monkeypatch.setattr(tune_scaled_mm, "RIVALS", ("_int_mm",))
    monkeypatch.setattr(tune_scaled_mm, "VLLM", "_int_mm")
    monkeypatch.setattr(tune_scaled_mm, "make_layer", _layer)
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card 9"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card 9")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shape = "o"
    tuning = tune_scaled_mm.Tuning(tmp_path, 1, [shape], BUCKETS)
    tiles = {
        cell: [tiles_scaled_mm.rule("fp8_gemm", *SHAPES[shape], cell[1][-1])]
        for cell in tuning.cells()
    }
    for kind in KINDS:
        tuning.conclude(kind, tuning.time_all(kind, tiles))
    table = tiles_scaled_mm.parse((tmp_path / "table.json").read_text(), "table.json")
    assert table.gpu == "card 9"
    assert set(table.buckets) == {(op, *SHAPES[shape]) for op in KINDS.values()}
    for (op, _, _), buckets in table.buckets.items():
        assert [bucket.max_m for bucket in buckets] == [max_m for max_m, _ in BUCKETS]
        # Without a rival nothing is won: the plugin keeps vLLM's kernel.
        has_rival = [op == "w8a8_gemm" and min(Ms) > 16 for _, Ms in BUCKETS]
        assert [bucket.wins for bucket in buckets] == has_rival
    assert "_int_mm 11.00 (1.100)" in capsys.readouterr().out
