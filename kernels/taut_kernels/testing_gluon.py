"""Runs a Gluon kernel of `mma.sync` fragments on NumPy, one program after another.

Triton's interpreter runs neither Gluon nor inline assembly. A Gluon kernel's meaning does not
depend on its layouts, though: here its Python body runs with `gl` replaced by NumPy, and its PTX by
an interpreter of the few instructions it uses. So addresses, masks, fragment orders, group and
split arithmetic are checked without a GPU; layouts, barriers and waits are not. Shared memory
starts as NaN patterns, and copies land at once.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

LANES = 32
POISON = np.int32(0x7FC17FC1)
"""A NaN in fp32, and two in bf16 and fp16 (0x7FC1 has all exponent bits of either)."""


class Tensor(np.ndarray):
    """A block value: an array with the methods of `gl.tensor` that kernels use."""

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        """Convert to a NumPy type; 16-bit floats are rounded where they are stored."""
        return self if kind in ("bf16", "f16") else self.astype(kind)

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other  # Triton makes a new value, which may be larger


def block(value: Any) -> Any:
    """Make a block value of an array."""
    return np.asarray(value).view(Tensor)


@dataclass
class Pointer:
    """A tensor's memory and an offset, in elements, for every element of a block."""

    memory: Any  # 1-D; bf16 as uint16
    kind: Any  # "bf16", "f16" or a NumPy type
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        """The pointer's type, of which kernels ask what it points at."""
        return types.SimpleNamespace(element_ty=self.kind)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.kind, self.offset + more)

    def to(self, kind: Any, bitcast: bool = False) -> Pointer:
        """Read the whole memory as another type."""
        assert np.all(self.offset == 0)
        return Pointer(self.memory.view(kind), kind)

    @staticmethod
    def of(tensor: torch.Tensor) -> Pointer:
        """Point at a contiguous CPU tensor, whose memory the kernel then changes."""
        kinds = {torch.bfloat16: "bf16", torch.float16: "f16"}
        kind: Any = kinds.get(tensor.dtype)
        if kind is None:
            memory = tensor.view(-1).numpy()
            return Pointer(memory, memory.dtype.type)
        return Pointer(tensor.view(-1).view(torch.int16).numpy().view(np.uint16), kind)


def floats(bits: Any, kind: str) -> Any:
    """Read 16-bit patterns as fp32."""
    if kind == "bf16":
        return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(bits).astype(np.uint16).view(np.float16).astype(np.float32)


def rounded(values: Any, kind: str) -> Any:
    """Round fp32 to 16-bit patterns, to nearest even."""
    if kind == "bf16":
        tensor = torch.from_numpy(np.array(values, dtype=np.float32))
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return np.asarray(values, dtype=np.float32).astype(np.float16).view(np.uint16)


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Any:
    """Stand in for `gl.load`; refuses addresses out of bounds."""
    index = np.asarray(pointer.offset)
    allowed = np.ones_like(index, bool) if mask is None else np.broadcast_to(mask, index.shape)
    assert ((index >= 0) & (index < pointer.memory.size))[allowed].all(), "load out of bounds"
    found = pointer.memory[np.where(allowed, index, 0)]
    if isinstance(pointer.kind, str):
        found = floats(found, pointer.kind)
    return block(np.where(allowed, found, other).astype(found.dtype))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    """Stand in for `gl.store`; refuses addresses out of bounds."""
    index = np.asarray(pointer.offset)
    value = np.broadcast_to(np.asarray(value), index.shape)
    allowed = np.ones_like(index, bool) if mask is None else np.broadcast_to(mask, index.shape)
    assert ((index >= 0) & (index < pointer.memory.size))[allowed].all(), "store out of bounds"
    if isinstance(pointer.kind, str):
        value = rounded(value, pointer.kind)
    pointer.memory[index[allowed]] = value[allowed]


def atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> int:
    """Stand in for `gl.atomic_add` of one number."""
    assert (sem, scope) == ("acq_rel", "gpu")
    before = int(pointer.memory[pointer.offset])
    pointer.memory[pointer.offset] += value
    return before


class Shared:
    """A shared memory descriptor."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def index(self, place: int) -> Shared:
        """Return one place along the first axis, which goes."""
        assert 0 <= place < len(self.memory)
        return Shared(self.memory[int(place)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Return some places along the first axis."""
        assert dim == 0
        assert start + length <= len(self.memory)
        return Shared(self.memory[start : start + length])

    def load(self, _layout: Any) -> Any:
        """Return what is there."""
        return block(self.memory.copy())

    def store(self, value: Any) -> None:
        """Put a block there."""
        assert self.memory.shape == value.shape
        self.memory[...] = value


def copy(target: Shared, pointer: Pointer, mask: Any = None, cache_modifier: str = "") -> None:
    """Stand in for `cp.async`, which fills with zeros where its mask is false."""
    assert target.memory.shape == pointer.offset.shape
    target.store(load(pointer, mask))


def _bits(value: Any) -> Any:
    return np.asarray(value).view(np.uint32)


def _halves(value: Any) -> Any:
    return np.stack([_bits(value) & 0xFFFF, _bits(value) >> 16], -1)


def _mma(kind: str, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """Multiply as `mma.m16n8k16` does; every register is [..., 32 lanes]."""
    shape = a[0].shape[:-1]
    g, t = np.arange(LANES) // 4, np.arange(LANES) % 4
    A, B, C = (np.zeros((*shape, *size), np.float64) for size in ((16, 16), (16, 8), (16, 8)))
    for half in (0, 1):
        for register in range(4):
            row, column = g + 8 * (register % 2), 2 * t + half + 8 * (register // 2)
            A[..., row, column] = floats(_halves(a[register])[..., half], kind)
        for register in range(2):
            B[..., 2 * t + half + 8 * register, g] = floats(_halves(b[register])[..., half], kind)
    for register in range(4):
        C[..., g + 8 * (register // 2), 2 * t + register % 2] = c[register].view(np.float32)
    D = (A @ B + C).astype(np.float32)
    return [D[..., g + 8 * (r // 2), 2 * t + r % 2].view(np.uint32) for r in range(4)]


def _two_halves(kind: str, a: Any, b: Any, c: Any) -> Any:
    """Compute a · b + c on both halves of a register, rounded once."""
    x, y, z = (floats(_halves(value), kind).astype(np.float64) for value in (a, b, c))
    result = rounded((x * y + z).astype(np.float32), kind).astype(np.uint32)
    return result[..., 0] | (result[..., 1] << 16)


def _f32(value: Any) -> Any:
    return np.asarray(value).view(np.float32).astype(np.float64)


def _lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    assert table == 0xEA
    return (a & b) | c


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    assert b == 0
    half = a & np.uint32(0xFFFF) if selector == 0x1010 else a >> np.uint32(16)
    assert selector in (0x1010, 0x3232)
    return half | (half << np.uint32(16))


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "cvt.f32.f16": lambda a: floats(a, "f16").view(np.uint32),
    "fma.rn.f32": lambda a, b, c: (_f32(a) * _f32(b) + _f32(c)).astype(np.float32).view(np.uint32),
    "fma.rn.f16x2": lambda a, b, c: _two_halves("f16", a, b, c),
    "fma.rn.bf16x2": lambda a, b, c: _two_halves("bf16", a, b, c),
}


def run_ptx(text: str, registers: dict[str, Any]) -> None:
    """Run one lane-parallel PTX text; ``registers`` holds uint32 arrays [..., 32] by name."""

    def value(name: str) -> Any:
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    for line in (part.strip() for part in re.split(r";|\n", text)):
        if line in ("", "{", "}") or line.startswith(".reg"):
            continue
        opcode, rest = line.split(None, 1)
        groups = [re.findall(r"[$\w]+", part) for part in re.findall(r"\{[^}]*\}|[^,{}]+", rest)]
        groups = [group for group in groups if group]
        if opcode.startswith("mma.sync.aligned.m16n8k16.row.col"):
            operands = ([value(name) for name in group] for group in groups[1:])
            found = _mma("bf16" if "bf16" in opcode else "f16", *operands)
            registers.update(zip(groups[0], found, strict=True))
        elif len(groups[0]) == 2:
            assert opcode == "mov.b32", line
            word = value(groups[1][0])
            registers[groups[0][0]] = word & np.uint32(0xFFFF)
            registers[groups[0][1]] = word >> np.uint32(16)
        else:
            arguments = [value(group[0]) for group in groups[1:]]
            registers[groups[0][0]] = np.asarray(_INSTRUCTIONS[opcode](*arguments), np.uint32)


def inline_asm(text: str, constraints: Any, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    """Stand in for `inline_asm_elementwise(pack=4)` over [..., 32 lanes, 4]."""
    if not args:
        assert text.startswith("griddepcontrol")
        return None
    assert pack == 4
    outputs = dtype if isinstance(dtype, tuple) else (dtype,)
    constraints = getattr(constraints, "value", constraints).split(",")
    assert len(constraints) == 4 * (len(outputs) + len(args))
    blocks = np.broadcast_arrays(*(np.asarray(a) for a in args))
    registers: dict[str, Any] = {}
    for i, operand in enumerate(blocks):
        for element in range(4):
            place = 4 * (len(outputs) + i) + element
            register = _bits(np.ascontiguousarray(operand[..., element]))
            registers[f"${place}"] = register
            if constraints[place].isdigit():
                registers[f"${constraints[place]}"] = register
    run_ptx(text, registers)
    results = []
    for i, kind in enumerate(outputs):
        words = np.stack([registers[f"${4 * i + element}"] for element in range(4)], -1)
        results.append(block(words.view(kind)))
    return tuple(results) if isinstance(dtype, tuple) else results[0]


class Layout:
    """Any layout: what it says has no meaning here."""

    def __init__(self, *_: Any) -> None:
        self.order: list[int] = []


def _allocate(_kind: Any, shape: Any, _layout: Any) -> Shared:
    return Shared(np.full(tuple(shape), POISON))


def language(program: tuple[int, int]) -> Any:
    """Make the `gl` of one program."""
    return types.SimpleNamespace(
        BlockedLayout=Layout,
        SliceLayout=Layout,
        SwizzledSharedLayout=Layout,
        allocate_shared_memory=_allocate,
        arange=lambda start, end, _: block(np.arange(start, end, dtype=np.int32)),
        atomic_add=atomic_add,
        constexpr=None,
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
        static_range=range,
        store=store,
        sum=lambda value, axis: block(value.sum(axis=axis, dtype=np.float32)),
        where=lambda condition, a, b: a if condition else b,
        zeros_like=lambda value: block(np.zeros_like(value)),
    )


def _python(function: Any) -> Callable[..., Any] | None:
    found = getattr(function, "fn", None)
    return found if isinstance(found, types.FunctionType) else None


def run(kernel: Any, grid: tuple[int, int], arguments: dict[str, Any]) -> None:
    """Run every program of a grid.

    Args:
        kernel: a `gluon.jit` function.
        grid: programs along both axes.
        arguments: by name; tensors are contiguous and on the CPU, or None.
    """
    outer = _python(kernel)
    assert outer is not None
    given = {
        name: Pointer.of(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    for program in _programs(grid):
        scopes: dict[str, dict[str, Any]] = {}
        scope = _scope(outer, language(program), scopes)
        types.FunctionType(outer.__code__, scope)(**given)


def _scope(function: Any, gl: Any, scopes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a function's globals with Gluon, and the jit functions of ours, replaced."""
    name = function.__module__
    if name in scopes:
        return scopes[name]
    scope = scopes[name] = dict(function.__globals__)
    scope["gl"] = gl
    scope["_copy"] = copy
    scope["barrier"] = lambda: None
    scope["async_copy"] = types.SimpleNamespace(
        commit_group=lambda: None, wait_group=lambda _: None
    )
    for name, value in function.__globals__.items():
        inner = _python(value)
        if inner is not None and "gl" in inner.__globals__:
            inside = _scope(inner, gl, scopes)
            scope[name] = types.FunctionType(inner.__code__, inside, name, inner.__defaults__)
    return scope


def _programs(grid: tuple[int, int]) -> Iterator[tuple[int, int]]:
    for split in range(grid[1]):
        for program in range(grid[0]):
            yield program, split
