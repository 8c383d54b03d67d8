"""Forms of the primitives' kernels compiled ahead of time; see `gemm_variants` for the product."""

from __future__ import annotations

from collections.abc import Iterator

from taut_kernels.launch.variant import KernelVariant
from taut_kernels.primitives import (
    conv2d_tiles,
    gemm_variants,
    pooling,
    reduce_tiles,
    transpose_tiles,
)
from taut_kernels.primitives.conv2d_kernel import blocks_kernel, gather_kernel
from taut_kernels.primitives.conv2d_tiles import ConvTile, Layer, pixel_block
from taut_kernels.primitives.pool_kernel import pool2d_kernel
from taut_kernels.primitives.reduce_kernel import reduce_kernel
from taut_kernels.primitives.transpose_kernel import (
    coalesced_kernel,
    rows_kernel,
    tiled_kernel,
    tma_kernel,
)

_ELEMENTS = {"bf16": 2, "fp32": 4}
_HOPPER = ("sm_90",)
RESNET_LAYERS: tuple[Layer, ...] = tuple(
    (channels, channels, 3, 3, side, side)
    for channels, side in ((64, 56), (128, 28), (256, 14), (512, 7))
)
"""ResNet-50's 3×3 layers: C, K, R, S, P, Q (arXiv:1512.03385, table 1). All run at stride 1; the
first of the last three kinds runs at 2, with as many output pixels."""
_IMAGES = 32


def _transposes() -> Iterator[KernelVariant]:
    kernels = {"v1": rows_kernel, "v2": coalesced_kernel, "v3": tiled_kernel, "v4": tiled_kernel}
    for element, itemsize in _ELEMENTS.items():
        for version, kernel in kernels.items():
            tile = transpose_tiles.tile_of(version, itemsize)
            named: dict[str, object] = {"BLOCK_R": tile.block_r, "BLOCK_C": tile.block_c}
            if kernel is not tiled_kernel:
                named = {"BLOCK": tile.block_r * tile.block_c}
            yield KernelVariant(
                label=f"transpose {version} {element}",
                kernel=kernel,
                tile=tile,
                pointers={"x_ptr": element, "y_ptr": element},
                integers=("R", "C", "stride_xb", "stride_xr"),
                divisible_by_16=("R", "C", "stride_xb", "stride_xr"),
                constants=named | {"stride_xc": 1},
                options={"num_warps": tile.num_warps},
            )
        tile = transpose_tiles.tile_of("v5", itemsize)
        r, c = tile.block_r, tile.block_c
        yield KernelVariant(
            label=f"transpose v5 {element}",
            kernel=tma_kernel,
            tile=tile,
            pointers={},
            integers=("C",),
            divisible_by_16=(),
            constants={"BLOCK_R": r, "BLOCK_C": c},
            options={"num_warps": tile.num_warps},
            descriptors={"x_desc": f"{element}[1, {r}, {c}]", "y_desc": f"{element}[1, {c}, {r}]"},
            targets=_HOPPER,
        )


_TAPS: dict[str, object] = {"S": 3, "HAS_BIAS": True, "PAD_H": 1, "PAD_W": 1}
_TAPS |= {"DILATION_H": 1, "DILATION_W": 1}


def gather_variant(tile: ConvTile, *, tapwise: bool) -> KernelVariant:
    """Describe V1 on channels_last images, stride 2."""
    constants = _TAPS | {"TAPWISE": tapwise, "R": 3, "STRIDE_H": 2, "STRIDE_W": 2}
    blocks = {"BLOCK_M": tile.pixels, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    strides = ("stride_xn", "stride_xh", "stride_xw")
    return KernelVariant(
        label=f"conv2d v1{'' if tapwise else ' few channels'}",
        kernel=gather_kernel,
        tile=tile,
        pointers=dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), "bf16"),
        integers=("size", "H", "W", "C", "P", "Q", "K", *strides),
        divisible_by_16=("C", "K", *strides) if tapwise else ("K",),
        constants=constants | blocks | {"stride_xc": 1},
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def blocks_variant(tile: ConvTile, N: int, layer: Layer, stride: int = 1) -> KernelVariant:
    """Describe V2 on one layer."""
    _, _, R, S, P, Q = layer
    images, rows, columns = pixel_block(N, P, Q, tile.pixels)
    block, parted = f"{images}, {rows}, {columns}", f"{images}, {rows}, 1, {columns}"
    blocks = {"BLOCK_IMAGES": images, "BLOCK_P": rows, "BLOCK_Q": columns}
    blocks |= {"BLOCK_N": tile.block_n, "BLOCK_C": tile.block_k}
    return KernelVariant(
        label=f"conv2d v2 [{block}]{'' if stride == 1 else f' /{stride}'}",
        kernel=blocks_kernel,
        tile=tile,
        pointers={"bias_ptr": "bf16"},
        integers=("P", "Q", "C", "K"),
        divisible_by_16=("C", "K"),
        constants=_TAPS | {"TAPS": R * S, "STRIDE_H": stride, "STRIDE_W": stride} | blocks,
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        descriptors={
            "x_desc": f"bf16[{block if stride == 1 else parted}, {tile.block_k}]",
            "w_desc": f"bf16[1, {tile.block_n}, {tile.block_k}]",
            "y_desc": f"bf16[{block}, {tile.block_n}]",
        },
        targets=_HOPPER,
    )


def _convolutions() -> Iterator[KernelVariant]:
    yield gather_variant(conv2d_tiles.GATHER, tapwise=True)
    yield gather_variant(conv2d_tiles.GATHER_FEW, tapwise=False)
    found = {(conv2d_tiles.rule(_IMAGES, layer), layer): _IMAGES for layer in RESNET_LAYERS}
    for table in conv2d_tiles.tables().values():
        for layer, buckets in table.buckets.items():
            found |= {(tile, layer): limit or 4 * _IMAGES for limit, tile in buckets}
    for (tile, layer), N in found.items():
        yield blocks_variant(tile, N, layer)
        if layer in RESNET_LAYERS[1:]:
            yield blocks_variant(tile, N, layer, stride=2)


def _pools() -> Iterator[KernelVariant]:
    sizes = ("size", "C", "H", "W", "P", "Q")
    strides = ("stride_xn", "stride_xc", "stride_xh", "stride_xw")
    for average, last, side in ((False, True, 3), (True, False, 2), (True, True, 7)):
        contiguous = "stride_xc" if last else "stride_xw"
        constants: dict[str, object] = {"CHANNELS_LAST": last, "AVERAGE": average}
        constants |= {"COUNT_PADDING": side == 2, "KERNEL_H": side, "KERNEL_W": side}
        constants |= {"STRIDE_H": 2, "STRIDE_W": 2, "PAD_H": side // 2, "PAD_W": side // 2}
        constants |= {"UNROLL": side * side <= pooling.MOST_UNROLLED, "BLOCK": pooling.BLOCKS[last]}
        yield KernelVariant(
            label=f"{'avg' if average else 'max'}_pool2d {side}x{side}{' nhwc' if last else ''}",
            kernel=pool2d_kernel,
            tile=pooling.BLOCKS[last],
            pointers={"x_ptr": "bf16", "y_ptr": "bf16"},
            integers=(*sizes, *(name for name in strides if name != contiguous)),
            divisible_by_16=("size", "C", "stride_xn"),
            constants=constants | {contiguous: 1},
            options={"num_warps": 4},
        )


def _reductions() -> Iterator[KernelVariant]:
    numbers = ("R", "inner", "share", "splits", "results", "items", "stride_xo", "stride_xr")
    for version in reduce_tiles.VERSIONS:
        for inner, maximum in ((1, False), (4096, True)):
            tile = reduce_tiles.tile_of(version, inner=inner)
            ones = ("inner", "stride_xr", "stride_xi") if inner == 1 else ("stride_xi",)
            constants: dict[str, object] = {"MAXIMUM": maximum, "PERSISTENT": tile.persistent}
            constants |= {"STAGES": tile.num_stages} | dict.fromkeys(ones, 1)
            constants |= {"BLOCK_R": tile.block_r, "BLOCK_I": tile.block_i}
            integers = [name for name in (*numbers, "stride_xi") if name not in ones]
            yield KernelVariant(
                label=f"reduce {version} {'max' if maximum else 'sum'} inner={inner}",
                kernel=reduce_kernel,
                tile=tile,
                pointers={"x_ptr": "bf16", "y_ptr": "fp32"},
                integers=tuple(integers),
                divisible_by_16=("R", "share", "stride_xo")
                + (() if inner == 1 else ("stride_xr", "inner")),
                constants=constants,
                options={"num_warps": tile.num_warps},
                floats=("factor",),
            )


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every specialisation of the primitives that is compiled ahead of time."""
    yield from gemm_variants.kernel_variants()
    yield from _transposes()
    yield from _convolutions()
    yield from _pools()
    yield from _reductions()
