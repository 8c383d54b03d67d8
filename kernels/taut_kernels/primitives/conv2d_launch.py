"""Launchers of the convolution's rungs: layouts, blocks, grid. No arithmetic, no validation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from taut_kernels.launch import launcher
from taut_kernels.primitives import transposition
from taut_kernels.primitives.conv2d_kernel import blocks_kernel, gather_kernel
from taut_kernels.primitives.conv2d_tiles import GATHER_FEW, ConvTile, pixel_block
from taut_kernels.primitives.image import Pair, output_size
from taut_kernels.primitives.transpose_tiles import tile_of

_GATHER = launcher.Launcher(gather_kernel)
_LEAST_STEP = 32
"""Channels; with fewer a step V1 may well be the faster rung (not timed)."""


@dataclass(frozen=True, slots=True)
class Window:
    """How the kernel walks over the image; each along H and W."""

    stride: Pair
    padding: Pair
    dilation: Pair

    def output(self, x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
        """Return N, K, P, Q for x [N, C, H, W] and weight [K, C, R, S]."""
        P, Q = (
            output_size(
                x.shape[side + 2],
                weight.shape[side + 2],
                self.stride[side],
                self.padding[side],
                self.dilation[side],
            )
            for side in (0, 1)
        )
        return x.shape[0], weight.shape[0], P, Q


def swapped(x: Tensor) -> Tensor:
    """Return x [N, A, B] contiguous as [N, B, A], by the transpose's best rung."""
    return transposition.launch("v4", tile_of("v4", x.element_size()), x)


def as_nhwc(x: Tensor) -> Tensor:
    """Return an image [N, C, H, W] as [N, H, W, C], where it lies if channels are neighbours.

    Plain NCHW is transposed by our kernel, any other layout copied by torch.
    """
    N, C, H, W = x.shape
    if x.stride(1) == 1 or C == 1:
        return x.permute(0, 2, 3, 1)
    if x.is_contiguous() and N <= transposition.MOST_BATCHES:
        return swapped(x.view(N, C, H * W)).view(N, H, W, C)
    return x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)


def why_not_blocks(x: Tensor, weight: Tensor, window: Window) -> str | None:
    """Say why V2 cannot run a convolution.

    Args:
        x: [N, C, H, W].
        weight: [K, C, R, S].
        window: stride, padding, dilation.

    Returns:
        A reason, or None where it can.
    """
    step = launcher.ALIGNMENT // x.element_size()
    K, C = weight.shape[:2]
    if C % step or K % step:
        return f"weight must have multiples of {step} channels with v2, got {K} and {C}"
    if window.stride == (1, 1):
        return None
    H, W = x.shape[2:]
    if H % window.stride[0] or W % window.stride[1]:
        return f"stride must divide x's {H} rows and {W} columns with v2, got {window.stride}"
    if window.stride[1] != 1 and C % _LEAST_STEP:
        wanted = f"multiples of {_LEAST_STEP} input channels"
        return f"weight must have {wanted} with v2 at stride {window.stride}, got {C}"
    return None


def _described(image: Tensor, stride: Pair) -> Tensor:
    """Return an image [N, H, W, C] a descriptor can take: strides and address of 16 bytes.

    Where columns are taken apart by a stride, they have to lie next to each other, too.
    """
    step = launcher.ALIGNMENT // image.element_size()
    apart = image.stride(3) == 1 and all(stride % step == 0 for stride in image.stride()[:3])
    beside = stride[1] == 1 or image.stride(2) == image.shape[3]
    positive = min(image.stride()[:3]) > 0
    if apart and beside and positive and image.data_ptr() % launcher.ALIGNMENT == 0:
        return image
    return image.clone(memory_format=torch.contiguous_format)


def _image_descriptor(image: Tensor, stride: Pair, block: list[int]) -> TensorDescriptor:
    """Describe an image [N, H, W, C] in blocks [images, rows, columns, channels] a tap."""
    if stride != (1, 1):
        (down, right), (N, H, W, C) = stride, image.shape
        step_n, step_h, step_w, step_c = image.stride()
        shape = (N, H // down, down, W // right, right * C)
        steps = (step_n, down * step_h, step_h, right * step_w, step_c)
        image = image.as_strided(shape, steps)
        block = [*block[:2], 1, *block[2:]]
    return TensorDescriptor(image, list(image.shape), list(image.stride()), block)


def launch_blocks(
    tile: ConvTile, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, y: Tensor
) -> None:
    """Run V2.

    Args:
        tile: how to cut the work.
        x: [N, H, W, C].
        weight: [K, R, S, C], contiguous.
        bias: [K] or None.
        window: what :func:`why_not_blocks` allows.
        y: [N, P, Q, K], contiguous; written.
    """
    K, R, S, C = weight.shape
    N, P, Q, _ = y.shape
    x = _described(x, window.stride)
    images, rows, columns = pixel_block(N, P, Q, tile.pixels)
    block_n, block_c = tile.block_n, tile.block_k
    if window.stride[1] != 1:
        # Beyond the last channel lies the next column's first, not the copy engine's zeros.
        block_c = min(block_c, C & -C)
    taps = weight.view(K, R * S, C).transpose(0, 1)
    programs = -(-N // images) * -(-P // rows) * -(-Q // columns) * -(-K // block_n)
    blocks_kernel[(programs,)](
        _image_descriptor(x, window.stride, [images, rows, columns, block_c]),
        TensorDescriptor(taps, [R * S, K, C], [C, R * S * C, 1], [1, block_n, block_c]),
        bias,
        TensorDescriptor(y, list(y.shape), list(y.stride()), [images, rows, columns, block_n]),
        P,
        Q,
        C,
        K,
        HAS_BIAS=bias is not None,
        TAPS=R * S,
        S=S,
        STRIDE_H=window.stride[0],
        STRIDE_W=window.stride[1],
        PAD_H=window.padding[0],
        PAD_W=window.padding[1],
        DILATION_H=window.dilation[0],
        DILATION_W=window.dilation[1],
        BLOCK_IMAGES=images,
        BLOCK_P=rows,
        BLOCK_Q=columns,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def launch_gather(
    tile: ConvTile, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, y: Tensor
) -> None:
    """Run V1; arguments as :func:`launch_blocks`, any stride.

    Few input channels take a tile of their own.
    """
    K, R, S, C = weight.shape
    N, P, Q, _ = y.shape
    tapwise = tile.block_k <= 2 * C
    if not tapwise:
        tile = GATHER_FEW
    numbers = (N * P * Q, *x.shape[1:], P, Q, K, *x.stride())
    options = (bias is not None, tapwise, R, S, *window.stride, *window.padding, *window.dilation)

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        values = (*options, tile.pixels, tile.block_n, tile.block_k)
        names = gather_kernel.arg_names[-len(values) :]
        settings = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return dict(zip(names, values, strict=True)), settings

    _GATHER(
        (tile, x.dtype, options, numbers),
        (-(-(N * P * Q) // tile.pixels) * -(-K // tile.block_n), 1, 1),
        (x, weight, bias, y),
        numbers,
        constants,
    )
