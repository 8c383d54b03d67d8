"""The reader of Nsight Compute's counters, on those of a run that is committed."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from taut_bench import stalls, w4a16_rivals
from taut_kernels.tuner import w4a16_stock
from taut_kernels.tuner.w4a16_layer import Layer

RUN = Path(__file__).parents[1] / "runs" / "2026-11-24-h200-09h"
RAW = """==PROF== Connected
"ID","thread Domain:Push/Pop_Range:Msg","Kernel Name","gpu__time_duration.sum",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
"","","","ns","",""
"0","7  ""<default domain>:fp8 o M=1 taut:none"" ","void f<int, 4>(T *)","1,500","1","3"
"1","","g","","",""
"""


def test_a_kernel_has_its_case_its_time_and_its_largest_stalls():
    first, second = stalls.table(stalls.parse(RAW))
    assert first[:3] == ["fp8 o M=1 taut", "f", "1.5"]
    assert first[-1] == "barrier 75 %, wait 25 %"
    assert second[:3] == ["", "g", "–"]
    assert second[-1] == ""


def test_output_without_a_table_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match="ncu printed no table: ==ERROR== no permission"):
        stalls.parse("==ERROR== no permission")


def test_the_committed_table_is_what_the_committed_counters_say():
    with gzip.open(RUN / "stalls-raw.csv.gz", "rt", encoding="utf-8") as file:
        raw = stalls.parse(file.read())
    with (RUN / "stalls.csv").open(encoding="utf-8", newline="") as file:
        columns, *rows = csv.reader(file)
    assert columns == ["case", "kernel", *stalls.COUNTERS, "stalls"]
    assert rows == stalls.table(raw)
    assert all(abs(sum(stalls.stalls(row).values()) - 100) < 1e-6 for row in raw)
    assert {row[0].rpartition(" ")[2] for row in rows} >= {"taut", "CUTLASS", "vLLM"}


@pytest.mark.parametrize(
    ("ncu", "card", "needs"),
    [(None, True, "Nsight Compute's ncu on the PATH"), ("/ncu", False, "a CUDA device")],
)
def test_a_machine_without_card_or_profiler_is_told_so(
    ncu, card, needs, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(stalls.shutil, "which", lambda _: ncu)
    monkeypatch.setattr(stalls.torch.cuda, "is_available", lambda: card)
    assert stalls.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip().endswith(f"needs {needs}")


def test_four_bit_products_that_are_wrong_or_missing_are_not_shown(monkeypatch, capsys):
    """On tensors of a CPU: a layer, a rival that is right, one that errs and one that is absent."""
    asked = []

    def layer_of(N, K, group_size, rows, dtype):
        asked.append((N, K, group_size, rows, dtype))
        x = torch.zeros(rows, 64)
        return Layer(x, x.int(), x, 64, torch.arange(rows), x.double(), budget=0.1)

    def absent(_):
        raise w4a16_stock.UnavailableError("Marlin: not here")

    rivals = {
        "taut": lambda _: lambda x: x.clone(),
        "Marlin": absent,
        "Machete": lambda _: lambda x: x + 1,
        "cuBLAS": lambda _: lambda x: x + 0.05,
        w4a16_rivals.OTHER_PRECISION: lambda _: lambda x: x + 2,
    }
    monkeypatch.setattr(stalls.w4a16_layer, "make_layer", layer_of)
    monkeypatch.setattr(stalls.w4a16_rivals, "PREPARE", rivals)
    cases = list(stalls.four_bits(["o"], [1, 64]))
    assert asked == [(4096, 4096, 128, 64, torch.bfloat16)]
    other = w4a16_rivals.OTHER_PRECISION
    shown = [f"w4a16 o M={M} {rival}" for rival in ("taut", "cuBLAS", other) for M in (1, 64)]
    assert [case.label for case in cases] == shown
    assert [case.call().shape[0] for case in cases] == [1, 64] * 3
    said = capsys.readouterr().out
    assert said.count("Marlin: not run: Marlin: not here") == 2
    assert said.count("Machete: WRONG, not shown: error 1.000e+00") == 2


def test_products_with_scales_of_blocks_have_rivals_of_their_own(monkeypatch):
    asked = {}

    def prepared(layer, names, copies, notes, table):
        asked[layer.op] = names
        assert set(names) <= set(table)
        return {}

    monkeypatch.setattr(stalls, "make_layer", lambda op, *_: SimpleNamespace(op=op, weight=None))
    monkeypatch.setattr(stalls.scaled_mm_rivals, "prepare_all", prepared)
    monkeypatch.setattr(stalls.scaled_mm_rivals, "checked_subjects", lambda *_: [])
    for kind in ("fp8", "fp8-block"):
        assert list(stalls.products(kind, ["o"], [16])) == []
    assert asked["fp8_gemm"] == list(stalls.PRODUCTS)
    assert asked["fp8_block"] == ["taut", "CUTLASS", "cuBLAS blocks", "DeepGEMM"]
