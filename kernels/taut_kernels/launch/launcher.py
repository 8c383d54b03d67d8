"""What every launcher shares: output memory, which GPU it runs on, and a launch that costs little.

Launchers allocate through :func:`empty` so that a test can replace it by an allocator that fills
with NaN (:func:`taut_bench.testing.nan_poison`): an element a kernel forgets to write then shows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from taut_kernels.launch import assembler as launch_assembler
from taut_kernels.launch import compile_ahead, early_start, triton_abi

PDL_OPTIONS: tuple[dict[str, bool], dict[str, bool]] = ({}, {"launch_pdl": True})
"""Launch options without and with programmatic dependent launch: a kernel may start before the one
in front of it has ended, and waits for it inside."""


# What follows stands in every call. `torch.cuda.current_device` is this behind a question whether
# CUDA was started, which a tensor on a GPU answers. The other allocates on the current device as
# `torch.empty` does, without torch's dispatcher: the code that Inductor writes calls it.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_empty_here: Callable[..., Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)


def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialised contiguous tensor; the seam the NaN poison replaces.

    Under ``torch.use_deterministic_algorithms`` it is not filled, as `torch.empty` would be:
    kernels write every element.

    Args:
        shape: of the tensor.
        dtype: likewise.
        device: likewise; a GPU's with its number, as tensors have it.
    """
    index = device.index
    if index is None or _empty_here is None or len(shape) > 2 or index != _current_device():
        return torch.empty(shape, dtype=dtype, device=device)
    # Tuples, not what `Tensor.shape` is: no subclass is taken. Strides as torch's own: an axis
    # without elements counts as one.
    strides = (shape[1] or 1, 1) if len(shape) == 2 else (1,) * len(shape)
    return _empty_here((*shape,), strides, dtype)


def _numbered(device: torch.device) -> torch.device:
    """Return a device with its number, as tensors have it; ``"cuda"`` is the current one."""
    if device.index is None and device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def number(device: torch.device) -> int:
    """Return a tensor's device as forms are found by it: -1 of a CPU (the Triton interpreter)."""
    return -1 if device.index is None else device.index


# What follows is asked in every call: kept by device, since `device.type` alone takes 0.2 µs.
@cache
def _gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def gpu_name(device: torch.device) -> str | None:
    """Name the GPU a tensor lives on, as ``tiles/*.json`` spells it.

    Args:
        device: where the operands are.

    Returns:
        For example ``"NVIDIA H100 80GB HBM3"``; None for a CPU tensor (the Triton interpreter).
    """
    return _gpu_name(_numbered(device))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def capability(device: torch.device) -> tuple[int, int]:
    """Return a device's compute capability; (0, 0) of a CPU (the Triton interpreter)."""
    return _capability(_numbered(device))


def why_no_ring(device: torch.device) -> str | None:
    """Say why a kernel with a ring in shared memory does not run on a device, or None."""
    if not is_hopper(device):
        return "the ring needs the shared memory of compute capability 9.0"
    return None


def is_hopper(device: torch.device) -> bool:
    """Say whether a device has warp-group products and programmatic dependent launch (sm_90)."""
    return capability(device) == (9, 0)


def starts_early(tokens: int, device: torch.device) -> bool:
    """Say whether a call between products starts early (:data:`early_start.EARLY_TOKENS`).

    Args:
        tokens: of the call.
        device: where it runs.
    """
    return tokens <= early_start.EARLY_TOKENS and is_hopper(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # more than one, so that what depends on it is tested
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; 2 of a CPU (the Triton interpreter)."""
    return _multiprocessors(_numbered(device))


def aligned(x: Tensor) -> Tensor:
    """Return ``x`` [M, K] itself where each row can be read 16 bytes at a time, else a copy."""
    row, column = x.stride()
    if column == 1 and row * x.element_size() % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0:
        return x
    # Not `contiguous()`: a single row is that at any stride, 1 included, which Triton would take
    # for a constant of the form.
    return x.clone(memory_format=torch.contiguous_format)


Constants = dict[str, Any]
"""Constant arguments and compiler options of a kernel, by name."""
ALIGNMENT = 16
"""Bytes: what a load moves at once, and what Triton specialises pointers on."""
_INT32 = 2**31


@cache
def _current_stream() -> Callable[[int], int]:
    found: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
    return found


class Form:
    """One form of a kernel on one device: what types, constants and options determine.

    Launches without Triton's look-up of what it already compiled. That look-up (types, alignments
    and constants of every argument, a string key, a check of globals) is most of what a launch
    costs the host: README, "Measured facts". Holds no tensor: every call brings its addresses.

    Args:
        kernel: a `triton.jit` function: pointers first, then numbers, then constants.
        device: number of the device, negative outside CUDA.
        assembler: what Triton compiles in (:mod:`.assembler`); as it is by default.
    """

    __slots__ = ("_assembler", "_compiled", "_device", "_kernel", "_route", "_stream", "_values")

    def __init__(
        self, kernel: Any, device: int, assembler: launch_assembler.Choice = nullcontext
    ) -> None:
        self._kernel, self._device, self._assembler = kernel, device, assembler
        self._compiled: Any = None
        self._values: tuple[Any, ...] = ()
        self._route: triton_abi.Route
        self._stream: Callable[[int], int]

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
        constants: Callable[[], tuple[Constants, Constants]],
        strides: tuple[int, ...] = (),
    ) -> None:
        """Launch on the device's current stream.

        What was compiled is launched by :class:`triton_abi.Route`: ``compiled[grid](…)`` does
        the same and takes several times as long. It wraps the arguments in a description for
        profilers that are not there, looks for scratch memory to allocate, and its C code asks the
        driver about each tensor's address, which it believes where it is a number already. A
        profiler that is there (Proton adds hooks) gets what it would get from Triton.

        Args:
            grid: programs along each axis.
            pointers: the first arguments.
            numbers: the arguments between pointers and constants.
            constants: called where Triton compiles; returns constant arguments and options.
            strides: numbers the form does not determine: what is compiled is kept for multiples of
                16 below 2**31 only.
        """
        device = self._device
        if device >= 0 and device != _current_device():
            with torch.cuda.device(device):
                self(grid, pointers, numbers, constants, strides)
            return
        bits, addresses = 0, []
        for pointer in pointers:
            address = None
            if pointer is not None:
                address = pointer.data_ptr()
                bits |= address
            addresses.append(address)
        for stride in strides:
            bits |= stride | (stride >= _INT32)
        compiled = self._compiled
        if compiled is None or bits % ALIGNMENT or compile_ahead.active:
            if compile_ahead.active:
                self._compile_ahead(grid, pointers, numbers, constants)
                return
            compiled = self._launch_through_triton(grid, pointers, numbers, constants)
            if bits % ALIGNMENT == 0:
                self._keep(compiled)
            return
        # Triton's own hooks are chains, mostly empty, never None.
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[grid](*addresses, *numbers, *self._values)
            return
        call, fixed, packed = self._route
        stream = self._stream(device)
        if packed:
            call(*grid, stream, *fixed, (*addresses, *numbers, *self._values))
        else:
            call(*grid, stream, *fixed, *addresses, *numbers, *self._values)

    def _keep(self, compiled: Any) -> None:
        """Keep what was compiled: None of Triton's interpreter, which compiles nothing."""
        if compiled is not None:
            self._route, self._stream = triton_abi.route(compiled), _current_stream()
        # Last: another thread takes what stands above once it sees this.
        self._compiled = compiled

    def _compile_ahead(
        self,
        grid: tuple[int, int, int],
        pointers: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
        constants: Callable[[], tuple[Constants, Constants]],
    ) -> None:
        """Have Triton compile, where no assembler is chosen: the choice ends with this call."""
        if self._compiled is None and self._device >= 0 and self._assembler is nullcontext:
            named, options = constants()
            form = self._kernel.warmup(*pointers, *numbers, grid=grid, **named, **options)
            compile_ahead.note(form)

    def _launch_through_triton(
        self,
        grid: tuple[int, int, int],
        pointers: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
        constants: Callable[[], tuple[Constants, Constants]],
    ) -> Any:
        named, options = constants()
        names = self._kernel.arg_names[len(pointers) + len(numbers) :]
        self._values = tuple(named[name] for name in names)
        with self._assembler() if self._device >= 0 else nullcontext():
            return self._kernel[grid](*pointers, *numbers, **named, **options)


class Prepared(NamedTuple):
    """What shape, types and tile determine of a launch, for an op that keeps it.

    Holds no tensor and no address.

    Attributes:
        form: of the kernel.
        grid: programs along each axis.
        constants: what the form is compiled with.
    """

    form: Form
    grid: tuple[int, int, int]
    constants: Callable[[], tuple[Constants, Constants]]


class Launcher:
    """A jit kernel and its forms, found by a key of the caller's.

    Thread-safe as far as a dict is: two threads may compile one form twice.

    Args:
        kernel: a `triton.jit` function: pointers first, then numbers, then constants.
        assembler: as of :class:`Form`.
    """

    def __init__(self, kernel: Any, assembler: launch_assembler.Choice = nullcontext) -> None:
        self.kernel, self.assembler = kernel, assembler
        self._forms: dict[Hashable, Form] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        pointers: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        constants: Callable[[], tuple[Constants, Constants]],
        strides: tuple[int, ...] = (),
    ) -> None:
        """Launch on the first pointer's device and its current stream.

        Args:
            key: equal for two calls only if their constants, options, dtypes and absent pointers
                are equal, and those of ``numbers`` that Triton specialises on and ``strides`` does
                not name.
            grid: programs along each axis.
            pointers: the first arguments.
            numbers: the arguments between pointers and constants.
            constants: as of :class:`Form`, as is the next.
            strides: numbers the key does not determine.
        """
        first = pointers[0]
        assert first is not None
        form = self.form(key, first.get_device())
        form(grid, pointers, numbers, constants, strides)

    def form(self, key: Hashable, device: int) -> Form:
        """Return the form of a key on a device, for callers that keep it.

        Args:
            key: as of a call.
            device: its number, negative outside CUDA.
        """
        found = self._forms.get((device, key))
        if found is None:
            found = self._forms[device, key] = Form(self.kernel, device, self.assembler)
        return found
