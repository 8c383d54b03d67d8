"""Calls of norms, activations, quantisation and RoPE: every tile a table or the rule names.

The widths stand for the ways a row is cut: a head, one that divides by nothing, hidden and
intermediate sizes of 8B and 32B models, the longest row held in registers, and one beyond it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from taut_bench.instruments.recorder import BOTH, HOPPER, KernelCall, KernelVariant, each_once
from taut_kernels.activation import silu_mul_launch
from taut_kernels.activation.silu_mul_kernel import (
    silu_mul_kernel,
    silu_mul_quant_kernel,
    silu_mul_quant_long_kernel,
)
from taut_kernels.norm import rms_norm_launch
from taut_kernels.norm.rms_norm_kernel import rms_norm_kernel, rms_norm_long_kernel
from taut_kernels.rope import rope_launch
from taut_kernels.rope.rope_kernel import rope_kernel
from taut_kernels.rowwise import quantize
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.quantize_kernel import row_quant_kernel, row_quant_long_kernel
from taut_kernels.rowwise.tiles import FusedTile

WIDTHS = (128, 1000, 4096, 5120, 14336, 32768, 131072)
GPT_OSS_WIDTHS = (2880, 100000)
LONG_OUTPUT = 28672
"""Columns of Llama-3-70B's activations, where quantisation alone has a tile of its own."""
ROTATED = (((32, 8), 128), ((28, 4), 128), ((9, 3), 64), ((16, 16), 80))
"""(q heads, k heads), columns turned: Llama-3-8B, Qwen-2.5-7B, SmolLM2, an odd one."""
PARTLY_ROTATED = (((24, 2), (128, 64)), ((16, 16), (96, 40)))
"""(q heads, k heads), (columns of a head, those turned): the others are copied."""
_TOKENS = (1, 4096)
_M = 3
_OUTPUT = {
    "same": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "static_fp8": torch.float8_e4m3fn,
}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without memory; its rows begin at multiples of 16 elements."""
    if len(shape) == 1:
        return torch.empty(shape, dtype=dtype, device="meta")
    *rows, columns = shape
    padded = torch.empty((*rows, -(-columns // 16) * 16), dtype=dtype, device="meta")
    return padded[..., :columns]


def _tiles(op: str, N: int) -> dict[FusedTile, None]:
    """Return the distinct tiles of one op and width, of the rule and of every card's table."""
    found = [tiles_fused.rule(op, N, M) for M in _TOKENS]
    for table in tiles_fused.tables().values():
        found += [tile for _, tile in table.choices.get((op, N), ())]
    for gpu in (None, *tiles_fused.tables()):
        early = tiles_fused.every_tile(gpu, op, N, hopper=True)
        found += [tile for tile in early if tile.pdl]
    return dict.fromkeys(found)


def _widths(op: str) -> tuple[int, ...]:
    measured = [
        N for table in tiles_fused.tables().values() for name, N in table.choices if name == op
    ]
    return tuple(dict.fromkeys((*WIDTHS, *measured)))


def _targets(out: str, tile: FusedTile) -> tuple[str, ...]:
    # e4m3 conversions exist from sm_89, programmatic dependent launch from sm_90.
    return HOPPER if out.endswith("fp8") or tile.pdl else BOTH


def _scale(out: str) -> Tensor | None:
    return None if out == "same" else empty(_M, dtype=torch.float32)


def _norm(op: str, N: int, out: str, tile: FusedTile, *, weighted: bool = True) -> KernelCall:
    residual = empty(_M, N) if op.startswith("add_") else None
    y, scale = empty(_M, N, dtype=_OUTPUT[out]), _scale(out)
    operands = (empty(_M, N), empty(N) if weighted else None, residual, 1e-5, y, scale)
    return KernelCall(
        f"{op} {out}{'' if weighted else ' no weight'} N={N}",
        rms_norm_kernel if N <= tiles_fused.RESIDENT_LIMIT else rms_norm_long_kernel,
        tile,
        partial(rms_norm_launch.launch, tile, out, *operands),
        _targets(out, tile),
    )


def _activation(op: str, N: int, out: str, gpt_oss: bool, tile: FusedTile) -> KernelCall:
    kernel = silu_mul_kernel
    if op == "silu_mul_quant":
        resident = N <= tiles_fused.RESIDENT_LIMIT
        kernel = silu_mul_quant_kernel if resident else silu_mul_quant_long_kernel
    y = empty(_M, N, dtype=_OUTPUT[out])
    alpha, beta, limit = (1.702, 1.0, 7.0) if gpt_oss else (1.0, 0.0, None)
    activated = (alpha, beta, limit, gpt_oss, y, _scale(out))
    return KernelCall(
        f"{op} {'gpt-oss' if gpt_oss else 'silu'} {out} N={N}",
        kernel,
        tile,
        partial(silu_mul_launch.launch, tile, out, empty(_M, 2 * N), *activated),
        _targets(out, tile),
    )


def _quantisation(N: int, out: str, tile: FusedTile) -> KernelCall:
    resident = N <= tiles_fused.RESIDENT_LIMIT
    y, scale = empty(_M, N, dtype=_OUTPUT[out]), empty(_M, dtype=torch.float32)
    return KernelCall(
        f"row_quant {out} N={N}",
        row_quant_kernel if resident else row_quant_long_kernel,
        tile,
        partial(quantize.launch, tile, out, empty(_M, N), y, scale),
        _targets(out, tile),
    )


def _rope(
    heads: tuple[int, int], columns: tuple[int, int], neox: bool, apart: bool, tile: FusedTile
) -> KernelCall:
    dim, rotated = columns
    q, k = (empty(_M, count, dim) for count in heads)
    positions, table = empty(_M, dtype=torch.int64), empty(512, rotated)
    new = (torch.empty_like(q), torch.empty_like(k)) if apart else None
    form = f"{heads[0]}+{heads[1]}x{rotated}" + (f" of {dim}" if rotated < dim else "")
    return KernelCall(
        f"rope{'_apart' if apart else ''} {'neox' if neox else 'interleaved'} {form}",
        rope_kernel,
        tile,
        partial(rope_launch.launch, tile, positions, q, k, table, neox, new),
        _targets("same", tile),
    )


def _norms() -> Iterator[KernelCall]:
    for op in ("rms_norm", "add_rms_norm", "rms_norm_quant", "add_rms_norm_quant"):
        outs = ("fp8", "int8", "static_fp8") if op.endswith("quant") else ("same",)
        for N in _widths(op):
            for tile, out in itertools.product(_tiles(op, N), outs):
                yield _norm(op, N, out, tile)
    yield _norm("rms_norm", 4096, "same", tiles_fused.rule("rms_norm", 4096, 1), weighted=False)


def _activations() -> Iterator[KernelCall]:
    for op in ("silu_mul", "silu_mul_quant"):
        outs = ("fp8", "int8") if op == "silu_mul_quant" else ("same", "static_fp8")
        shapes = [(N, False) for N in _widths(op)] + [(N, True) for N in GPT_OSS_WIDTHS]
        for N, gpt_oss in shapes:
            for tile, out in itertools.product(_tiles(op, N), outs):
                yield _activation(op, N, out, gpt_oss, tile)


def _quantisations() -> Iterator[KernelCall]:
    for N in dict.fromkeys((*_widths("row_quant"), LONG_OUTPUT)):
        for tile, out in itertools.product(_tiles("row_quant", N), ("fp8", "int8")):
            yield _quantisation(N, out, tile)


def _rotations() -> Iterator[KernelCall]:
    for heads, rotated in ROTATED:
        for tile in _tiles("rope", sum(heads)):
            for neox, apart in itertools.product((True, False), repeat=2):
                yield _rope(heads, (rotated, rotated), neox, apart, tile)
    for heads, columns in PARTLY_ROTATED:
        for tile, neox in itertools.product(_tiles("rope", sum(heads)), (True, False)):
            yield _rope(heads, columns, neox, True, tile)


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every form of the kernels."""
    calls = (_norms(), _activations(), _quantisations(), _rotations())
    return each_once(itertools.chain(*calls))
