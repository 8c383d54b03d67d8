"""Forms of the training kernels compiled ahead of time: every tile the rules name, bf16 and fp32.

The widths stand for the ways a row is cut: one that divides by nothing, hidden sizes, the longest
row held in registers, and ones beyond it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from taut_kernels.activation.swiglu_kernel import swiglu_backward_kernel, swiglu_kernel
from taut_kernels.launch.variant import KernelVariant
from taut_kernels.norm.backward_kernel import column_sums_kernel, norm_backward_kernel
from taut_kernels.norm.backward_long_kernel import norm_columns_kernel, norm_dx_long_kernel
from taut_kernels.norm.ring import launch_options as ring_options
from taut_kernels.norm.ring_kernel import norm_backward_ring_kernel
from taut_kernels.norm.train_kernel import norm_kernel, norm_long_kernel
from taut_kernels.rope.train_kernel import rope_train_kernel
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tile_options import last_arguments, launch_options, next_power_of_2
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.rowwise.training_tiles import RESIDENT_LIMIT, NormRingTile, TrainingTile
from taut_kernels.softmax.kernel import (
    softmax_backward_kernel,
    softmax_backward_long_kernel,
    softmax_kernel,
    softmax_long_kernel,
)

WIDTHS = (1000, 4096, 8192, 16384, 32768)
ADDED_WIDTHS = (4096, 16384, 32768)
LONG_WIDTHS = (65536, 131072, 262144)
_ROWS = 8192


def softmax(N: int, tile: TrainingTile, *, backward: bool, element: str = "bf16") -> KernelVariant:
    """Describe one form of the softmax.

    Args:
        N: columns.
        tile: how it is cut.
        backward: which pass.
        element: type of the operands.
    """
    names = ("dy_ptr", "y_ptr", "dx_ptr") if backward else ("x_ptr", "y_ptr")
    strides = ("stride_dm", "stride_ym") if backward else ("stride_xm",)
    kernels = (softmax_kernel, softmax_long_kernel)
    if backward:
        kernels = (softmax_backward_kernel, softmax_backward_long_kernel)
    resident = tile.stages == 1
    constants: dict[str, Any] = {"N": N, "ROWS": tile.rows, "BLOCK": tile.block}
    if not resident:
        constants |= {"STAGES": tile.stages, "KEEP": tile.keep}
    else:
        constants |= {"OPAQUE": tile.again and element != "fp32"}
        constants |= {} if backward else {"AGAIN": tile.again}
    return KernelVariant(
        label=f"softmax{'_backward' if backward else ''} {element} N={N}",
        kernel=kernels[not resident],
        tile=tile,
        pointers=dict.fromkeys(names, element),
        integers=("M", *strides),
        divisible_by_16=strides if N % 16 == 0 else (),
        constants=constants,
        options=tile.options(),
    )


def _norm_tiles(op: str, N: int) -> dict[FusedTile, None]:
    """Return the distinct tiles of one forward pass, of the rule and of every card's table."""
    cards = (None, *tiles_fused.tables())
    tiles = [training_tiles.norm_forward(card, op, N, M) for card in cards for M in (1, _ROWS)]
    return dict.fromkeys(dataclasses.replace(tile, pdl=False) for tile in tiles)


def _norm(op: str, N: int, tile: FusedTile, element: str = "bf16") -> KernelVariant:
    centred, added = op == "layer_norm", op.startswith("add_")
    present = {
        "x_ptr": element,
        "residual_ptr": element if added else None,
        "weight_ptr": element,
        "bias_ptr": element if centred else None,
        "y_ptr": element,
        "sum_ptr": element if added else None,
        "mean_ptr": "fp32" if centred else None,
        "rstd_ptr": "fp32",
    }
    strides = ("stride_xm", "stride_rm")
    return KernelVariant(
        label=f"{op}_train {element} N={N}" if not centred else f"{op} {element} N={N}",
        kernel=norm_kernel if N <= RESIDENT_LIMIT else norm_long_kernel,
        tile=tile,
        pointers={name: kind for name, kind in present.items() if kind},
        integers=("M", *strides),
        divisible_by_16=strides if N % 16 == 0 else (),
        constants={name: None for name, kind in present.items() if not kind}
        | {"N": N, "CENTRED": centred, "ROWS": tile.rows, "BLOCK": tile.block},
        floats=("epsilon",),
        options=launch_options(tile),
    )


def _backward_pointers(op: str, element: str) -> dict[str, str | None]:
    """Return the tensors of the norms' backward pass, None for those a form has not."""
    return {
        "x_ptr": element,
        "dy_ptr": element,
        "added_ptr": element if op.startswith("add_") else None,
        "weight_ptr": element,
        "mean_ptr": "fp32" if op == "layer_norm" else None,
        "rstd_ptr": "fp32",
        "dx_ptr": element,
        "dw_ptr": "fp32",
        "db_ptr": "fp32" if op == "layer_norm" else None,
    }


def norm_backward(op: str, N: int, tile: TrainingTile, element: str = "bf16") -> KernelVariant:
    """Describe one form of the norms' backward pass.

    Args:
        op: ``rms_norm``, ``add_rms_norm`` or ``layer_norm``.
        N: columns.
        tile: how it is cut.
        element: type of the operands.
    """
    present = _backward_pointers(op, element)
    constants: dict[str, Any] = {"N": N, "ROWS": tile.rows, "BLOCK": tile.block}
    constants |= {"STAGES": tile.stages, "AGAIN": tile.again}
    kernel = norm_backward_kernel
    if tile == training_tiles.NORM_LONG:
        kernel = norm_dx_long_kernel
        constants = {"N": N, "BLOCK": tile.block}
        del present["dw_ptr"], present["db_ptr"]
    strides = ("stride_xm", "stride_dm", "stride_am")
    return KernelVariant(
        label=f"{op}_backward {element} N={N}",
        kernel=kernel,
        tile=tile,
        pointers={name: kind for name, kind in present.items() if kind},
        integers=("M", *strides),
        divisible_by_16=strides if N % 16 == 0 else (),
        constants={name: None for name, kind in present.items() if not kind} | constants,
        options=tile.options(),
    )


def norm_backward_ring(
    op: str, N: int, tile: NormRingTile, element: str = "bf16", weight: str = "bf16"
) -> KernelVariant:
    """Describe one form of the norms' backward pass with rows in shared memory.

    Args:
        op: ``rms_norm``, ``add_rms_norm`` or ``layer_norm``.
        N: columns.
        tile: how it is cut.
        element: type of the rows.
        weight: type of the weight.
    """
    present = _backward_pointers(op, element) | {"weight_ptr": weight}
    constants = last_arguments(norm_backward_ring_kernel, (N, tile.late, tile.held, tile.num_warps))
    strides = ("stride_xm", "stride_dm", "stride_am")
    return KernelVariant(
        label=f"{op}_backward {element} w {weight} N={N}",
        kernel=norm_backward_ring_kernel,
        tile=tile,
        pointers={name: kind for name, kind in present.items() if kind},
        integers=("M", *strides),
        divisible_by_16=strides,
        constants={name: None for name, kind in present.items() if not kind} | constants,
        options=ring_options(tile),
        targets=("sm_90",),
        # Triton 3.6, with which tiles were measured, spills nothing in those of the rule. 3.9, not
        # measured, does: up to 16 bytes.
        allowed_spill_bytes=16,
    )


def _norm_rings() -> Iterator[KernelVariant]:
    longest = training_tiles.NORM_RING_COLUMNS[1]
    for op in ("rms_norm", "add_rms_norm", "layer_norm"):
        form = {"centred": op == "layer_norm", "added": op.startswith("add_")}
        for rows in (0, training_tiles.NORM_RING_ROWS):
            tile = training_tiles.norm_ring(longest, rows, **form)
            if tile is not None:
                for element, weight in (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16")):
                    yield norm_backward_ring(op, longest, tile, element, weight)


def _columns(centred: bool, N: int) -> KernelVariant:
    tile = training_tiles.NORM_COLUMNS
    present = {"x_ptr": "bf16", "dy_ptr": "bf16", "rstd_ptr": "fp32", "dw_ptr": "fp32"}
    absent = {} if centred else dict.fromkeys(("mean_ptr", "db_ptr"))
    if centred:
        present |= {"mean_ptr": "fp32", "db_ptr": "fp32"}
    return KernelVariant(
        label=f"{'layer' if centred else 'rms'}_norm_backward columns N={N}",
        kernel=norm_columns_kernel,
        tile=tile,
        pointers=present,
        integers=("M", "stride_xm", "stride_dm"),
        divisible_by_16=("stride_xm", "stride_dm"),
        constants=absent | {"N": N, "ROWS": tile.rows, "BLOCK": tile.block},
        options=tile.options(),
    )


def _column_sums(N: int, *, two: bool) -> KernelVariant:
    tile = training_tiles.COLUMN_SUMS
    pointers = {"parts_ptr": "fp32", "sums_ptr": "bf16"}
    other = {f"other_{name}": kind for name, kind in pointers.items()}
    return KernelVariant(
        label=f"norm_backward column sums N={N}{' of two' if two else ''}",
        kernel=column_sums_kernel,
        tile=tile,
        pointers=pointers | other if two else pointers,
        integers=("programs",),
        divisible_by_16=(),
        constants={"N": N, "ROWS": tile.rows, "COLUMNS": tile.block}
        | ({} if two else dict.fromkeys(other)),
        options=tile.options(),
    )


def _swiglu(form: str, layout: str, N: int, *, backward: bool) -> KernelVariant:
    tile = training_tiles.swiglu(N, _ROWS)
    names = ["gate_ptr"] + (["up_ptr"] if layout == "two" else [])
    strides = ["stride_gm", "stride_um"]
    constants: dict[str, Any] = {"N": N, "FORM": form, "ROWS": tile.rows, "BLOCK": tile.block}
    if backward:
        names = ["dy_ptr", *names, "d_gate_ptr"] + (["d_up_ptr"] if layout == "two" else [])
        strides = ["stride_dm", *strides, "stride_dgm", "stride_dum"]
        constants["INTERLEAVED"] = layout == "interleaved"
        constants |= {} if layout == "two" else {"d_up_ptr": None}
    else:
        names.append("y_ptr")
    constants |= {} if layout == "two" else {"up_ptr": None}
    op = "silu" if layout == "one" else "swiglu"
    return KernelVariant(
        label=f"{op}{'_backward' if backward else ''} {form} {layout} N={N}",
        kernel=swiglu_backward_kernel if backward else swiglu_kernel,
        tile=tile,
        pointers=dict.fromkeys(names, "bf16"),
        integers=("M", *strides),
        divisible_by_16=tuple(strides),
        constants=constants,
        floats=("alpha", "beta", "limit"),
        options=tile.options(),
    )


def _rope(heads: tuple[int, int], D: int, half: int, *, neox: bool, inverse: bool) -> KernelVariant:
    tile = training_tiles.rope(sum(heads), _ROWS)
    constants: dict[str, Any] = {"HQ": heads[0], "HK": heads[1], "D": D, "HALF": half}
    constants |= {"WIDTH": next_power_of_2(half), "NEOX": neox, "INVERSE": inverse}
    constants |= {"REST": next_power_of_2(D - 2 * half) if 2 * half < D else 0}
    constants |= {"HEADS": tile.block}
    names = ("q_ptr", "k_ptr", "cache_ptr", "new_q_ptr", "new_k_ptr")
    strides = ("stride_qt", "stride_qh", "stride_kt", "stride_kh")
    form = f"{'neox' if neox else 'interleaved'}{' inverse' if inverse else ''}"
    return KernelVariant(
        label=f"rope_train {form} {heads[0]}+{heads[1]}x{D}",
        kernel=rope_train_kernel,
        tile=tile,
        pointers=dict.fromkeys(names, "bf16") | {"positions_ptr": "i64"},
        integers=("T", *strides),
        divisible_by_16=strides,
        constants=constants,
        options=tile.options(),
    )


def _norms() -> Iterator[KernelVariant]:
    for op in ("rms_norm", "add_rms_norm", "layer_norm"):
        for N in ADDED_WIDTHS if op == "add_rms_norm" else WIDTHS:
            for cut in _norm_tiles(op, N):
                yield _norm(op, N, cut)
            long = op == "layer_norm" and N > training_tiles.LAYER_NORM_BACKWARD_LIMIT
            tile = training_tiles.norm_backward(N, _ROWS, centred=op == "layer_norm")
            tile = training_tiles.NORM_LONG if long else tile
            yield norm_backward(op, N, tile)
        yield _norm(op, 131072, training_tiles.norm_forward(None, op, 131072, _ROWS))
        yield norm_backward(op, 131072, training_tiles.NORM_LONG)
    tile = training_tiles.norm_backward(4096, _ROWS, centred=True)
    yield norm_backward("layer_norm", 4096, tile, "fp32")
    for centred in (False, True):
        yield _columns(centred, 131072)
    yield from _norm_rings()
    for N in (1000, 4096):
        yield from (_column_sums(N, two=two) for two in (False, True))


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every specialisation of the training kernels that is compiled ahead of time."""
    for N in (*WIDTHS, *LONG_WIDTHS):
        yield softmax(N, training_tiles.softmax(N, _ROWS, 2), backward=False)
        yield softmax(N, training_tiles.softmax_backward(N, _ROWS, 2), backward=True)
    yield softmax(32768, training_tiles.softmax(32768, _ROWS, 2), backward=False, element="fp16")
    tile = training_tiles.softmax(32768, _ROWS, 4)
    yield softmax(32768, tile, backward=False, element="fp32")
    tile = training_tiles.softmax_backward(16384, _ROWS, 4)
    yield softmax(16384, tile, backward=True, element="fp32")
    yield from _norms()
    for backward in (False, True):
        for form, layout in (("silu", "one"), ("silu", "two"), ("clamped", "two")):
            yield _swiglu(form, layout, 14336, backward=backward)
    yield _swiglu("clamped", "interleaved", 2880, backward=True)
    for inverse in (False, True):
        yield _rope((32, 8), 128, 64, neox=True, inverse=inverse)
        yield _rope((16, 16), 128, 40, neox=False, inverse=inverse)
