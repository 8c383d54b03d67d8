"""Calls of the training kernels: every tile the rules name, bf16 and fp32.

The widths stand for the ways a row is cut: one that divides by nothing, hidden sizes, the longest
row held in registers, and ones beyond it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from taut_bench.instruments.recorder import HOPPER, KernelCall, KernelVariant, each_once
from taut_kernels.activation import swiglu_launch
from taut_kernels.activation.swiglu_kernel import swiglu_backward_kernel, swiglu_kernel
from taut_kernels.loss import softmax as softmax_op
from taut_kernels.loss.softmax_kernel import (
    softmax_backward_kernel,
    softmax_backward_long_kernel,
    softmax_kernel,
    softmax_long_kernel,
)
from taut_kernels.norm import train_launch
from taut_kernels.norm.backward_kernel import column_sums_kernel, norm_backward_kernel
from taut_kernels.norm.backward_long_kernel import norm_columns_kernel, norm_dx_long_kernel
from taut_kernels.norm.ring_kernel import norm_backward_ring_kernel
from taut_kernels.norm.train_kernel import norm_kernel, norm_long_kernel
from taut_kernels.rope import train as rope_train
from taut_kernels.rope.train_kernel import rope_train_kernel
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.rowwise.training_tiles import RESIDENT_LIMIT, NormRingTile, TrainingTile

WIDTHS = (1000, 4096, 8192, 16384, 32768)
ADDED_WIDTHS = (4096, 16384, 32768)
LONG_WIDTHS = (65536, 131072, 262144)
NORMS = ("rms_norm", "add_rms_norm", "layer_norm")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
_ROWS = 8192
"""Rows that tiles are chosen for."""
_M = 3
"""Rows of a call: no number that Triton knows more of."""


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def softmax(N: int, tile: TrainingTile, *, backward: bool, dtype: torch.dtype = BF16) -> KernelCall:
    """Describe one call of the softmax.

    Args:
        N: columns.
        tile: how it is cut.
        backward: which pass.
        dtype: of the operands.
    """
    x = _empty(_M, N, dtype=dtype)
    kernels, run = (softmax_kernel, softmax_long_kernel), partial(softmax_op.launch, x, tile)
    if backward:
        kernels = (softmax_backward_kernel, softmax_backward_long_kernel)
        run = partial(softmax_op.launch_backward, x, x, tile)
    label = f"softmax{'_backward' if backward else ''} {_NAMES[dtype]} N={N}"
    return KernelCall(label, kernels[tile.stages > 1], tile, run)


def _softmaxes() -> Iterator[KernelCall]:
    for N in (*WIDTHS, *LONG_WIDTHS):
        yield softmax(N, training_tiles.softmax(N, _ROWS, 2), backward=False)
        yield softmax(N, training_tiles.softmax_backward(N, _ROWS, 2), backward=True)
    for size, dtype in ((2, FP16), (4, FP32)):
        tile = training_tiles.softmax(32768, _ROWS, size)
        yield softmax(32768, tile, backward=False, dtype=dtype)
    tile = training_tiles.softmax_backward(16384, _ROWS, 4)
    yield softmax(16384, tile, backward=True, dtype=FP32)


def _norm_tiles(op: str, N: int) -> dict[FusedTile, None]:
    """Return the distinct tiles of one forward pass, of the rule and of every card's table."""
    cards = (None, *tiles_fused.tables())
    tiles = [training_tiles.norm_forward(card, op, N, M) for card in cards for M in (1, _ROWS)]
    return dict.fromkeys(dataclasses.replace(tile, pdl=False) for tile in tiles)


def _norm(op: str, N: int, tile: FusedTile) -> KernelCall:
    x, weight, centred = _empty(_M, N), _empty(N), op == "layer_norm"
    residual, bias = x if op.startswith("add_") else None, weight if centred else None
    operands = (x, residual, weight, bias, 1e-5)
    return KernelCall(
        f"{op}{'' if centred else '_train'} bf16 N={N}",
        norm_kernel if N <= RESIDENT_LIMIT else norm_long_kernel,
        tile,
        partial(train_launch.forward, *operands, centred=centred, tile=tile),
    )


def _backward(
    op: str,
    N: int,
    tile: TrainingTile | NormRingTile | None,
    dtype: torch.dtype = BF16,
    weight_dtype: torch.dtype | None = None,
) -> Callable[[], object]:
    """Return a call of the norms' backward pass; without a tile it is by the rule."""
    x, row, centred = _empty(_M, N, dtype=dtype), _empty(_M, dtype=FP32), op == "layer_norm"
    weight = _empty(N, dtype=weight_dtype or dtype)
    operands = (x, x if op.startswith("add_") else None, x, weight, row if centred else None, row)
    return partial(train_launch.backward, *operands, (dtype, dtype if centred else None), tile)


def norm_backward(op: str, N: int, tile: TrainingTile, dtype: torch.dtype = BF16) -> KernelCall:
    """Describe one call of the norms' backward pass.

    Args:
        op: one of :data:`NORMS`.
        N: columns.
        tile: how it is cut.
        dtype: of the operands.
    """
    long = tile == training_tiles.NORM_LONG
    run = _backward(op, N, None if long else tile, dtype)
    kernel = norm_dx_long_kernel if long else norm_backward_kernel
    return KernelCall(f"{op}_backward {_NAMES[dtype]} N={N}", kernel, tile, run)


def norm_backward_ring(
    op: str, N: int, tile: NormRingTile, dtype: torch.dtype = BF16, weight: torch.dtype = BF16
) -> KernelCall:
    """Describe one call of the norms' backward pass with rows in shared memory.

    Args:
        op: one of :data:`NORMS`.
        N: columns.
        tile: how it is cut.
        dtype: of the rows.
        weight: type of the weight.
    """
    return KernelCall(
        f"{op}_backward {_NAMES[dtype]} w {_NAMES[weight]} N={N}",
        norm_backward_ring_kernel,
        tile,
        _backward(op, N, tile, dtype, weight),
        HOPPER,
        # Triton 3.6, with which tiles were measured, spills nothing in those of the rule. 3.9, not
        # measured, does: up to 16 bytes.
        16,
    )


def _norm_rings() -> Iterator[KernelCall]:
    longest = training_tiles.NORM_RING_COLUMNS[1]
    types = ((BF16, BF16), (BF16, FP32), (FP16, FP16))
    for op, rows in itertools.product(NORMS, (0, training_tiles.NORM_RING_ROWS)):
        form = {"centred": op == "layer_norm", "added": op.startswith("add_")}
        tile = training_tiles.norm_ring(longest, rows, **form)
        if tile is not None:
            yield from (norm_backward_ring(op, longest, tile, *pair) for pair in types)


def _column_sums(N: int, *, two: bool) -> KernelCall:
    part = _empty(7, N, dtype=FP32)
    parts = [part, part if two else None]
    return KernelCall(
        f"norm_backward column sums N={N}{' of two' if two else ''}",
        column_sums_kernel,
        training_tiles.COLUMN_SUMS,
        partial(train_launch.column_sums, parts, (BF16, BF16)),
    )


def _norms() -> Iterator[KernelCall]:
    for op in NORMS:
        for N in ADDED_WIDTHS if op == "add_rms_norm" else WIDTHS:
            yield from (_norm(op, N, cut) for cut in _norm_tiles(op, N))
            long = op == "layer_norm" and N > training_tiles.LAYER_NORM_BACKWARD_LIMIT
            tile = training_tiles.norm_backward(N, _ROWS, centred=op == "layer_norm")
            yield norm_backward(op, N, training_tiles.NORM_LONG if long else tile)
        yield _norm(op, 131072, training_tiles.norm_forward(None, op, 131072, _ROWS))
        yield norm_backward(op, 131072, training_tiles.NORM_LONG)
    tile = training_tiles.norm_backward(4096, _ROWS, centred=True)
    yield norm_backward("layer_norm", 4096, tile, FP32)
    for op in ("rms_norm", "layer_norm"):
        run, cut = _backward(op, 131072, None), training_tiles.NORM_COLUMNS
        yield KernelCall(f"{op}_backward columns N=131072", norm_columns_kernel, cut, run)
    yield from _norm_rings()
    for N, two in itertools.product((1000, 4096), (False, True)):
        yield _column_sums(N, two=two)


def _swiglu(limit: float | None, layout: str, N: int, *, backward: bool) -> KernelCall:
    tile, dy, clamped = training_tiles.swiglu(N, _ROWS), _empty(_M, N), limit is not None
    form = (1.702, 1.0, limit) if clamped else (1.0, 0.0, None)
    gate = _empty(_M, 2 * N) if layout == "interleaved" else dy
    up = dy if layout == "two" else None
    run: Callable[[], object] = partial(swiglu_launch.launch, gate, up, *form, tile)
    if backward:
        interleaved, pair = layout == "interleaved", (gate, up)
        operands = (dy, *pair, *pair, form)
        run = partial(swiglu_launch.launch_backward, *operands, interleaved=interleaved, tile=tile)
    op = f"{'silu' if layout == 'one' else 'swiglu'}{'_backward' if backward else ''}"
    return KernelCall(
        f"{op} {'clamped' if clamped else 'silu'} {layout} N={N}",
        swiglu_backward_kernel if backward else swiglu_kernel,
        tile,
        run,
    )


def _activations() -> Iterator[KernelCall]:
    for backward in (False, True):
        for limit, layout in ((None, "one"), (None, "two"), (7.0, "two")):
            yield _swiglu(limit, layout, 14336, backward=backward)
    yield _swiglu(7.0, "interleaved", 2880, backward=True)


def _rope(heads: tuple[int, int], D: int, rotated: int, *, neox: bool, inverse: bool) -> KernelCall:
    tile = training_tiles.rope(sum(heads), _ROWS)
    q, k = (_empty(_M, count, D) for count in heads)
    operands = (_empty(_M, dtype=torch.int64), q, k, _empty(512, rotated), neox, inverse, tile)
    form = f"{'neox' if neox else 'interleaved'}{' inverse' if inverse else ''}"
    label = f"rope_train {form} {heads[0]}+{heads[1]}x{D}"
    return KernelCall(label, rope_train_kernel, tile, partial(rope_train.launch, *operands))


def _rotations() -> Iterator[KernelCall]:
    for inverse in (False, True):
        yield _rope((32, 8), 128, 128, neox=True, inverse=inverse)
        yield _rope((16, 16), 128, 80, neox=False, inverse=inverse)


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every form of the kernels."""
    return each_once(itertools.chain(_softmaxes(), _norms(), _activations(), _rotations()))
