"""Bytes and FLOPs of the primitives, like those of :mod:`.op_work`.

- a product: 2·M·N·K; a convolution: 2 · outputs · C · R · S, taps in the padding counted as others
- a pool, an output: as many comparisons or additions as its window has elements; an average's
  factor 1 more
- a reduction: one addition or comparison an element; a mean's factor 1 more a result
- a transpose computes nothing

Bytes are those of operands and result, each once, whatever the rung.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from taut_kernels.instruments.work import Work, nbytes


def _matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str, version: str
) -> Work:
    del activation, version
    (M, K), N = a.shape, b.shape[1]
    return Work(2 * M * N * K, nbytes(a, b, bias), M * N * a.element_size())


def _transpose(x: torch.Tensor, version: str) -> Work:
    del version
    return Work(0, nbytes(x), nbytes(x))


def _windows(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> int:
    """Return how many windows an image [N, C, H, W] has, of one channel."""
    sides = zip(x.shape[2:], kernel_size, stride, padding, dilation, strict=True)
    return x.shape[0] * math.prod(
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, gap in sides
    )


def _conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    version: str,
) -> Work:
    del version
    windows = _windows(x, weight.shape[2:], stride, padding, dilation)
    written = windows * weight.shape[0] * x.element_size()
    return Work(2 * windows * weight.numel(), nbytes(x, weight, bias), written)


def _pool(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    per_output: int,
) -> Work:
    outputs = _windows(x, kernel_size, stride, padding) * x.shape[1]
    return Work(per_output * outputs, nbytes(x), outputs * x.element_size())


def _max_pool2d(
    x: torch.Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Work:
    return _pool(x, kernel_size, stride, padding, math.prod(kernel_size))


def _avg_pool2d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
) -> Work:
    del count_include_pad
    return _pool(x, kernel_size, stride, padding, math.prod(kernel_size) + 1)


def _reduce(x: torch.Tensor, operation: str, dim: int | None, keepdim: bool, version: str) -> Work:
    del keepdim, version
    reduced = x.numel() if dim is None else x.shape[dim]
    results = x.numel() // reduced if reduced else 0
    flops = x.numel() + results * (operation == "mean")
    return Work(flops, nbytes(x), results * x.element_size())


PRIMITIVE_WORK: dict[str, Callable[..., Work]] = {
    "matmul": _matmul,
    "transpose": _transpose,
    "conv2d": _conv2d,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "reduce": _reduce,
}
"""Name in `torch.ops.taut` → its work from the op's arguments."""
