"""conv2d as an implicit product: pixels × (taps · channels) × output channels, never laid out.

Maths     y[n, k, p, q] = bias[k] + Σ_{r,s,c} w[k, c, r, s] · x[n, c, p·t − o + r·d, q·t − o + s·d],
          stride t, padding o, dilation d along each side
Op        `taut::conv2d`
Shapes    x [N, C, H, W] bf16|fp16, any strides; weight [K, C, R, S] as x; bias [K] as x
          → y [N, K, P, Q] as x, channels_last where x is, else contiguous; N of 0 is allowed
Rungs     ``v1`` gather: `cp.async` of each pixel's inputs; any stride, padding, dilation
          ``v2`` blocks: the copy engine fetches shifted blocks of x and fills in the padding
          (TMA); x of whole strides of rows and columns; C and K multiples of 8, C of 32 where
          the stride along W is not 1; sm_90. None takes ``v2`` where it may
Layout    the kernels see [N, H, W, C] and weights [K, R, S, C]. Give both in channels_last; plain
          NCHW is transposed first and back behind by `taut::transpose`, as cuDNN does, and
          weights that are not channels_last are copied at each call
Numerics  fp32 accumulation, one rounding; the same bits from run to run
CPU       the reference, in plain torch
Limits    forward only; groups = 1; sm_80 and later; fewer than 2³¹ output pixels
Source    implicit GEMM: cuDNN, arXiv:1410.0759, §3. Shifted blocks with zeros from the copy engine
          are the `im2col` mode's idea with plain descriptors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.launch.autocast import without_autocast
from taut_kernels.launch.op_registration import register_op
from taut_kernels.primitives import conv2d_launch, conv2d_tiles
from taut_kernels.primitives.conv2d_launch import Window
from taut_kernels.primitives.conv2d_tiles import GATHER, VERSIONS, ConvTile
from taut_kernels.primitives.gemm import check_copy_engine
from taut_kernels.primitives.image import check_image, is_channels_last, pair

DTYPES = (torch.bfloat16, torch.float16)
_MOST_PIXELS = 2**31
Size = int | tuple[int, int]


def conv2d_ref(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Convolve in torch, in at least fp32: the specification, and the op's CPU implementation.

    Args:
        x: [N, C, H, W] floating point; fp64 gives fp64, for gold results.
        weight: [K, C, R, S].
        bias: [K] or None.
        window: stride, padding, dilation.

    Returns:
        [N, K, P, Q] in the dtype and memory format of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.shape[0] == 0:
        return _empty_output(x, weight, window)
    y = torch.nn.functional.conv2d(
        x.to(wide),
        weight.to(wide),
        None if bias is None else bias.to(wide),
        window.stride,
        window.padding,
        window.dilation,
    )
    return y.to(x.dtype).contiguous(memory_format=_memory_format(x))


def _memory_format(x: Tensor) -> torch.memory_format:
    return torch.channels_last if is_channels_last(x) else torch.contiguous_format


def _empty_output(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    shape = window.output(x, weight)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_memory_format(x))


def launch(
    version: str, tile: ConvTile, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window
) -> Tensor:
    """Run a rung with a given tile; what the op does after the look-up, and what tuning calls.

    Args:
        version: one of :data:`VERSIONS`.
        tile: how to cut the work.
        x: [N, C, H, W].
        weight: [K, C, R, S].
        bias: [K] or None.
        window: stride, padding, dilation.

    Returns:
        [N, K, P, Q].
    """
    N, K, P, Q = window.output(x, weight)
    if N == 0:
        return _empty_output(x, weight, window)
    y = launcher.empty((N, P, Q, K), dtype=x.dtype, device=x.device)
    image = conv2d_launch.as_nhwc(x)
    taps = weight.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    if not taps.is_contiguous():  # one channel, or one tap: torch calls either layout both
        taps = taps.contiguous()
    run = conv2d_launch.launch_gather if version == "v1" else conv2d_launch.launch_blocks
    run(tile, image, taps, bias, window, y)
    if is_channels_last(x):
        return y.permute(0, 3, 1, 2)
    return conv2d_launch.swapped(y.view(N, P * Q, K)).view(N, K, P, Q)


def _launch_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    version: str,
) -> Tensor:
    window = _window(stride, padding, dilation)
    tile = GATHER
    if version == "v2" and x.shape[0]:
        N, K, P, Q = window.output(x, weight)
        C, R, S = weight.shape[1:]
        tile = conv2d_tiles.lookup(launcher.gpu_name(x.device), N, (C, K, R, S, P, Q))
    return launch(version, tile, x, weight, bias, window)


def _window(stride: list[int], padding: list[int], dilation: list[int]) -> Window:
    return Window((stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]))


def _conv2d_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    version: str,
) -> Tensor:
    del version
    return conv2d_ref(x, weight, bias, _window(stride, padding, dilation))


def _fake_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    version: str,
) -> Tensor:
    del bias, version
    return _empty_output(x, weight, _window(stride, padding, dilation))


_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, int[2] dilation, "
    "str version) -> Tensor"
)
register_op(f"taut::conv2d{_SCHEMA}", without_autocast(_conv2d_cpu), _launch_conv2d, _fake_conv2d)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    version: str | None = None,
) -> Tensor:
    """Convolve images with a bank of kernels.

    Args:
        x: [N, C, H, W] bf16 or fp16; channels_last is read where it lies.
        weight: [K, C, R, S] as ``x``; likewise.
        bias: [K] as ``x``, or None.
        stride: from window to window, once or along H and W.
        padding: zeros around x, likewise.
        dilation: from tap to tap, likewise.
        groups: 1; others are refused.
        version: the rung, ``v1`` or ``v2``; None for ``v2`` where the shape and the card allow it.

    Returns:
        [N, K, P, Q] in the dtype of ``x``, channels_last where ``x`` is, else contiguous.

    Raises:
        ValueError: a shape, dtype, device, option or card the contract does not allow; names the
            argument.
    """
    check_image("x", x, DTYPES)
    if groups != 1:
        raise ValueError(f"groups must be 1, got {groups}: grouped convolution is not implemented")
    window = Window(
        pair("stride", stride, 1), pair("padding", padding, 0), pair("dilation", dilation, 1)
    )
    _check_operands(x, weight, bias, window)
    if version is not None and version not in VERSIONS:
        raise ValueError(f"version must be None, {' or '.join(VERSIONS)}, got {version!r}")
    reason = conv2d_launch.why_not_blocks(x, weight, window)
    if version == "v2":
        if reason:
            raise ValueError(reason)
        check_copy_engine(version, x.device, "v1")
    chosen = version or ("v1" if reason or not _has_copy_engine(x.device) else "v2")
    sizes = (window.stride, window.padding, window.dilation)
    y: Tensor = torch.ops.taut.conv2d(x, weight, bias, *sizes, chosen)
    return y


def _has_copy_engine(device: torch.device) -> bool:
    return device.type != "cuda" or launcher.capability(device) >= (9, 0)


def _check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> None:
    check_image("weight", weight, (x.dtype,))
    if weight.shape[1] != x.shape[1] or 0 in weight.shape:
        shape = tuple(weight.shape)
        raise ValueError(
            f"weight must have shape [K, {x.shape[1]}, R, S], none of them 0, got {shape}"
        )
    if bias is not None:
        if bias.shape != (weight.shape[0],) or bias.stride() != (1,) or bias.dtype is not x.dtype:
            wanted = f"contiguous [{weight.shape[0]}] {x.dtype}"
            raise ValueError(f"bias must be {wanted}, got {tuple(bias.shape)} {bias.dtype}")
        if torch.is_grad_enabled() and bias.requires_grad:
            raise ValueError("bias requires grad: the op is forward only, use no_grad()")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, got {tensor.device}")
    N, _, P, Q = window.output(x, weight)
    if P < 1 or Q < 1:
        raise ValueError(f"weight {tuple(weight.shape)} is larger than padded x {tuple(x.shape)}")
    if N * P * Q >= _MOST_PIXELS:
        raise ValueError(f"x has too many output pixels: {N * P * Q} of fewer than {_MOST_PIXELS}")
