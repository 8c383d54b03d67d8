"""An interpreter of the few PTX instructions that Gluon kernels use, on NumPy, a lane an element.

See :mod:`emulator.gluon`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from emulator.memory import block, floats, rounded

LANES = 32


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
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "setp.ne.u32": lambda a, b: a != b,
    "selp.b32": lambda a, b, chosen: np.where(chosen, a, b),
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
    if text.startswith("prefetch"):
        addresses = np.asarray(args[0].offset)
        assert ((addresses >= 0) & (addresses < args[0].memory.size)).all(), "out of bounds"
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
