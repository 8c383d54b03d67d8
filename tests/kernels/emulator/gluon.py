"""Runs a Gluon kernel of `mma.sync` fragments on NumPy, one program after another.

Triton's interpreter runs neither Gluon nor inline assembly. A Gluon kernel's meaning does not
depend on its layouts, though: here its Python body runs with `gl` replaced by NumPy, and its PTX by
an interpreter of the few instructions it uses. So addresses, masks, fragment orders, group and
split arithmetic are checked without a GPU; layouts, barriers and waits are not. Shared memory
starts as NaN patterns, and copies land at once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from emulator.memory import POISON, Pointer, Shared, atomic_add, block, copy, load, store
from emulator.ptx import inline_asm


class Layout:
    """Any layout: what it says has no meaning here."""

    parent = None

    def __init__(self, *_: Any) -> None:
        self.order: list[int] = []


def _allocate(_kind: Any, shape: Any, _layout: Any) -> Shared:
    return Shared(np.full(tuple(shape), POISON))


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, np.ndarray) and condition.ndim:
        return block(np.where(condition, a, b))
    return a if condition else b


def language(program: tuple[int, ...]) -> Any:
    """Make the `gl` of one program."""
    return types.SimpleNamespace(
        BlockedLayout=Layout,
        SliceLayout=Layout,
        SwizzledSharedLayout=Layout,
        allocate_shared_memory=_allocate,
        arange=lambda start, end, _: block(np.arange(start, end, dtype=np.int32)),
        atomic_add=atomic_add,
        constexpr=None,
        convert_layout=lambda value, _, assert_trivial=False: value,
        expand_dims=lambda value, axis: block(np.expand_dims(value, axis)),
        float32=np.float32,
        full=lambda shape, value, kind, _: block(np.full(shape, value, kind)),
        inline_asm_elementwise=inline_asm,
        int32=np.int32,
        int64=np.int64,
        load=load,
        minimum=lambda a, b: block(np.minimum(a, b)),
        pointer_type=lambda kind: kind,
        program_id=lambda axis: program[axis],
        reshape=lambda value, shape: block(np.reshape(value, shape)),
        static_range=range,
        store=store,
        sum=lambda value, axis: block(value.sum(axis=axis, dtype=np.float32)),
        where=_where,
        zeros_like=lambda value: block(np.zeros_like(value)),
    )


def _python(function: Any) -> Callable[..., Any] | None:
    found = getattr(function, "fn", None)
    return found if isinstance(found, types.FunctionType) else None


def copies() -> dict[str, Any]:
    """Return stand-ins for what a kernel of `cp.async` uses beside `gl`, by their global name."""
    groups = types.SimpleNamespace(commit_group=lambda: None, wait_group=lambda _: None)
    return {"copy": copy, "barrier": lambda: None, "async_copy": groups}


def run(
    kernel: Any,
    grid: tuple[int, int],
    arguments: dict[str, Any],
    language: Callable[[tuple[int, int]], Any] = language,
    stand_ins: Callable[[], dict[str, Any]] = copies,
) -> None:
    """Run every program of a grid.

    Args:
        kernel: a `gluon.jit` function.
        grid: programs along both axes.
        arguments: by name; tensors are contiguous and on the CPU, or None.
        language: makes the `gl` of a program.
        stand_ins: makes a program's other globals that NumPy replaces.
    """
    outer = _python(kernel)
    assert outer is not None
    given = {
        name: Pointer.of(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    for program in _programs(grid):
        scopes: dict[str, dict[str, Any]] = {}
        scope = _scope(outer, language(program), scopes, stand_ins())
        types.FunctionType(outer.__code__, scope)(**given)


_OPTIONS = frozenset({"num_warps", "maxnreg", "launch_pdl"})
"""Of the compiler, which a launcher names beside a kernel's constants."""


class OnNumPy:
    """Stands in for a jit kernel in a launcher: runs on NumPy, remembers how it was launched last.

    Args:
        kernel: a `gluon.jit` function.
        run: :func:`run` or one like it; takes the kernel, the grid and the arguments by name.

    Attributes:
        grid: programs along each axis.
        constants: constants and compiler options, by name.
    """

    def __init__(self, kernel: Any, run: Callable[[Any, Any, dict[str, Any]], None]) -> None:
        self._kernel, self._run = kernel, run
        self.arg_names = kernel.arg_names
        self.grid: tuple[int, int, int] = (0, 0, 0)
        self.constants: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.grid, self.constants = grid, constants
            named = dict(zip(self.arg_names, arguments, strict=False))
            named |= {name: value for name, value in constants.items() if name not in _OPTIONS}
            self._run(self._kernel, grid, named)

        return launch


def _scope(
    function: Any,
    gl: Any,
    scopes: dict[str, dict[str, Any]],
    stand_ins: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a function's globals with Gluon, and the jit functions of ours, replaced."""
    name = function.__module__
    if name in scopes:
        return scopes[name]
    replaced = copies() if stand_ins is None else stand_ins
    scope = scopes[name] = {**function.__globals__, "gl": gl, **replaced}
    for name, value in function.__globals__.items():
        inner = _python(value)
        if inner is not None and "gl" in inner.__globals__:
            inside = _scope(inner, gl, scopes, replaced)
            scope[name] = types.FunctionType(inner.__code__, inside, name, inner.__defaults__)
    return scope


def _programs(grid: tuple[int, int]) -> Iterator[tuple[int, int]]:
    for split in range(grid[1]):
        for program in range(grid[0]):
            yield program, split
