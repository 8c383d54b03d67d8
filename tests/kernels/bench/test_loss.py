"""The loss benchmark without a GPU: refusal, floors, rivals that are missing, report."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from taut_bench import loss, report
from taut_bench.fused_rivals import UnavailableError
from taut_bench.loss_cases import KERNELS, OPS, SHAPES, Operands, Shape, kernels_of
from taut_kernels.tuner import timing

BAR = Shape("linear_cross_entropy", 8192, 2304, 256000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loss.main(["--output", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_floors_are_the_larger_of_operations_and_bytes() -> None:
    assert BAR.flops() == 6 * 8192 * 2304 * 256000
    assert loss.floor_us(BAR, 707e12, 4.24e12) == pytest.approx(41_000, rel=2e-3)
    other = Shape("linear_cross_entropy", 8192, 4096, 128256)
    assert loss.floor_us(other, 707e12, 4.24e12) == pytest.approx(36_500, rel=2e-3)
    distillation = Shape("linear_kl", 1024, 4096, 128256)
    assert loss.floor_us(distillation, 707e12, 4.24e12) == pytest.approx(6_090, rel=2e-3)
    rows = Shape("cross_entropy", 8192, 0, 128256)
    assert rows.flops() == 0
    assert loss.floor_us(rows, 707e12, 4.24e12) == pytest.approx(4 * 8192 * 128256 / 4.24e6)


def test_every_op_is_run_at_the_sizes_of_its_bar() -> None:
    assert {shape.op for shape in SHAPES} == set(OPS)
    assert BAR in SHAPES
    assert Shape("linear_cross_entropy", 8192, 4096, 128256) in SHAPES
    assert "taut vocabulary" in kernels_of("linear_cross_entropy")
    assert "taut vocabulary" not in kernels_of("linear_kl")


def small(op: str) -> Operands:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=generator)
    weight = torch.randn(40, 8, generator=generator)
    target = torch.randint(0, 40, (6,), generator=generator)
    if op == "cross_entropy":
        return Operands(x @ weight.t(), None, target, None)
    teacher = (torch.randn(6, 8, generator=generator), torch.randn(40, 8, generator=generator))
    return Operands(x, weight, target, teacher)


@pytest.mark.parametrize("op", OPS)
def test_all_that_run_here_compute_the_same_loss(op: str) -> None:
    operands, found = small(op), {}
    for name in kernels_of(op):
        if name == "torch.compile":
            continue  # of the reference: minutes of a compiler for nothing new
        try:
            found[name] = KERNELS[name](op)(operands).item()
        except UnavailableError:
            continue
    assert {"taut", "torch"} <= set(found)
    for name, value in found.items():
        assert value == pytest.approx(found["torch"], rel=1e-5), name


def test_a_rival_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", None)
    with pytest.raises(UnavailableError, match="liger_kernel"):
        KERNELS["Liger"]("linear_kl")
    for name in ("CCE", "quack"):
        with pytest.raises(UnavailableError, match="no such op"):
            KERNELS[name]("linear_kl")
    monkeypatch.setitem(__import__("sys").modules, "quack", None)
    for op in ("cross_entropy", "linear_cross_entropy"):
        with pytest.raises(UnavailableError, match="quack"):
            KERNELS["quack"](op)


def test_report_names_the_best_rival_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    cells = {"taut": (45e3, 1.2), "CCE": (54e3, 1.17), "torch": (63e3, 24.0)}
    rows = [
        loss.Row(BAR, kernel, timing.Timing(us, us, us), int(memory * 2**30), 41e3)
        for kernel, (us, memory) in cells.items()
    ]
    loss.write(rows, ["Liger: not run: no module"], "copy 4 TB/s", tmp_path)
    text = (tmp_path / "loss.md").read_text()
    assert "taut 45.00 [45.00, 45.00] / 1.20" in text
    assert "ratio 1.20 (CCE)" in text
    assert "- Liger: not run: no module" in text
    with (tmp_path / "loss.csv").open() as file:
        first = next(csv.DictReader(file))
    assert (first["kernel"], first["us"], first["peak_GiB"]) == ("taut", "45000.0", "1.200")
    assert first["share_of_floor"] == "0.911"
