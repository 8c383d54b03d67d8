"""The launcher that keeps what Triton compiled: when it asks Triton, and what it passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from taut_kernels.launch import launcher


class Compiled:
    """Stands in for Triton's compiled kernel."""

    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append(("hooked", grid, arguments))

    def run(self, *arguments: Any) -> None:
        assert arguments[3:9] == (STREAM, self.function, self.packed_metadata, None, None, None)
        self.calls.append((arguments[:3], arguments[9:]))


STREAM = 55


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the launcher a stream where there is no GPU."""
    monkeypatch.setattr(launcher, "_current_stream", lambda: lambda index: STREAM)


class Jit:
    """Stands in for a jit function."""

    arg_names = ("x_ptr", "y_ptr", "M", "BLOCK", "FLAG")

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Compiled:
            self.asked.append((grid, arguments, named))
            return Compiled(self.calls)

        return launch


def constants() -> tuple[dict[str, Any], dict[str, Any]]:
    return {"FLAG": True, "BLOCK": 64}, {"num_warps": 4}


def test_asks_triton_once_a_key_and_then_passes_every_argument_in_order() -> None:
    jit = Jit()
    launch = launcher.Launcher(jit)
    x, grid = torch.zeros(64), (1, 2, 3)
    for M in (5, 6):
        launch("a", grid, (x, None), (M,), constants)
    named = {"FLAG": True, "BLOCK": 64, "num_warps": 4}
    assert jit.asked == [(grid, (x, None, 5), named)]
    assert jit.calls == [(grid, (x.data_ptr(), None, 6, 64, True))]
    launch("b", grid, (x, x), (5,), constants)
    assert len(jit.asked) == 2


def test_a_profiler_with_hooks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = triton.knobs.HookChain()
    hooks.add(lambda metadata: None)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hooks)
    jit = Jit()
    launch = launcher.Launcher(jit)
    x, grid = torch.zeros(64), (1, 2, 3)
    for M in (5, 6):
        launch("a", grid, (x, None), (M,), constants)
    assert jit.calls == [("hooked", grid, (x.data_ptr(), None, 6, 64, True))]


@pytest.mark.parametrize("stride", [24, 2**31])
def test_a_stride_of_another_kind_goes_through_triton(stride: int) -> None:
    jit = Jit()
    launch = launcher.Launcher(jit)
    x = torch.zeros(64)
    for some in (64, stride, 64, stride):
        launch("a", (1, 1, 1), (x, x), (5,), constants, (some,))
    assert len(jit.asked) == 3
    assert len(jit.calls) == 1


def test_a_tensor_of_another_device_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Device:
        def __init__(self, device: int) -> None:
            entered.append(device)

        def __enter__(self) -> None:
            monkeypatch.setattr(launcher, "_current_device", lambda: 1)

        def __exit__(self, *_: Any) -> None:
            monkeypatch.setattr(launcher, "_current_device", lambda: 0)

    class Tensor:
        is_cuda = True

        def get_device(self) -> int:
            return 1

        def data_ptr(self) -> int:
            return 4096

    monkeypatch.setattr(launcher, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Device)
    jit = Jit()
    pointers: Any = (Tensor(), None)
    launcher.Launcher(jit)("a", (1, 1, 1), pointers, (5,), constants)
    assert entered == [1]
    assert len(jit.asked) == 1


def test_memory_on_the_current_gpu_is_asked_for_without_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strides as torch's, for any shape; memory of another device through torch."""
    asked: list[Any] = []

    def here(*given: Any) -> torch.Tensor:
        assert [type(each) for each in given[:2]] == [tuple, tuple]
        asked.append(given)
        return torch.empty_strided(given[0], given[1], dtype=given[2])

    monkeypatch.setattr(launcher, "_empty_here", here)
    monkeypatch.setattr(launcher, "_current_device", lambda: 1)
    gpu = torch.device("cuda", 1)
    shapes = [(5,), (0,), (3, 4), (0, 4), (3, 0), (0, 0), (1, 1)]
    for shape in shapes:
        for given in (shape, torch.empty(shape).shape):
            found = launcher.empty(given, dtype=torch.float16, device=gpu)
            expected = torch.empty(shape, dtype=torch.float16)
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert len(asked) == 2 * len(shapes)
    assert launcher.empty((3, 4), dtype=torch.int32, device=torch.device("cpu")).shape == (3, 4)
    monkeypatch.setattr(torch, "empty", lambda *_, **named: named["device"])
    others: list[Any] = [
        launcher.empty((3, 4), dtype=torch.int32, device=torch.device("cuda", 0)),
        launcher.empty((2, 3, 4), dtype=torch.int32, device=gpu),
    ]
    assert others == [torch.device("cuda", 0), gpu]
    assert len(asked) == 2 * len(shapes)


@pytest.mark.gpu
def test_gpu_memory_is_as_torch_gives_it() -> None:
    for shape in [(5,), (0,), (3, 4), (0, 4), (3, 0)]:
        device = torch.device("cuda", torch.cuda.current_device())
        found = launcher.empty(shape, dtype=torch.bfloat16, device=device)
        expected = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for each in (found, expected):
            assert not each.requires_grad
        assert (found.shape, found.stride(), found.dtype, found.device) == (
            expected.shape, expected.stride(), expected.dtype, expected.device
        )  # fmt: skip
        with torch.inference_mode():
            assert launcher.empty(shape, dtype=torch.bfloat16, device=device).is_inference()


def test_an_unaligned_pointer_goes_through_triton_every_time() -> None:
    jit = Jit()
    launch = launcher.Launcher(jit)
    x = torch.zeros(64)
    odd = x[1:]
    assert odd.data_ptr() % 16
    for _ in range(2):
        launch("a", (1, 1, 1), (odd, x), (5,), constants)
    assert len(jit.asked) == 2
    launch("a", (1, 1, 1), (x, x), (5,), constants)
    assert len(jit.asked) == 3
    assert jit.calls == []


@pytest.mark.parametrize("stride", [1, 5, 40])
def test_a_single_row_at_any_stride_becomes_an_aligned_one(stride: int) -> None:
    """PyTorch calls it contiguous; Triton would compile a form for stride 1, under the same key."""
    x = torch.arange(32, dtype=torch.int8).as_strided((1, 32), (stride, 1))
    assert x.is_contiguous()
    found = launcher.aligned(x)
    assert found.stride() == (32, 1)
    assert torch.equal(found, x)
    assert launcher.aligned(found) is found


def test_a_device_is_asked_once_and_the_current_one_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []

    def name(device: torch.device) -> str:
        asked.append(device)
        return f"card {device.index}"

    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launcher._gpu_name.cache_clear()
    cards = [torch.device("cuda"), torch.device("cuda", 0), torch.device("cuda", 1)]
    assert [launcher.gpu_name(card) for card in cards * 2] == ["card 1", "card 0", "card 1"] * 2
    assert asked == [torch.device("cuda", 1), torch.device("cuda", 0)]
    launcher._gpu_name.cache_clear()
    assert launcher.gpu_name(torch.device("cpu")) is None
    assert launcher.capability(torch.device("cpu")) == (0, 0)
