"""What is compiled ahead, side by side: nothing is launched then, and everything afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime import _async_compile

from taut_bench import testing
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.launch import assembler as launch_assembler
from taut_kernels.launch import compile_ahead, launcher

GRID = (1, 1, 1)


class Jit:
    """Stands in for a jit function."""

    arg_names = ("x_ptr", "M", "BLOCK")

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **named: Any) -> None:
        mode = _async_compile.active_mode.get()
        assert mode is not None
        assert mode.ignore_errors
        self.seen.append(("asked", grid, arguments, named))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert _async_compile.active_mode.get() is None
        return lambda *arguments, **named: self.seen.append(("launched", grid, arguments, named))


def constants() -> tuple[dict[str, Any], dict[str, Any]]:
    return {"BLOCK": 64}, {"num_warps": 4}


@pytest.fixture(autouse=True)
def several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "THREADS", 2)
    monkeypatch.setattr(launcher, "_current_device", lambda: 0)


def test_a_form_is_asked_for_with_its_own_arguments_and_launched_afterwards() -> None:
    jit, x = Jit(), torch.zeros(64)
    form = launcher.Form(jit, 0)

    def run() -> str:
        form(GRID, (x,), (5,), constants)
        return "ran"

    assert compile_ahead.warmed_up(run) == "ran"
    named = {"BLOCK": 64, "num_warps": 4}
    assert jit.seen == [("asked", GRID, (x, 5), named), ("launched", GRID, (x, 5), named)]
    assert not compile_ahead.active


def test_nothing_compiled_is_launched_meanwhile() -> None:
    jit, x = Jit(), torch.zeros(64)
    form = launcher.Form(jit, 0)
    form._compiled = object()  # its launch would fail
    compile_ahead._ask(lambda: form(GRID, (x,), (5,), constants))
    assert not jit.seen


@pytest.mark.parametrize(
    ("device", "assembler"),
    [(-1, None), (0, launch_assembler.newest_ptxas)],
    ids=["CPU", "assembler"],
)
def test_what_the_interpreter_or_another_assembler_takes_is_not_asked_for(
    device: int, assembler: Any
) -> None:
    jit = Jit()
    form = launcher.Form(jit, device, *(() if assembler is None else (assembler,)))
    compile_ahead._ask(lambda: form(GRID, (torch.zeros(64),), (5,), constants))
    assert not jit.seen


def test_an_error_ends_it() -> None:
    def run() -> None:
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        compile_ahead.warmed_up(run)
    assert not compile_ahead.active
    assert _async_compile.active_mode.get() is None


@pytest.mark.parametrize("why", ["one core", "no such mode", "inside"])
def test_runs_once_where_it_would_bring_nothing(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "one core":
        monkeypatch.setattr(compile_ahead, "THREADS", 1)
    elif why == "inside":
        monkeypatch.setattr(compile_ahead, "active", True)
    else:
        monkeypatch.delattr(triton, "AsyncCompileMode")
    calls: list[int] = []
    compile_ahead.warmed_up(lambda: calls.append(1))
    assert calls == [1]


def test_of_layers_alike_the_first_alone_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_seen", set())
    calls: list[bool] = []
    for alike in ("a", "a", "b", None, None):
        compile_ahead.warmed_up(lambda: calls.append(compile_ahead.active), alike)
    assert calls == [True, False, False, True, False, True, False, True, False]


def test_what_is_asked_for_is_not_waited_for_until_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_ahead, "_seen", set())
    waited: list[bool] = []
    pending = SimpleNamespace(result=lambda ignore_errors: waited.append(ignore_errors))
    jit = SimpleNamespace(warmup=lambda *_, **__: pending)
    form = launcher.Form(jit, 0)

    def run() -> None:
        if compile_ahead.active:
            form(GRID, (torch.zeros(64),), (5,), constants)

    compile_ahead.ask(run, "a")
    assert waited == []
    compile_ahead.warmed_up(run, "a")
    assert waited == [True]
    compile_ahead.warmed_up(run, "a")
    compile_ahead.ask(run, "a")
    assert waited == [True]
    assert compile_ahead._asked == []


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_the_second_run_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.undo()  # the device's own number, and all cores
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[bool] = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **named: compiled.append(compile_ahead.active or not named["is_manual_warmup"]),
    )
    # 13 chunks: no other test has these forms.
    case = testing.make_w4a16_case(48, 128, 832, 64, dtype=torch.bfloat16, device="cuda")
    tiles = [
        WgmmaRingTile(block_m, 1, 1, 1, 1, 4, False, parts=2, running=1, tma=True)
        for block_m in (16, 32, 64)
    ]
    operands = case.operands()

    def run() -> list[torch.Tensor]:
        return [w4a16_launch.launch(tile, *operands) for tile in tiles]

    for actual in compile_ahead.warmed_up(run):
        testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert len(compiled) == len(tiles)
    assert not any(compiled), "each form was compiled ahead"
