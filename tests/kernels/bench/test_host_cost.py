"""The benchmark of what a call costs the host, as far as a CPU can run it."""

from __future__ import annotations

import csv
import itertools
from typing import Any

import pytest
import torch

from taut_bench import (
    fused_cases,
    host_cost,
    host_cost_parts,
    scaled_mm_layer,
)
from taut_bench.host_cost_parts import PARTS, Case
from taut_kernels.activation import silu_mul
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.launch import launcher, triton_abi
from taut_kernels.tuner import timing, w4a16_layer, w4a16_stock

STREAM = 55
NUMBERS = itertools.count()


class Compiled:
    """Stands in for Triton's compiled kernel."""


class Jit:
    """Stands in for a jit function."""

    arg_names = ("x_ptr", "y_ptr", "M", "BLOCK")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **named: Compiled()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What C functions were given."""
    calls: list[tuple[Any, ...]] = []

    def route(compiled: Any) -> triton_abi.Route:
        return triton_abi.Route(lambda *given: calls.append(given), ("fixed",), packed=True)

    monkeypatch.setattr(triton_abi, "route", route)
    monkeypatch.setattr(launcher, "_current_stream", lambda: lambda device: STREAM)
    return calls


def doubling(launches: int, results: int) -> Case:
    """Return a case of an op that launches and returns some of what it allocates."""
    kernel = launcher.Launcher(Jit())

    def function(x: torch.Tensor) -> Any:
        scratch = launcher.empty((7,), dtype=torch.float32, device=x.device)
        made = [launcher.empty((3, 4), dtype=x.dtype, device=x.device) for _ in range(results)]
        for y in [*made, scratch][:launches]:
            kernel("key", (1, 2, 3), (x, y), (x.shape[0],), lambda: ({"BLOCK": 64}, {}))
        return tuple(made) if results > 1 else made[0] if made else None

    returned = ("()", "Tensor", "(Tensor, Tensor)")[results]
    name = f"taut_host_cost_test::doubling_{next(NUMBERS)}"
    torch.library.define(name, f"(Tensor x) -> {returned}")
    op = getattr(torch.ops.taut_host_cost_test, name.rpartition(":")[2]).default
    return Case("doubling", 5, op, function, (torch.zeros(5, 4),))


@pytest.mark.parametrize(("launches", "results"), [(1, 1), (2, 2), (1, 0)])
def test_each_part_does_its_part(
    launches: int, results: int, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = doubling(launches, results)
    found = host_cost_parts.parts(case)
    assert list(found) == [part for part in PARTS if results or part != "with allocations"]
    asked: list[tuple[int, ...]] = []
    empty = launcher.empty

    def counted(shape: tuple[int, ...], **named: Any) -> torch.Tensor:
        asked.append(shape)
        return empty(shape, **named)

    monkeypatch.setattr(launcher, "empty", counted)
    does = {}
    for part, call in found.items():
        launched.clear()
        asked.clear()
        call()
        does[part] = len(asked), len(launched)
        if launched:
            assert launched[0][:5] == (1, 2, 3, STREAM, "fixed")
            assert launched[0][5][2:] == (5, 64)
    memory = results + 1
    expected = {
        "dispatcher": (0, 0),
        "with allocations": (memory, 0),
        "function": (memory, launches),
        "launches": (0, launches),
        "C calls": (0, launches),
    }
    assert does == {part: expected[part] for part in found}
    allocated = found["with allocations"]() if results else None
    assert isinstance(allocated, tuple) is (results > 1)


def test_a_rival_that_is_missing_or_refuses_leaves_a_note(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = doubling(1, 1)
    torch.library.impl(case.op._schema.name, "CPU", case.function)

    def missing() -> Any:
        raise w4a16_stock.UnavailableError("vLLM: not here")

    def refuses() -> Any:
        raise ValueError("not this shape\nfor a reason")

    rivals = {"one": lambda: lambda: None, "two": missing, "three": lambda: refuses}
    case = Case(case.name, case.tokens, case.op, case.function, case.operands, rivals)
    monkeypatch.setattr(timing, "host_cost", lambda call, calls, rounds: float(rounds))
    notes: list[str] = []
    rows = list(host_cost.measure(case, 3, notes))
    assert [row.what for row in rows] == ["taut", "one", *PARTS]
    assert {(row.name, row.tokens, row.us) for row in rows} == {("doubling", 5, 3.0)}
    assert notes == [
        "two on doubling, M=5: not run: vLLM: not here",
        "three on doubling, M=5: not run: not this shape",
    ]


def test_every_call_is_bound_to_operands_our_op_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On small tensors of a CPU, where the ops run their references."""
    asked: list[Any] = []

    def four(N: int, K: int, group_size: int, rows: int, dtype: torch.dtype) -> Any:
        asked.append((N, K, group_size, rows, dtype))
        x, words = torch.zeros(rows, 128, dtype=dtype), torch.zeros(32, 16, dtype=torch.int32)
        scale = torch.ones(32, 1, dtype=dtype)
        return w4a16_layer.Layer(x, words, scale, 128, torch.arange(rows), x, 0.0)

    def eight(op: str, N: int, K: int, M: int) -> Any:
        asked.append((op, N, K, M))
        dtype = torch.int8 if op == w8a8.OP else fp8.DTYPE
        x, weight = torch.zeros(M, 64).to(dtype), torch.zeros(32, 64).to(dtype)
        one, y = torch.ones(M, 1), torch.zeros(M, 32)
        return scaled_mm_layer.Layer(op, x, weight, one, torch.ones(32, 1), y, y)

    def forms(form: fused_cases.Form, N: int, M: int) -> fused_cases.Operands:
        asked.append((form.op, N, M))
        x = torch.zeros(M, 40 * 128 if form.op == "rope" else 64, dtype=torch.bfloat16)
        if form.op == "rope":
            table = torch.zeros(8, 128, dtype=torch.bfloat16)
            positions = torch.zeros(M, dtype=torch.int64)
            return fused_cases.Operands(x, positions=positions, cache=table)
        return fused_cases.Operands(x, weight=x[0], residual=x if "add" in form.op else None)

    monkeypatch.setattr(w4a16_layer, "make_layer", four)
    monkeypatch.setattr(scaled_mm_layer, "make_layer", eight)
    monkeypatch.setattr(fused_cases, "make_operands", forms)
    cases = list(host_cost.cases())
    names = [(case.name, case.tokens) for case in cases]
    four_bits = [(f"w4a16 {n}", M) for n in ("gate_up", "down", "qkv", "o") for M in (1, 16, 64)]
    eight_bits = [(f"{kind} o", M) for kind in ("fp8", "int8") for M in (1, 64)]
    assert names == [*four_bits, *eight_bits, *((name, 1) for name in host_cost.FORMS)]
    for case in cases:
        case.op(*case.operands)
        assert case.rivals, case.name
    functions = {case.name: case.function for case in cases}
    assert functions["w4a16 o"] is w4a16._launch_w4a16_gemm
    assert functions["fp8 o"] is fp8._launch_fp8_gemm
    assert functions["int8 o"] is w8a8._launch_w8a8_gemm
    assert functions["silu_mul"] is silu_mul._launch_silu_mul
    assert asked[:2] == [
        (28672, 4096, 128, 64, torch.bfloat16), (4096, 14336, 128, 64, torch.bfloat16)
    ]  # fmt: skip
    assert ("rms_norm_quant", 4096, 1) in asked


def test_the_files_hold_every_figure_and_note(tmp_path: Any) -> None:
    figures = {"taut": 12.25, "cuBLAS": 11.0, "Marlin": 31.0, "dispatcher": 2.5, "C calls": 2.0}
    rows = [host_cost.Row("w4a16 o", 1, what, us) for what, us in figures.items()]
    host_cost.write(rows, ["a note", "a note"], "Measured with care.", tmp_path)
    with (tmp_path / "host_cost.csv").open(encoding="utf-8", newline="") as file:
        cells = list(csv.reader(file))
    assert cells[0] == ["call", "M", "what", "us"]
    assert cells[1] == ["w4a16 o", "1", "taut", "12.250"]
    assert len(cells) == 1 + len(figures)
    text = (tmp_path / "host_cost.md").read_text(encoding="utf-8")
    assert text.startswith("Measured with care.\n")
    assert "| w4a16 o | 1 | 12.2 | cuBLAS 11.0, Marlin 31.0 | 2.5 | – | – | – | 2.0 |" in text
    assert text.count("- a note") == 1


def test_the_processor_is_named_or_its_kind(tmp_path: Any) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n", encoding="utf-8")
    assert host_cost.processor(listed) == "Some CPU @ 2 GHz"
    assert host_cost.processor(tmp_path / "absent")


def test_a_machine_without_a_card_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert host_cost.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip().endswith("host_cost needs a CUDA device")
