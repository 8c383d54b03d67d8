"""Start a compiled Triton kernel without asking Triton's JIT again: 2 µs instead of 10.

`kernel[grid](…)` inspects every argument on every call. A :class:`CachedLauncher` remembers the
compiled kernel under a key its caller makes from what the compiler specialises on, and hands it
plain addresses. Only calls whose addresses and strides are all multiples of 16 are remembered, so
that one key cannot stand for two specialisations; others go through the JIT as usual.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton

from taut_kernels.tiles_fused import FusedTile

_INT32 = 2**31


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below ``number`` ≥ 1.

    Triton's function of that name and its `cdiv` take 2 µs a call: they are made for kernels.
    """
    return 1 << (number - 1).bit_length()


def launch_options(tile: FusedTile) -> dict[str, Any]:
    """Return what the fused kernels' launchers pass to the compiler for a tile.

    Without contraction the kernels round where their references round.

    Args:
        tile: of the call.
    """
    options: dict[str, Any] = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    if tile.registers:
        options["maxnreg"] = tile.registers
    if tile.pdl:
        options["launch_pdl"] = True
    return options


def _is_watched() -> bool:
    """Say whether a profiler asked Triton to be called at every launch (a chain, or a function)."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


class CachedLauncher:
    """One jit function and its compiled forms in this process.

    The jit function takes its run-time arguments first (tensors, then integers, then floats) and
    its constants last. Thread-safe as far as a dict is: two threads may compile one form twice.

    Args:
        kernel: the `triton.jit` function.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, tuple[Any, Any, Any]] = {}

    def __call__(
        self,
        form: Hashable,
        grid: int | tuple[int, int, int],
        tensors: tuple[torch.Tensor | None, ...],
        integers: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[Any, ...],
        strides: tuple[int, ...],
        options: dict[str, Any],
    ) -> None:
        """Run the kernel on the current stream of the first tensor's device.

        Args:
            form: tells apart everything that is compiled: dtypes, absent tensors, constants, tile.
            grid: programs, in one dimension or three.
            tensors: the pointer arguments in order, None for an absent one.
            integers: run-time int32 arguments that are not specialised, then ``strides``.
            floats: run-time fp32 arguments.
            constants: the constexpr arguments in order.
            strides: int32 arguments Triton specialises (elements between rows).
            options: compiler and launch options.
        """
        first = tensors[0]
        assert first is not None
        device = first.device
        programs = grid if isinstance(grid, tuple) else (grid, 1, 1)
        if device.type != "cuda":
            self.kernel[programs](*tensors, *integers, *strides, *floats, *constants, **options)
            return
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(form, grid, tensors, integers, floats, constants, strides, options)
            return
        pointers: list[int | None] = []
        wide = 0
        for stride in strides:
            wide |= stride
        low_bits = wide
        for tensor in tensors:
            address = None if tensor is None else tensor.data_ptr()
            pointers.append(address)
            low_bits |= address or 0
        remembered = not low_bits & 15 and wide < _INT32 and not _is_watched()
        found = self._compiled.get((device.index, form)) if remembered else None
        if found is None:
            compiled = self.kernel[programs](
                *tensors, *integers, *strides, *floats, *constants, **options
            )
            if remembered:
                entry = (compiled.run, compiled.function, compiled.packed_metadata)
                self._compiled[device.index, form] = entry
            return
        run, function, metadata = found
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        run(
            *programs,
            stream,
            function,
            metadata,
            None,
            None,
            None,
            *pointers,
            *integers,
            *strides,
            *floats,
            *constants,
        )
