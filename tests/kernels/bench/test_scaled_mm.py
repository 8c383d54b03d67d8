"""The bench and tuner of the 8-bit products, without a GPU: what is timed, noted and written."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_bench import report, scaled_mm_rivals
from taut_bench.scaled_mm_layer import KINDS, Layer, make_layer
from taut_bench.shapes import PRODUCTS
from taut_bench.testing.scaled_mm import make_scaled_mm_case
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import rule as tiles_scaled_mm_rule
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.tuner import timing
from tuning import scaled_mm_compile, tune_scaled_mm
from tuning.scaled_mm_candidates import BUCKETS
from tuning.scaled_mm_results import Final, parts_of_bucket


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


@pytest.fixture
def without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(subjects: list[timing.Subject], *_: int) -> list[timing.Timing]:
        return [timing.Timing(10.0 + (s.name == "_int_mm"), 1.0, 1.0) for s in subjects]

    def launch(tile: Any, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        if tile.kernel == "turns" and tile.block_n == 256:
            raise RuntimeError("no such kernel here\nand more")
        op = torch.ops.taut.w8a8_gemm if x.dtype is torch.int8 else torch.ops.taut.fp8_gemm
        y: torch.Tensor = op(x, weight, *(rest if x.dtype is torch.int8 else rest[:2] + rest[4:]))
        return y * 1.1 if tile.kernel == "hopper" and tile.block_n == 256 else y

    monkeypatch.setattr(timing, "measure", measure)
    # Of so small a layer 30,000 copies would go round; as many counters were made for each tile.
    monkeypatch.setattr(timing, "copies_needed", lambda _: 2)
    monkeypatch.setattr(scaled_mm_compile, "launch", launch)
    monkeypatch.setattr(tune_scaled_mm, "RIVALS", ("_int_mm",))
    monkeypatch.setattr(tune_scaled_mm, "VLLM", "_int_mm")
    monkeypatch.setattr(tune_scaled_mm, "make_layer", _layer)
    monkeypatch.setattr(tune_scaled_mm, "Compilers", _NoCompilers)
    monkeypatch.setattr(tune_scaled_mm, "_import_rivals", lambda: None)
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card 9"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card 9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


class _NoCompilers:
    def __init__(self, processes: int) -> None:
        assert processes == 15

    def compile(self, jobs: Any) -> None:
        assert all(op in KINDS.values() for op, _ in jobs)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.usefixtures("without_a_card")
def test_tuning_writes_a_table_the_look_up_reads(
    known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, options = ("qwen2.5-7b/o", ["--known"]) if known else ("o", [])
    tokens = () if known else ("--tokens", "64,512,4096")
    assert (
        tune_scaled_mm.main(["--output", str(tmp_path), "--shape", shape, *options, *tokens]) == 0
    )
    tried = [(max_m, Ms) for max_m, Ms in BUCKETS if known or Ms[-1] in (64, 512, 4096)]
    table = tiles_scaled_mm.parse((tmp_path / "table.json").read_text(), "table.json")
    assert table.gpu == "card 9"
    assert set(table.choices) == {(op, *PRODUCTS[shape]) for op in KINDS.values()}
    for (op, _, _), rows in table.choices.items():
        buckets = [alone for _, (alone, _) in rows]
        assert [bucket.max_m for bucket in buckets] == [max_m for max_m, _ in tried]
        # Without a rival nothing is won: the plugin keeps vLLM's kernel.
        has_rival = [op == "w8a8_gemm" and min(Ms) > 16 for _, Ms in tried]
        assert [bucket.wins for bucket in buckets] == has_rival
        # Neither what was wrong nor what raised gets into the table.
        assert not any(b.tile.block_n == 256 and b.tile.kernel != "ring" for b in buckets)
    out = capsys.readouterr().out
    assert "_int_mm 11.00 (1.100)" in out
    assert "turns 64x256x128/4w/5s/g16: no such kernel here\n" in out
    assert "hopper 128x256x128/4w/4s/g16: error" in out
    figures = list(csv.DictReader((tmp_path / "finals.csv").open()))
    assert {row["kernel"] for row in figures if row["M"] == "4096"} > {"_int_mm"}


@pytest.mark.usefixtures("without_a_card")
def test_a_run_that_is_cut_leaves_only_whole_products_in_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--output", str(tmp_path), "--shape", "o", "--known"]
    assert tune_scaled_mm.main([*arguments, "--tokens", "32"]) == 0
    assert json.loads((tmp_path / "table.json").read_text())["rows"] == []
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["op"], row["max_m"]) for row in rows] == [("fp8_gemm", 32), ("w8a8_gemm", 32)]
    assert tune_scaled_mm.main([*arguments, "--seconds", "0.000001"]) == 0
    assert "fp8 o: not run: the time was over" in capsys.readouterr().out


LOW, HIGH = (ScaledMmTile("hopper", 128, n, 128, 4, 4) for n in (128, 256))


@pytest.mark.parametrize(
    ("Ms", "low", "high", "vllm", "expected"),
    [
        ((1, 16), (1.0, 2.0), (5.0, 1.0), (9.0, 9.0), [(512, LOW, 2)]),
        ((320, 512), (5.0, 9.0), (5.0, 8.0), (9.0, 9.0), [(512, HIGH, 2)]),
        # Another tile is clearly faster at the lower end: its last tile of tokens ends the bucket.
        ((320, 512), (4.0, 9.0), (5.0, 7.0), (9.0, 9.0), [(384, LOW, 1), (512, HIGH, 1)]),
        # One tile, but vLLM's is the faster one at the upper end, or at the lower.
        ((640, 1024), (9.0, 9.0), (5.0, 8.0), (6.0, 7.0), [(640, HIGH, 1), (512, HIGH, 1)]),
        ((640, 1024), (9.0, 9.0), (5.0, 8.0), (4.0, 9.0), [(640, HIGH, 1), (512, HIGH, 1)]),
    ],
)
def test_a_bucket_is_cut_where_its_ends_differ(
    Ms: tuple[int, int],
    low: tuple[float, float],
    high: tuple[float, float],
    vllm: tuple[float, float],
    expected: list[tuple[int, ScaledMmTile, int]],
) -> None:
    finals = [
        Final(M, {LOW: _timing(a), HIGH: _timing(b)}, {"CUTLASS": _timing(theirs)})
        for M, a, b, theirs in zip(Ms, low, high, vllm, strict=True)
    ]
    parts = parts_of_bucket(512, finals, "CUTLASS")
    assert [(part.max_m, part.tile, len(part.finals)) for part in parts] == expected


def test_a_cut_bucket_ends_with_the_last_tile_of_its_tokens() -> None:
    """At 321 tokens tiles of 64 are one more: another wave, maybe, that nobody timed."""
    few = ScaledMmTile("turns", 64, 160, 128, 4, 6)
    finals = [
        Final(M, {few: _timing(a), HIGH: _timing(b)}, {"CUTLASS": _timing(9.0)})
        for M, a, b in ((320, 4.0, 5.0), (512, 8.0, 6.0))
    ]
    parts = parts_of_bucket(512, finals, "CUTLASS")
    assert [(part.max_m, part.tile) for part in parts] == [(320, few), (512, HIGH)]


def _timing(us: float) -> timing.Timing:
    return timing.Timing(us, us, us)


def test_the_best_of_each_end_are_timed_beside_the_rivals() -> None:
    found = {LOW: [3.0, 3.0], HIGH: [4.0, 3.0], WIDE: [2.0, 6.0], SQUARE: [9.0, 1.0]}
    assert tune_scaled_mm.finalists(found) == [LOW, HIGH, WIDE, SQUARE]


def test_the_tile_that_ships_is_timed_beside_the_finalists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A row changes by a time beside the one it has, though that came last in the search."""
    layer = make_layer("fp8_gemm", 64, 256, 4, device="cpu")
    shipped = tiles_scaled_mm_rule.rule("fp8_gemm", 64, 256, 4)
    us = {LOW: 1.0, HIGH: 2.0, WIDE: 3.0, shipped: 9.0}
    tuning = tune_scaled_mm.Tuning(
        tune_scaled_mm.Results(tmp_path, "CUTLASS"), tune_scaled_mm.FULL, 1, 1e9
    )
    beside: list[ScaledMmTile] = []

    def final(layer: Layer, M: int, tiles: list[ScaledMmTile], *_: object) -> Final:
        beside.extend(tiles)
        return Final(M, {tile: _timing(us[tile]) for tile in tiles}, {})

    monkeypatch.setattr(
        tuning, "_search", lambda where, layer, M, tiles, copies: {tile: us[tile] for tile in tiles}
    )
    monkeypatch.setattr(tuning, "_final", final)
    tuning._bucket("fp8", "o", (16, (4,)), [LOW, HIGH, WIDE], layer, [layer.weight], {})
    assert beside == [LOW, HIGH, shipped]


WIDE, SQUARE = (ScaledMmTile("ring", 64, n, 128, 4, 4) for n in (128, 64))


def test_what_fp8_sums_lose_on_a_long_k_is_no_error_but_a_step_left_out_is() -> None:
    case = make_scaled_mm_case("fp8_gemm", 4, 64, 28672, out_dtype=torch.bfloat16)
    gold = case.gold()
    layer = Layer(
        "fp8_gemm", case.x, case.weight, case.x_scale, case.weight_scale, gold, case.reference()
    )
    assert layer.why_wrong((gold * (1 - 2**-6)).to(torch.bfloat16)) is None
    without = dataclasses.replace(case, x=case.x[:, 128:], weight=case.weight[:, 128:]).gold()
    assert "RMS error" in str(layer.why_wrong(without.to(torch.bfloat16)))
    assert "not finite" in str(layer.why_wrong((gold / 0).to(torch.bfloat16)))
