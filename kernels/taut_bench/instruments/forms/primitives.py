"""Calls of the classic ladder: every rung, and the tiles of the rules and of every card's table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from taut_bench.instruments.recorder import HOPPER, KernelCall, KernelVariant, each_once
from taut_kernels.primitives import (
    conv2d_launch,
    conv2d_tiles,
    gemm_launch,
    gemm_tiles,
    pooling,
    reduce_tiles,
    reduction,
    transpose_tiles,
    transposition,
)
from taut_kernels.primitives.conv2d_kernel import blocks_kernel, gather_kernel
from taut_kernels.primitives.conv2d_tiles import RESNET_LAYERS, ConvTile, Layer, pixel_block
from taut_kernels.primitives.gemm_direct_kernel import gemm_direct_kernel
from taut_kernels.primitives.gemm_tiled_kernel import gemm_tiled_kernel
from taut_kernels.primitives.gemm_tiles import GemmTile
from taut_kernels.primitives.gemm_tma_kernel import gemm_tma_kernel
from taut_kernels.primitives.gemm_tuned_kernel import add_splits_kernel, gemm_tuned_kernel
from taut_kernels.primitives.pool_kernel import pool2d_kernel
from taut_kernels.primitives.reduce_kernel import reduce_kernel
from taut_kernels.primitives.transpose_kernel import (
    coalesced_kernel,
    rows_kernel,
    tiled_kernel,
    tma_kernel,
)

_RULE_SHAPES = ((4096, 4096, 4096), (256, 4096, 4096), (64, 4096, 4096), (1, 4096, 14336))
_IMAGES = 32


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _product(
    M: int = 4096, N: int = 4096, K: int = 4096, *, b_transposed: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a [M, K], b [K, N] and c [M, N]."""
    return _empty(M, K), _empty(N, K).t() if b_transposed else _empty(K, N), _empty(M, N)


def tma_call(tile: GemmTile, *, b_transposed: bool) -> KernelCall:
    """Describe V3."""
    run = partial(gemm_launch.launch_tma, tile, *_product(b_transposed=b_transposed))
    label = f"matmul v3{' b.t()' if b_transposed else ''}"
    return KernelCall(label, gemm_tma_kernel, tile, run, HOPPER)


def tuned_call(tile: GemmTile, *, b_transposed: bool, activation: str = "none") -> KernelCall:
    """Describe V4, with a bias where it has an activation."""
    a, b, c = _product(100, b_transposed=b_transposed)
    bias = None if activation == "none" else _empty(4096)
    marks = " b.t()" * b_transposed + f" bias {activation}" * (bias is not None)
    run = partial(gemm_launch.launch_tuned, tile, a, b, bias, activation, c)
    return KernelCall(f"matmul v4{marks}", gemm_tuned_kernel, tile, run, HOPPER)


def _products() -> Iterator[KernelCall]:
    direct, tiled = gemm_tiles.DIRECT, gemm_tiles.TILED
    odd = _product(100, 4112, 4112)
    run = partial(gemm_launch.launch_direct, direct, *odd)
    yield KernelCall("matmul v1", gemm_direct_kernel, direct, run)
    for label, operands in (("matmul v2", _product()), ("matmul v2 masked", odd)):
        run = partial(gemm_launch.launch_tiled, tiled, *operands)
        yield KernelCall(label, gemm_tiled_kernel, tiled, run)
    yield tma_call(gemm_tiles.PIPELINED, b_transposed=True)
    found = {gemm_tiles.rule(*shape): None for shape in _RULE_SHAPES}
    for table in gemm_tiles.tables().values():
        found |= dict.fromkeys(tile for rows in table.choices.values() for _, tile in rows)
    # A form of the kernel is one for any number of splits above 1.
    for tile in dict.fromkeys(replace(tile, split_k=min(tile.split_k, 2)) for tile in found):
        yield tuned_call(tile, b_transposed=True)
    rule = gemm_tiles.rule(*_RULE_SHAPES[0])
    for activation in ("relu", "silu"):
        yield tuned_call(rule, b_transposed=False, activation=activation)
    split, (a, b, c) = GemmTile(64, 128, 64, 4, 3, split_k=4), _product(100)
    add = partial(gemm_launch.launch_tuned, split, a, b, _empty(4096), "gelu", c)
    block = gemm_launch.ADD_BLOCK
    # By pointers on every card; the product before it wants TMA.
    yield KernelCall("matmul add_splits", add_splits_kernel, block, add)


def _transposes() -> Iterator[KernelCall]:
    kernels = {"v1": rows_kernel, "v2": coalesced_kernel, "v3": tiled_kernel, "v4": tiled_kernel}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for version in (*kernels, "v5"):
            tile = transpose_tiles.tile_of(version, dtype.itemsize)
            x = _empty(4096, 4104 if version == "v5" else 4096, dtype=dtype)
            label, run = (
                f"transpose {version} {name}",
                partial(transposition.launch, version, tile, x),
            )
            if version == "v5":
                yield KernelCall(label, tma_kernel, tile, run, HOPPER)
            else:
                yield KernelCall(label, kernels[version], tile, run)


def _convolution(
    N: int, layer: Layer, stride: int
) -> tuple[Tensor, Tensor, Tensor, conv2d_launch.Window, Tensor]:
    """Return an image, weights, bias, window and result, channels beside each other."""
    C, K, R, S, P, Q = layer
    window = conv2d_launch.Window((stride, stride), (1, 1), (1, 1))
    image, weight = _empty(N, stride * P, stride * Q, C), _empty(K, R, S, C)
    return image, weight, _empty(K), window, _empty(N, P, Q, K)


def gather_call(tile: ConvTile, *, tapwise: bool) -> KernelCall:
    """Describe V1 on channels_last images, stride 2."""
    operands = _convolution(3, (64 if tapwise else 3, 64, 3, 3, 7, 7), 2)
    run = partial(conv2d_launch.launch_gather, tile, *operands)
    return KernelCall(f"conv2d v1{'' if tapwise else ' few channels'}", gather_kernel, tile, run)


def blocks_call(tile: ConvTile, N: int, layer: Layer, stride: int = 1) -> KernelCall:
    """Describe V2 on one layer."""
    block = ", ".join(map(str, pixel_block(N, *layer[4:], tile.pixels)))
    label = f"conv2d v2 [{block}]{'' if stride == 1 else f' /{stride}'}"
    run = partial(conv2d_launch.launch_blocks, tile, *_convolution(N, layer, stride))
    return KernelCall(label, blocks_kernel, tile, run, HOPPER)


def _convolutions() -> Iterator[KernelCall]:
    yield gather_call(conv2d_tiles.GATHER, tapwise=True)
    yield gather_call(conv2d_tiles.GATHER_FEW, tapwise=False)
    found = {(conv2d_tiles.rule(_IMAGES, layer), layer): _IMAGES for layer in RESNET_LAYERS}
    for table in conv2d_tiles.tables().values():
        for layer, buckets in table.choices.items():
            found |= {(tile, layer): limit or 4 * _IMAGES for limit, tile in buckets}
    for (tile, layer), N in found.items():
        yield blocks_call(tile, N, layer)
        if layer in RESNET_LAYERS[1:]:
            yield blocks_call(tile, N, layer, stride=2)


def _pools() -> Iterator[KernelCall]:
    for average, last, side in ((False, True, 3), (True, False, 2), (True, True, 7)):
        x = _empty(3, 14, 14, 64).permute(0, 3, 1, 2) if last else _empty(3, 64, 14, 14)
        window = ([side, side], [2, 2], [side // 2, side // 2])
        run = partial(pooling.launch, x, *window, average=average, count_include_pad=side == 2)
        label = f"{'avg' if average else 'max'}_pool2d {side}x{side}{' nhwc' if last else ''}"
        yield KernelCall(label, pool2d_kernel, pooling.BLOCKS[last], run)


def _reductions() -> Iterator[KernelCall]:
    shapes = ((1, False), (4096, True))
    for version, (inner, maximum) in itertools.product(reduce_tiles.VERSIONS, shapes):
        tile, R = reduce_tiles.tile_of(version, inner=inner), 65536
        x = _empty(3, R, inner)
        share = tile.share_of(3, R, inner, 132)
        parts = _empty(-(-R // share), 3 * inner, dtype=torch.float32)
        yield KernelCall(
            f"reduce {version} {'max' if maximum else 'sum'} inner={inner}",
            reduce_kernel,
            tile,
            partial(reduction.stage, tile, x, parts, share, maximum, 1.0),
        )


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every form of the primitives."""
    calls = (_products(), _transposes(), _convolutions(), _pools(), _reductions())
    return each_once(itertools.chain(*calls))
