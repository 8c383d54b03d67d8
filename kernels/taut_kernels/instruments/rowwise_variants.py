"""Forms of the fused kernels compiled ahead of time: every tile a table or the rule names.

The widths stand for the ways a row is cut: a head, one that divides by nothing, hidden and
intermediate sizes of 8B and 32B models, the longest row held in registers, and one beyond it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from taut_kernels.activation.silu_mul_kernel import (
    silu_mul_kernel,
    silu_mul_quant_kernel,
    silu_mul_quant_long_kernel,
)
from taut_kernels.launch.variant import KernelVariant
from taut_kernels.norm.rms_norm_kernel import rms_norm_kernel, rms_norm_long_kernel
from taut_kernels.quantize.kernel import row_quant_kernel, row_quant_long_kernel
from taut_kernels.rope.rope_kernel import rope_kernel
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tile_options import launch_options, next_power_of_2
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
_ELEMENT = {"same": "bf16", "fp8": "fp8e4nv", "int8": "i8", "static_fp8": "fp8e4nv"}


def _tiles(op: str, N: int) -> dict[FusedTile, None]:
    """Return the distinct tiles of one op and width, of the rule and of every card's table."""
    tiles = [tiles_fused.rule(op, N, M) for M in _TOKENS]
    for table in tiles_fused.tables().values():
        tiles += [tile for _, tile in table.tiles.get((op, N), ())]
    for gpu in (None, *tiles_fused.tables()):
        early = tiles_fused.every_tile(gpu, op, N, hopper=True)
        tiles += [tile for tile in early if tile.pdl]
    return dict.fromkeys(tiles)


def _widths(op: str) -> tuple[int, ...]:
    measured = [
        N for table in tiles_fused.tables().values() for name, N in table.tiles if name == op
    ]
    return tuple(dict.fromkeys((*WIDTHS, *measured)))


def _targets(out: str, tile: FusedTile) -> tuple[str, ...]:
    # e4m3 conversions exist from sm_89, programmatic dependent launch from sm_90.
    return ("sm_90",) if out.endswith("fp8") or tile.pdl else ("sm_80", "sm_90")


def _rms_norm(op: str, N: int, out: str, tile: FusedTile) -> KernelVariant:
    has_residual = op.startswith("add_")
    pointers = {"x_ptr": "bf16", "weight_ptr": "bf16", "y_ptr": _ELEMENT[out]}
    constants: dict[str, Any] = {"N": N, "OUT": out, "ROWS": tile.rows, "BLOCK": tile.block}
    for name, element, present in (
        ("residual_ptr", "bf16", has_residual),
        ("scale_ptr", "fp32", out != "same"),
    ):
        if present:
            pointers[name] = element
        else:
            constants[name] = None
    return KernelVariant(
        label=f"{op} {out} N={N}",
        kernel=rms_norm_kernel if N <= tiles_fused.RESIDENT_LIMIT else rms_norm_long_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", "stride_xm", "stride_rm"),
        divisible_by_16=("stride_xm", "stride_rm"),
        constants=constants | {"PDL": tile.pdl},
        floats=("epsilon",),
        options=launch_options(tile),
        targets=_targets(out, tile),
    )


def _silu_mul(op: str, N: int, out: str, gpt_oss: bool, tile: FusedTile) -> KernelVariant:
    kernel = silu_mul_kernel
    if op == "silu_mul_quant":
        resident = N <= tiles_fused.RESIDENT_LIMIT
        kernel = silu_mul_quant_kernel if resident else silu_mul_quant_long_kernel
    constants: dict[str, Any] = {"N": N, "OUT": out, "INTERLEAVED": gpt_oss}
    constants |= {"FORM": "clamped" if gpt_oss else "silu", "ROWS": tile.rows}
    constants |= {"BLOCK": tile.block, "PDL": tile.pdl}
    return KernelVariant(
        label=f"{op} {'gpt-oss' if gpt_oss else 'silu'} {out} N={N}",
        kernel=kernel,
        tile=tile,
        pointers={"x_ptr": "bf16", "y_ptr": _ELEMENT[out]}
        | ({} if out == "same" else {"scale_ptr": "fp32"}),
        integers=("M", "stride_xm"),
        divisible_by_16=("stride_xm",),
        constants=constants | ({"scale_ptr": None} if out == "same" else {}),
        floats=("alpha", "beta", "limit"),
        options=launch_options(tile),
        targets=_targets(out, tile),
    )


def _row_quant(N: int, out: str, tile: FusedTile) -> KernelVariant:
    resident = N <= tiles_fused.RESIDENT_LIMIT
    return KernelVariant(
        label=f"row_quant {out} N={N}",
        kernel=row_quant_kernel if resident else row_quant_long_kernel,
        tile=tile,
        pointers={"x_ptr": "bf16", "y_ptr": _ELEMENT[out], "scale_ptr": "fp32"},
        integers=("M", "stride_xm"),
        divisible_by_16=("stride_xm",),
        constants={"N": N, "OUT": out, "ROWS": tile.rows, "BLOCK": tile.block, "PDL": tile.pdl},
        options=launch_options(tile),
        targets=_targets(out, tile),
    )


def _rope(
    heads: tuple[int, int], columns: tuple[int, int], neox: bool, apart: bool, tile: FusedTile
) -> KernelVariant:
    dim, rotated = columns
    half, rest = rotated // 2, dim - rotated
    constants: dict[str, Any] = {"HQ": heads[0], "HK": heads[1], "HALF": half, "NEOX": neox}
    constants |= {"WIDTH": next_power_of_2(half), "TOKENS": tile.rows}
    constants |= {"HEADS": tile.block, "PDL": tile.pdl, "D": dim if apart else 0}
    constants |= {"REST": next_power_of_2(rest) if apart and rest else 0}
    pointers = {"q_ptr": "bf16", "k_ptr": "bf16", "cache_ptr": "bf16", "positions_ptr": "i64"}
    new = ("new_q_ptr", "new_k_ptr")
    pointers |= dict.fromkeys(new, "bf16") if apart else {}
    constants |= {} if apart else dict.fromkeys(new)
    strides = ("stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_nqt", "stride_nkt")
    form = f"{heads[0]}+{heads[1]}x{rotated}" + (f" of {dim}" if rest else "")
    return KernelVariant(
        label=f"rope{'_apart' if apart else ''} {'neox' if neox else 'interleaved'} {form}",
        kernel=rope_kernel,
        tile=tile,
        pointers=pointers,
        integers=("T", *strides),
        divisible_by_16=strides,
        constants=constants,
        options=launch_options(tile),
        targets=_targets("same", tile),
    )


def _norm_variants() -> Iterator[KernelVariant]:
    for op in ("rms_norm", "add_rms_norm", "rms_norm_quant", "add_rms_norm_quant"):
        outs = ("fp8", "int8", "static_fp8") if op.endswith("quant") else ("same",)
        for N in _widths(op):
            for tile in _tiles(op, N):
                for out in outs:
                    yield _rms_norm(op, N, out, tile)


def _activation_variants() -> Iterator[KernelVariant]:
    for op in ("silu_mul", "silu_mul_quant"):
        outs = ("fp8", "int8") if op == "silu_mul_quant" else ("same", "static_fp8")
        shapes = [(N, False) for N in _widths(op)] + [(N, True) for N in GPT_OSS_WIDTHS]
        for N, gpt_oss in shapes:
            for tile in _tiles(op, N):
                for out in outs:
                    yield _silu_mul(op, N, out, gpt_oss, tile)


def _quantisation_variants() -> Iterator[KernelVariant]:
    for N in dict.fromkeys((*_widths("row_quant"), LONG_OUTPUT)):
        for tile in _tiles("row_quant", N):
            for out in ("fp8", "int8"):
                yield _row_quant(N, out, tile)


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every specialisation of the fused kernels that is compiled ahead of time."""
    yield from _norm_variants()
    yield from _activation_variants()
    yield from _quantisation_variants()
    yield from _rope_variants()


def _rope_variants() -> Iterator[KernelVariant]:
    for heads, rotated in ROTATED:
        for tile in _tiles("rope", sum(heads)):
            for neox, apart in itertools.product((True, False), repeat=2):
                yield _rope(heads, (rotated, rotated), neox, apart, tile)
    for heads, columns in PARTLY_ROTATED:
        for tile in _tiles("rope", sum(heads)):
            for neox in (True, False):
                yield _rope(heads, columns, neox, True, tile)
