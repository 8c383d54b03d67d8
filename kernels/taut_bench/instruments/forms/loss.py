"""Calls of the loss kernels: every tile a table or the rule names.

The vocabularies stand for the ways a row is cut: one step, GPT-2's, which divides by nothing,
Llama-2's, Llama-3's and Gemma-2's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from taut_bench.instruments.recorder import HOPPER, KernelCall, KernelVariant, each_once
from taut_kernels.loss import (
    block_softmax,
    cross_entropy_ring,
    divergence,
    gradient_scale,
    row_softmax,
    row_weights,
)
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.loss.cross_entropy_kernel import cross_entropy_kernel
from taut_kernels.loss.cross_entropy_ring_kernel import cross_entropy_ring_kernel
from taut_kernels.loss.divergence_kernel import divergence_kernel
from taut_kernels.loss.row_softmax import Objective
from taut_kernels.loss.row_weights_kernel import row_weights_kernel, weighted_sum_kernel
from taut_kernels.loss.scale_kernel import scale_kernel
from taut_kernels.loss.tiles import LossTile, RingTile
from taut_kernels.loss.vocabulary_block_kernel import block_gradient_kernel, block_statistics_kernel

VOCABULARIES = (1000, 32000, 50257, 128256, 256000)
SOFTMAX_COLUMNS = (24576, 131072, 262144)
BLOCK_COLUMNS = (1024, 2048, 3584, 8192)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
_PLAIN, _EXTRAS = Objective(), Objective(label_smoothing=0.1, z_loss=1e-4, softcap=30.0)
_M = 3
"""Rows of a call: no number that Triton knows more of."""


def _empty(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _targets(rows: int = _M) -> Tensor:
    return _empty(rows, dtype=torch.int64)


def _tiles(op: str, V: int) -> dict[LossTile, None]:
    """Return the distinct tiles of one op and vocabulary, of the rule and of every card's table."""
    measured = [table.choices.get((op, V)) for table in tiles_loss.tables().values()]
    found = (tiles_loss.rule(op, V), *measured)
    return dict.fromkeys(tile for tile in found if isinstance(tile, LossTile))


def _cross_entropy(
    form: str,
    dtype: torch.dtype,
    V: int,
    tile: LossTile,
    *,
    extras: bool = False,
    strided: bool = False,
) -> KernelCall:
    """Describe ``loss``, ``loss and gradient``, or ``gradient`` from a given lse."""
    logits = _empty(_M, V, 2, dtype=dtype)[..., 0] if strided else _empty(_M, V, dtype=dtype)
    row, has_gradient = _empty(_M), form != "loss"
    operands = (
        logits,
        _targets(),
        _EXTRAS if extras else _PLAIN,
        row if has_gradient else None,
        _empty(_M, V, dtype=dtype) if has_gradient else None,
        row if form == "gradient" else None,
    )
    marks = ("+" if extras else "") + (" strided" if strided else "")
    return KernelCall(
        f"cross_entropy{marks} {form} {_NAMES[dtype]} V={V}",
        cross_entropy_kernel,
        tile,
        partial(row_softmax.launch, *operands, tile),
    )


def _row_calls() -> Iterator[KernelCall]:
    for V in VOCABULARIES:
        for tile in _tiles("cross_entropy", V):
            yield _cross_entropy("loss and gradient", BF16, V, tile)
    V = 128256
    for tile in _tiles("cross_entropy", V):
        yield _cross_entropy("loss and gradient", BF16, V, tile, extras=True)
        yield _cross_entropy("loss and gradient", FP32, V, tile, extras=True)
        yield _cross_entropy("loss", BF16, V, tile)
        yield _cross_entropy("gradient", FP16, V, tile)
    scalar = tiles_loss.SCALAR_LOADS
    yield _cross_entropy("loss and gradient", BF16, V, scalar, strided=True)


def _rings(V: int) -> dict[RingTile, None]:
    """Return the distinct rings of one vocabulary, of the rule and of every card's table."""
    measured = [table.choices.get((tiles_loss.RING, V)) for table in tiles_loss.tables().values()]
    found = (tiles_loss.ring_rule(V), *measured)
    return dict.fromkeys(tile for tile in found if isinstance(tile, RingTile))


def _ring(V: int, tile: RingTile, *, batched: bool = False) -> KernelCall:
    logits = _empty(_M, 5, V, dtype=BF16) if batched else _empty(_M, V, dtype=BF16)
    rows = logits.numel() // V
    operands = (tile, logits, _targets(rows), _empty(rows), logits, -100, 0.0)
    label = f"cross_entropy_ring{' batched' * batched} bf16 V={V}"
    run = partial(cross_entropy_ring.launch, *operands)
    return KernelCall(label, cross_entropy_ring_kernel, tile, run, HOPPER)


def _softmax_ring(V: int, tile: RingTile, dtype: torch.dtype) -> KernelCall:
    run = partial(cross_entropy_ring.launch_softmax, tile, _empty(_M, V, dtype=dtype))
    label = f"softmax_ring {_NAMES[dtype]} V={V}"
    return KernelCall(label, cross_entropy_ring_kernel, tile, run, HOPPER)


def _ring_calls() -> Iterator[KernelCall]:
    measured = (
        V
        for table in tiles_loss.tables().values()
        for op, V in table.choices
        if op == tiles_loss.RING
    )
    for V in dict.fromkeys((*VOCABULARIES, *measured)):
        if V >= cross_entropy_ring.MIN_COLUMNS and V % 16 == 0:
            yield from (_ring(V, tile) for tile in _rings(V))
    for V, dtype in itertools.product(SOFTMAX_COLUMNS, (BF16, FP16)):
        yield from (_softmax_ring(V, tile, dtype) for tile in _rings(V))
    yield from (_ring(32000, tile, batched=True) for tile in _rings(32000))


def _divergence(form: str, gradient: bool, V: int, tile: LossTile) -> KernelCall:
    logits, row = _empty(_M, V, dtype=BF16), _empty(_M)
    which = divergence.Divergence(form, 2.0, 0.5)
    scale, grad = (row, logits) if gradient else (None, None)
    keep = _empty(_M, dtype=torch.bool)
    return KernelCall(
        f"divergence {form}{' and gradient' if gradient else ''} V={V}",
        divergence_kernel,
        tile,
        partial(divergence.launch, logits, logits, keep, which, scale, grad, tile),
    )


def _divergences() -> Iterator[KernelCall]:
    for form, tile in itertools.product(divergence.FORMS, _tiles("divergence", 128256)):
        yield _divergence(form, True, 128256, tile)
    for V in (1000, 50257, 256000):
        for tile in _tiles("divergence", V):
            yield _divergence("jsd", True, V, tile)
    yield _divergence("forward_kl", False, 128256, tiles_loss.rule("divergence", 128256))


def _blocks(columns: int, extras: bool) -> Iterator[KernelCall]:
    block, num_warps = block_softmax.block_options(columns)
    tile, mark = f"{block}/{num_warps}w", "+" if extras else ""
    # 16 rows: of the statistics each begins at an aligned address.
    R, start, objective = 16, 3, _EXTRAS if extras else _PLAIN
    logits, target, row = _empty(R, columns, dtype=BF16), _targets(R), _empty(R)
    run = partial(block_softmax.launch_statistics, logits, target, _empty(4, R), start, objective)
    yield KernelCall(f"block_statistics{mark} bf16", block_statistics_kernel, tile, run)
    operands = (logits, logits, target, row, row, start, 256000, objective)
    run = partial(block_softmax.launch_gradient, *operands)
    yield KernelCall(f"block_gradient{mark} bf16", block_gradient_kernel, tile, run)


def _around() -> Iterator[KernelCall]:
    tile = f"{row_weights.BLOCK}/{row_weights.NUM_WARPS}w"
    run = partial(row_weights.launch_row_weights, _targets(), -100, mean=True)
    yield KernelCall("row_weights", row_weights_kernel, tile, run)
    summed = partial(row_weights.launch_weighted_sum, _empty(_M), _empty(_M))
    yield KernelCall("weighted_sum", weighted_sum_kernel, tile, summed)
    for columns in BLOCK_COLUMNS:
        yield from _blocks(columns, extras=columns == 2048)
    tile = f"{gradient_scale.BLOCK}/{gradient_scale.NUM_WARPS}w"
    scaled = partial(gradient_scale.launch_scale_, _empty(4096, dtype=BF16), _empty(1))
    yield KernelCall("scale bf16", scale_kernel, tile, scaled)


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every form of the loss kernels."""
    return each_once(itertools.chain(_row_calls(), _ring_calls(), _divergences(), _around()))
