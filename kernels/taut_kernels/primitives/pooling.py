"""Maximum and average pooling over windows of an image.

Maths     y[n, c, p, q] = max or mean over i, j of x[n, c, p·s − o + i, q·s − o + j]; outside x the
          maximum sees −∞, the average 0, which counts as an element (``count_include_pad``) or not
Ops       `taut::max_pool2d`, `taut::avg_pool2d`
Shapes    x [N, C, H, W] bf16|fp16|fp32, any strides → y [N, C, P, Q] as x, channels_last where x
          is, else contiguous; P = (H + 2·o − k) // s + 1 (no ``ceil_mode``, no dilation); N or C of
          0 are allowed; fewer than 2³¹ outputs
Floor     x read once, y written once, at the copy rate
Numerics  averages in fp32, rounded once; a NaN in a window is its maximum, as in torch
CPU       the references, in plain torch
Limits    forward only, padding at most half the kernel; sm_80 and later
"""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.primitives.image import Pair, check_image, is_channels_last, output_size, pair
from taut_kernels.primitives.pool_kernel import pool2d_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCKS = {True: 512, False: 128}
"""Outputs a program, for channels_last and otherwise. With four outputs a lane a load of columns at
stride 2 would touch four lines where one holds what a warp needs."""
MOST_UNROLLED = 25
"""Elements of a window whose loads are written out one by one."""
_MOST_OUTPUTS = 2**31 - max(BLOCKS.values())
_LAUNCHER = launcher.Launcher(pool2d_kernel)


def max_pool2d_ref(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    """Take maxima in torch: the specification, and the op's CPU implementation."""
    if not x.shape[0] * x.shape[1]:
        return _empty_output(x, kernel_size, stride, padding)
    y = torch.nn.functional.max_pool2d(x, kernel_size, stride, padding)
    return y.contiguous(memory_format=_memory_format(x))


def avg_pool2d_ref(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    count_include_pad: bool,
) -> Tensor:
    """Take averages in torch, in at least fp32: the specification, and the CPU implementation."""
    if not x.shape[0] * x.shape[1]:
        return _empty_output(x, kernel_size, stride, padding)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = torch.nn.functional.avg_pool2d(
        wide, kernel_size, stride, padding, count_include_pad=count_include_pad
    )
    return y.to(x.dtype).contiguous(memory_format=_memory_format(x))


def _memory_format(x: Tensor) -> torch.memory_format:
    return torch.channels_last if is_channels_last(x) else torch.contiguous_format


def _output_shape(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int]
) -> tuple[int, int, int, int]:
    N, C, H, W = x.shape
    P = output_size(H, kernel_size[0], stride[0], padding[0])
    Q = output_size(W, kernel_size[1], stride[1], padding[1])
    return N, C, P, Q


def _empty_output(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    N, C, P, Q = _output_shape(x, kernel_size, stride, padding)
    if is_channels_last(x):
        flat = launcher.empty((N, P, Q, C), dtype=x.dtype, device=x.device)
        return flat.permute(0, 3, 1, 2)
    return launcher.empty((N, C, P, Q), dtype=x.dtype, device=x.device)


def launch(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    *,
    average: bool,
    count_include_pad: bool = True,
) -> Tensor:
    """Run the kernel.

    Args:
        x: [N, C, H, W].
        kernel_size: of the window, along H and W.
        stride: from window to window, likewise.
        padding: outside x, likewise.
        average: else the maximum.
        count_include_pad: an average divides by the whole window.

    Returns:
        [N, C, P, Q].
    """
    y = _empty_output(x, kernel_size, stride, padding)
    if y.numel() == 0:
        return y
    _, C, H, W = x.shape
    last = is_channels_last(x)
    block = BLOCKS[last]
    options = (last, average, count_include_pad, *kernel_size, *stride, *padding)
    numbers = (y.numel(), C, H, W, y.shape[2], y.shape[3], *x.stride())
    names = pool2d_kernel.arg_names[-len(options) - 2 :]
    unroll = kernel_size[0] * kernel_size[1] <= MOST_UNROLLED
    _LAUNCHER(
        (x.dtype, options, numbers),
        (-(-y.numel() // block), 1, 1),
        (x, y),
        numbers,
        lambda: (dict(zip(names, (*options, unroll, block), strict=True)), {"num_warps": 4}),
    )
    return y


def _launch_max_pool2d(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    return launch(x, kernel_size, stride, padding, average=False)


def _launch_avg_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    count_include_pad: bool,
) -> Tensor:
    return launch(
        x, kernel_size, stride, padding, average=True, count_include_pad=count_include_pad
    )


def _fake_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    count_include_pad: bool = True,
) -> Tensor:
    del count_include_pad
    shape = _output_shape(x, kernel_size, stride, padding)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_memory_format(x))


_SIZES = "Tensor x, int[2] kernel_size, int[2] stride, int[2] padding"
register_op(
    f"taut::max_pool2d({_SIZES}) -> Tensor", max_pool2d_ref, _launch_max_pool2d, _fake_pool2d
)
_AVG_POOL2D = f"taut::avg_pool2d({_SIZES}, bool count_include_pad) -> Tensor"
register_op(_AVG_POOL2D, avg_pool2d_ref, _launch_avg_pool2d, _fake_pool2d)

Size = int | tuple[int, int]


def max_pool2d(
    x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0
) -> Tensor:
    """Take the maximum of each window.

    Args:
        x: [N, C, H, W] bf16, fp16 or fp32, any strides.
        kernel_size: of the window, once or along H and W.
        stride: from window to window, likewise; None for ``kernel_size``.
        padding: −∞ around x, likewise.

    Returns:
        [N, C, P, Q] in the dtype of ``x``.

    Raises:
        ValueError: a shape, dtype or size the contract does not allow; names the argument.
    """
    sizes = _check(x, kernel_size, stride, padding)
    y: Tensor = torch.ops.taut.max_pool2d(x, *sizes)
    return y


def avg_pool2d(
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    *,
    count_include_pad: bool = True,
) -> Tensor:
    """Take the average of each window.

    Args:
        x: [N, C, H, W] bf16, fp16 or fp32, any strides.
        kernel_size: of the window, once or along H and W.
        stride: from window to window, likewise; None for ``kernel_size``.
        padding: zeros around x, likewise.
        count_include_pad: zeros of the padding count as elements.

    Returns:
        [N, C, P, Q] in the dtype of ``x``.

    Raises:
        ValueError: a shape, dtype or size the contract does not allow; names the argument.
    """
    sizes = _check(x, kernel_size, stride, padding)
    y: Tensor = torch.ops.taut.avg_pool2d(x, *sizes, count_include_pad)
    return y


def _check(
    x: Tensor, kernel_size: Size, stride: Size | None, padding: Size
) -> tuple[Pair, Pair, Pair]:
    check_image("x", x, DTYPES)
    kernel = pair("kernel_size", kernel_size, 1)
    step = pair("stride", kernel_size if stride is None else stride, 1)
    around = pair("padding", padding, 0)
    for side in (0, 1):
        if 2 * around[side] > kernel[side]:
            raise ValueError(f"padding must be at most half the kernel, got {padding!r}")
        if output_size(x.shape[2 + side], kernel[side], step[side], around[side]) < 1:
            raise ValueError(f"kernel_size {kernel_size!r} is larger than x {tuple(x.shape)}")
    N, C, P, Q = _output_shape(x, list(kernel), list(step), list(around))
    if N * C * P * Q >= _MOST_OUTPUTS:
        raise ValueError(f"x has too many outputs: {N * C * P * Q} of fewer than {_MOST_OUTPUTS}")
    return kernel, step, around
