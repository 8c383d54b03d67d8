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

from torch import Tensor

from taut_bench.instruments.work import Arguments, Work, nbytes


def _matmul(call: Arguments) -> Work:
    (M, K), N = call.a.shape, call.b.shape[1]
    return Work(2 * M * N * K, nbytes(call.a, call.b, call.bias), M * N * call.a.element_size())


def _transpose(call: Arguments) -> Work:
    return Work(0, nbytes(call.x), nbytes(call.x))


def _windows(
    x: Tensor,
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


def _conv2d(call: Arguments) -> Work:
    windows = _windows(call.x, call.weight.shape[2:], call.stride, call.padding, call.dilation)
    written = windows * call.weight.shape[0] * call.x.element_size()
    return Work(2 * windows * call.weight.numel(), nbytes(call.x, call.weight, call.bias), written)


def _pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    per_output: int,
) -> Work:
    outputs = _windows(x, kernel_size, stride, padding) * x.shape[1]
    return Work(per_output * outputs, nbytes(x), outputs * x.element_size())


def _max_pool2d(call: Arguments) -> Work:
    return _pool(call.x, call.kernel_size, call.stride, call.padding, math.prod(call.kernel_size))


def _avg_pool2d(call: Arguments) -> Work:
    return _pool(
        call.x, call.kernel_size, call.stride, call.padding, math.prod(call.kernel_size) + 1
    )


def _reduce(call: Arguments) -> Work:
    reduced = call.x.numel() if call.dim is None else call.x.shape[call.dim]
    results = call.x.numel() // reduced if reduced else 0
    flops = call.x.numel() + results * (call.operation == "mean")
    return Work(flops, nbytes(call.x), results * call.x.element_size())


PRIMITIVE_WORK: dict[str, Callable[[Arguments], Work]] = {
    "matmul": _matmul,
    "transpose": _transpose,
    "conv2d": _conv2d,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "reduce": _reduce,
}
"""Name in `torch.ops.taut` → its work from a call's arguments."""
