"""The fused-op benchmark without a GPU: refusal, bytes, report, table."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from taut_bench import fused, fused_cases, fused_report, fused_rivals, report
from taut_bench.fused_cases import FORMS, Call, Form, Operands, bytes_moved
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.tuner import timing
from tuning import tune_fused


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [fused, tune_fused])
def test_without_a_gpu_the_command_says_so(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--output", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_bytes_are_what_a_call_cannot_avoid() -> None:
    M, N = 3, 64
    assert bytes_moved(FORMS["rms_norm"], N, M) == M * N * 4 + 2 * N
    assert bytes_moved(FORMS["add_rms_norm_int8"], N, M) == M * N * (2 + 4 + 1) + 2 * N
    assert bytes_moved(FORMS["silu_mul"], N, M) == M * N * 6
    assert bytes_moved(FORMS["silu_mul_fp8"], N, M) == M * N * 5
    assert bytes_moved(FORMS["quant_fp8"], N, M) == M * N * 3
    assert bytes_moved(FORMS["rope"], 40, M) == 4 * M * 40 * 128 + 8 * M


def test_every_form_is_of_an_op_with_tiles() -> None:
    assert {form.op for form in FORMS.values()} == set(tiles_fused.OPS)


def test_widths_are_the_models_or_those_asked_for() -> None:
    assert fused.widths_of("silu_mul", None, ["8b"]) == [14336]
    assert fused.widths_of("rope", None, ["8b", "70b"]) == [40, 72]
    assert fused.widths_of("quant_int8", None, ["8b", "llama3-70b-tp8"]) == [4096, 1024]
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


@pytest.mark.parametrize("name", ["quant_fp8", "quant_int8"])
def test_quantisation_alone_is_held_to_the_budget_of_its_format(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS[name]
    draw = torch.randn(333, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    monkeypatch.setattr(fused_cases, "make_operands", lambda *_: fused_cases.Operands(draw))
    assert fused_cases.why_wrong(form, 256, fused_cases.taut) is None
    assert fused_cases.why_wrong(form, 256, fused_rivals.torch_compile) is None

    def halved(form: Form, copies: Sequence[Operands]) -> Call:
        values, scales = torch.ops.taut.row_quant(copies[0].x, fused_cases.quantised_dtype(form))
        return lambda i: (values, scales / 2)

    assert "above the budget" in str(fused_cases.why_wrong(form, 256, halved))


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_fp8", "gpt_oss_int8", "silu_mul"])
def test_activations_are_held_to_their_own_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[name]
    draw = 3 * torch.randn(333, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    monkeypatch.setattr(fused_cases, "make_operands", lambda *_: fused_cases.Operands(draw))
    assert fused_cases.why_wrong(form, 128, fused_cases.taut) is None
    assert fused_cases.why_wrong(form, 128, fused_rivals.torch_compile) is None
    other = Form(form.op, form.out, gpt_oss=not form.gpt_oss)
    wrong = fused_cases.why_wrong(form, 128, lambda _, copies: fused_cases.taut(other, copies))
    assert "above the budget" in str(wrong)


def test_vllms_and_ligers_activations_are_of_the_form_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[object, ...]] = []
    ops = SimpleNamespace(
        silu_and_mul=lambda y, x: seen.append(("silu", y.shape)),
        swigluoai_and_mul=lambda y, x, alpha, limit: seen.append(("oai", y.shape, alpha, limit)),
        dynamic_scaled_int8_quant=lambda *_: seen.append(("int8",)),
    )
    monkeypatch.setattr(fused_rivals, "imported", lambda name: None)
    monkeypatch.setattr(torch.ops, "_C", ops, raising=False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    copies = [Operands(empty(3, 64, dtype=torch.bfloat16))]
    for name in ("silu_mul", "gpt_oss", "gpt_oss_int8"):
        fused_rivals.vllm(FORMS[name], copies)(0)
    oai = ("oai", (3, 32), 1.702, 7.0)
    assert seen == [("silu", (3, 32)), oai, oai, ("int8",)]
    with pytest.raises(fused_rivals.UnavailableError):
        fused_rivals.liger(FORMS["gpt_oss"], copies)


def test_quacks_norm_adds_the_residual_and_has_no_other_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        total = x if residual is None else x + residual
        return torch.nn.functional.rms_norm(total, (64,), weight, eps), total, None

    monkeypatch.setattr(fused_rivals, "imported", lambda _: SimpleNamespace(rmsnorm_fwd=forward))
    drawn = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x, residual, weight = *drawn, torch.ones(64, dtype=torch.bfloat16)
    for op, other in (("rms_norm", None), ("add_rms_norm", residual)):
        call = fused_rivals.quack(Form(op, "same"), [Operands(x, weight, other)])
        total = x if other is None else x + other
        wanted = torch.nn.functional.rms_norm(total, (64,), weight, fused_cases.EPSILON)
        torch.testing.assert_close(call(0), wanted)
    for form in (Form("rms_norm_quant", "fp8"), Form("silu_mul", "same")):
        with pytest.raises(fused_rivals.UnavailableError, match="no such op"):
            fused_rivals.quack(form, [])


def test_gpt_oss_takes_the_tiles_of_silu_mul(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuned: list[set[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune_fused, "run", lambda widths, *_: tuned.append(set(widths)) or 0)
    for more in ([], ["--form", "gpt_oss"]):
        assert tune_fused.main(["--output", str(tmp_path), *more]) == 0
    everything, asked = tuned
    assert asked == {"gpt_oss"}
    assert everything == {name for name in FORMS if "gpt_oss" not in name}


@pytest.mark.parametrize("name", ["quant_fp8", "quant_int8"])
def test_vllms_quantisation_alone_is_one_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, seen = FORMS[name], []

    def op(kind: str) -> Any:
        return lambda y, x, scales, rest: seen.append((kind, y.dtype, x, scales.shape, rest))

    ops = SimpleNamespace(
        dynamic_per_token_scaled_fp8_quant=op("fp8"), dynamic_scaled_int8_quant=op("int8")
    )
    monkeypatch.setattr(fused_rivals, "imported", lambda name: None)
    monkeypatch.setattr(torch.ops, "_C", ops, raising=False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    copies = [Operands(empty(3, 64, dtype=torch.bfloat16)) for _ in range(2)]
    values, _ = fused_rivals.vllm(form, copies)(1)
    ((kind, dtype, x, scales, rest),) = seen
    assert (kind, dtype, rest) == (form.out, fused_cases.quantised_dtype(form), None)
    assert x is copies[1].x
    assert (values.shape, scales) == ((3, 64), (3, 1))
    with pytest.raises(fused_rivals.UnavailableError):
        fused_rivals.liger(form, copies)
