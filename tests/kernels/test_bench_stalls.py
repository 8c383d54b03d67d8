"""The reader of Nsight Compute's counters, on those of a run that is committed."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from taut_kernels.bench import stalls

RUN = Path(__file__).parents[2] / "kernels/bench_results/2026-11-24-h200-09h"
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
