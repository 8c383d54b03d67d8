"""The launcher that remembers compiled kernels: when it does, and what it then hands over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from taut_kernels.fused import _launcher
from taut_kernels.fused._launcher import CachedLauncher


class Tensor:
    """As much of a CUDA tensor as a launcher looks at."""

    device = torch.device("cuda", 0)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Kernel:
    """A jit function that records whether it was asked, or its compiled form."""

    def __init__(self) -> None:
        self.jit: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            self.jit.append((grid, arguments, options))
            compiled = SimpleNamespace(function="function", packed_metadata="metadata")
            compiled.run = lambda *given: self.direct.append(given)
            return compiled

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    return Kernel()


def call(
    launcher: CachedLauncher, *, form: str = "form", address: int = 4096, stride: int = 64
) -> None:
    tensors: Any = (Tensor(address), None)
    launcher(form, 5, tensors, (3,), (0.5,), (64, "same"), (stride,), {"num_warps": 4})


def test_second_call_goes_past_the_jit_with_addresses(kernel: Kernel) -> None:
    launcher = CachedLauncher(kernel)
    call(launcher)
    call(launcher, address=8192)
    (grid, arguments, options) = kernel.jit[0]
    assert len(kernel.jit) == 1
    assert grid == (5, 1, 1)
    assert arguments[1:] == (None, 3, 64, 0.5, 64, "same")
    assert options == {"num_warps": 4}
    expected = (5, 1, 1, 77, "function", "metadata", None, None, None)
    assert kernel.direct == [(*expected, 8192, None, 3, 64, 0.5, 64, "same")]


@pytest.mark.parametrize(
    "change", [{"address": 4098}, {"stride": 65}, {"stride": 2**31}, {"form": "other"}]
)
def test_another_specialisation_is_not_taken_for_the_remembered_one(
    kernel: Kernel, change: dict[str, Any]
) -> None:
    launcher = CachedLauncher(kernel)
    call(launcher)
    call(launcher, **change)
    assert len(kernel.jit) == 2
    call(launcher)
    assert len(kernel.jit) == 2
    assert len(kernel.direct) == 1


def test_misaligned_calls_are_never_remembered(kernel: Kernel) -> None:
    launcher = CachedLauncher(kernel)
    for _ in range(3):
        call(launcher, address=4098)
    assert len(kernel.jit) == 3
    assert kernel.direct == []


def test_a_profilers_hook_sees_every_launch(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = CachedLauncher(kernel)
    call(launcher)
    with monkeypatch.context() as context:
        context.setattr(_launcher, "_is_watched", lambda: True)
        call(launcher)
    assert len(kernel.jit) == 2
    call(launcher)
    assert len(kernel.direct) == 1


def test_tritons_own_hook_chain_counts_only_with_hooks_in_it() -> None:
    assert not _launcher._is_watched()
    chain = triton.knobs.runtime.launch_enter_hook

    def hook(*_: Any) -> None:
        return None

    chain.add(hook)
    try:
        assert _launcher._is_watched()
    finally:
        chain.remove(hook)


def test_a_tensor_of_another_device_runs_there(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []
    current = [1]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device.index)
            current[0] = 0

        def __exit__(self, *_: Any) -> None:
            current[0] = 1

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    call(CachedLauncher(kernel))
    assert entered == [0]
    assert len(kernel.jit) == 1
