"""The way around Triton's launcher: what the C function gets is what the launcher would pass."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher

from taut_kernels.launch import triton_abi
from taut_kernels.norm import rms_norm, rms_norm_launch

GRID, STREAM, ARGUMENTS = (3, 2, 1), 55, (4096, None, 8192, 7, 0.5, "bf16", True)


class Compiled:
    """Stands in for Triton's compiled kernel."""

    function, packed_metadata = 2**46, (4, 1, 1000)

    def __init__(self, run: Any) -> None:
        self.run = run


class Spread:
    """A launcher that passes arguments one by one, as in Triton 3.6."""

    def __init__(self, calls: list[Any]) -> None:
        self.launch = lambda *passed: calls.append(passed)
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid, self.launch_pdl = False, True

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        flags = (self.launch_cooperative_grid, self.launch_pdl)
        self.launch(x, y, z, stream, function, *flags, None, None, *args)


class Packed(Spread):
    """A launcher that passes arguments as one tuple, as in Triton 3.9."""

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *args: Any
    ) -> None:
        hooks, arguments = args[:3], args[3:]
        flags = (self.launch_cooperative_grid, self.launch_pdl)
        self.launch(
            x, y, z, stream, function, *flags, packed, *hooks, None, None, ["a"], b"s", arguments
        )


class Reordered(Spread):
    """A launcher whose C function wants the stream first."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.launch(stream, x, y, z, function, *args)


class Adding(Spread):
    """A launcher that gives the kernel an argument of its own."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.launch(x, y, z, stream, function, None, None, *args, 1)


class Silent(Spread):
    """A launcher that does not launch, or elsewhere."""

    def __call__(self, *args: Any) -> None:
        return None


def both(run: Any, calls: list[Any]) -> tuple[Any, Any]:
    """Launch through the launcher and along its route; return what arrived."""
    compiled = Compiled(run)
    given = (compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(*GRID, STREAM, *given, *ARGUMENTS)
    triton_abi.route(compiled).launch(GRID, STREAM, ARGUMENTS)
    return tuple(calls)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Spread, Packed])
def test_a_known_launcher_is_left_out_and_its_function_gets_the_same(kind: type[Spread]) -> None:
    calls: list[Any] = []
    run = kind(calls)
    expected, found = both(run, calls)
    assert found == expected
    chosen = triton_abi.route(Compiled(run))
    assert chosen.call is run.launch
    assert chosen.packed is (kind is Packed)
    assert len(calls) == 2, "looking for a route launches nothing"


@pytest.mark.parametrize("kind", [Reordered, Adding, Silent])
def test_a_launcher_that_does_something_else_stays(kind: type[Spread]) -> None:
    run = kind([])
    assert triton_abi.route(Compiled(run)).call is run


@pytest.mark.parametrize("size", ["global_scratch_size", "profile_scratch_size"])
def test_a_launcher_that_allocates_stays(size: str) -> None:
    run = Spread([])
    setattr(run, size, 128)
    assert triton_abi.route(Compiled(run)).call is run


def test_what_is_no_launcher_is_called_as_it_is() -> None:
    calls: list[Any] = []

    def run(*passed: Any) -> None:
        calls.append(passed)

    expected, found = both(run, calls)
    assert found == expected


def installed(**changed: Any) -> Any:
    """Return the installed Triton's launcher as its constructor leaves it, without a driver."""
    run = object.__new__(CudaLauncher)
    known: dict[str, Any] = {
        "num_ctas": 1,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": True,
        "gsan_enabled": False,
        "arg_annotations": ["annotation"],
        "kernel_signature": b"signature",
    }
    vars(run).update(known | changed)
    return run


def test_the_installed_triton_has_what_the_stand_in_has() -> None:
    """Every attribute the constructor sets is one above, and the ones looked at are among them."""
    names = set(inspect.getclosurevars(CudaLauncher.__init__).unbound)
    assert {"launch", *triton_abi._SCRATCH} <= names
    source = inspect.getsource(CudaLauncher.__call__)
    assert "self.launch(" in source


def test_the_installed_tritons_launcher_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some versions look at the driver before they see that there is nothing to allocate.
    monkeypatch.setattr(triton.runtime.driver, "_active", object())
    calls: list[Any] = []
    run = installed(launch=lambda *passed: calls.append(passed))
    expected, found = both(run, calls)
    assert found == expected
    assert triton_abi.route(Compiled(run)).call is run.launch


@pytest.mark.gpu
def test_gpu_a_compiled_kernel_is_launched_without_its_launcher() -> None:
    x, residual = (torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    launcher, device = rms_norm_launch._LAUNCHERS[0], torch.cuda.current_device()
    expected = [rms_norm.rms_norm(x, epsilon=1e-5, residual=residual.clone()) for _ in range(2)]
    assert torch.equal(*expected)
    forms = [form for (at, _), form in launcher._forms.items() if at == device]
    kept = [form for form in forms if form._compiled is not None]
    assert kept
    for form in kept:
        assert form._route.call is form._compiled.run.launch
