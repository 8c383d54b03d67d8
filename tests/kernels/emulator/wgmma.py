"""Runs a Gluon kernel of `wgmma` on NumPy: what :mod:`emulator.gluon` lacks for it.

A product here is done when it is issued; waits and layouts of shared memory mean nothing.
That no register is written while a product reads it is for a GPU to show.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
import torch
from emulator import gluon, hopper, ptx
from emulator.memory import POISON, Pointer, Shared, block, floats
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_PATTERN = {"bf16": np.uint16, "f16": np.uint16}


class SharedMatrix(Shared):
    """A shared memory descriptor that can be read as another type and transposed."""

    def index(self, place: int) -> SharedMatrix:
        """Return one place along the first axis, which goes."""
        return SharedMatrix(super().index(place).memory)

    def reinterpret(self, kind: str, shape: Any, _layout: Any) -> SharedMatrix:
        """Read 32-bit words as 16-bit floats."""
        bits = self.memory.view(_PATTERN[kind]).reshape(tuple(shape))
        return SharedMatrix(floats(bits, kind))

    def permute(self, order: tuple[int, ...]) -> SharedMatrix:
        """Return the axes in another order."""
        return SharedMatrix(self.memory.transpose(order))


def inline_asm(text: str, constraints: Any, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    """Stand in for `gl.inline_asm_elementwise(pack=4)`, with 16-bit results two a register."""
    if not isinstance(dtype, tuple) or dtype[0] not in _PATTERN:
        return ptx.inline_asm(text, constraints, args, dtype, is_pure, pack)
    words = (np.int32,) * (len(dtype) // 2)
    found = ptx.inline_asm(text, constraints, args, words, is_pure, pack)
    results: list[Any] = []
    for registers in found:
        # Two registers are one result's four elements.
        values = floats(np.ascontiguousarray(registers).view(np.uint16), dtype[0])
        results += [block(values[..., :4]), block(values[..., 4:])]
    return tuple(results)


def _product(a: Any, b: SharedMatrix, total: Any, is_async: bool) -> Any:
    assert is_async
    return block((np.asarray(a, np.float64) @ b.memory + total).astype(np.float32))


def _language(program: tuple[int, int, int], grid: tuple[int, int, int]) -> Any:
    gl = gluon.language(program[:2])
    more = {
        "NVMMADistributedLayout": gluon.Layout,
        "DotOperandLayout": gluon.Layout,
        "NVMMASharedLayout": lambda *_, rank: None,
        "allocate_shared_memory": lambda _, shape, __: SharedMatrix(np.full(tuple(shape), POISON)),
        "bfloat16": "bf16",
        "float16": "f16",
        "inline_asm_elementwise": inline_asm,
        "join": lambda a, b: block(np.stack([a, b], -1)),
        "num_programs": lambda axis: grid[axis],
        "permute": lambda value, order: block(np.transpose(value, order)),
        "program_id": lambda axis: np.int32(program[axis]),
    }
    return types.SimpleNamespace(**(vars(gl) | more))


def run(kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
    """Run every program of a grid, one after another.

    Args:
        kernel: a `gluon.jit` function.
        grid: programs along each axis.
        arguments: by name; tensors are contiguous and on the CPU, or None.
    """
    outer = kernel.fn
    given = {
        name: Pointer.of(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    x, y, z = (range(size) for size in grid)
    for program in itertools.product(x, y, z):
        replaced = gluon.copies() | {
            "_PUBLIC": True,
            "warpgroup_mma": _product,
            "warpgroup_mma_wait": lambda _, deps: deps[0] if len(deps) == 1 else tuple(deps),
        }
        scope = gluon._scope(outer, _language(program, grid), {}, replaced)
        types.FunctionType(outer.__code__, scope)(**given)


def _fed_language(program: tuple[int, int, int], grid: tuple[int, int, int]) -> Any:
    gl = vars(_language(program, grid))
    fed = vars(hopper._language(program[:2], grid[0]))
    mine = ("warp_specialize", "split", "allocate_shared_memory", "static_assert")
    more = {name: fed[name] for name in mine if name in fed}
    return types.SimpleNamespace(**gl | more | {"DistributedLinearLayout": gluon.Layout})


def run_fed(kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
    """Run every program of a kernel that TMA feeds, its partitions of warps as threads.

    What is asynchronous happens late: :mod:`emulator.hopper`.

    Args:
        kernel: a `gluon.jit` function.
        grid: programs along each axis.
        arguments: by name; tensors are contiguous and on the CPU, or None; descriptors as the
            host makes them.

    Raises:
        RuntimeError: partitions wait for one another.
    """
    given = {
        name: hopper.Descriptor(value)
        if isinstance(value, TensorDescriptor)
        else Pointer.of(value)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }
    x, y, z = (range(size) for size in grid)
    for program in itertools.product(x, y, z):
        replaced = hopper._stand_ins() | {
            "warpgroup_mma": hopper.multiply,
            "warpgroup_mma_wait": hopper.wait_products,
        }
        scope = gluon._scope(kernel.fn, _fed_language(program, grid), {}, replaced)
        types.FunctionType(kernel.fn.__code__, scope)(**given)
