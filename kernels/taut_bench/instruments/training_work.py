"""Bytes and FLOPs of the fused training ops, forward and backward, like those of :mod:`.op_work`.

FLOPs, an element of a row:

- softmax: maximum, difference, exponential, sum, times 1/sum: 5; backward: product, sum,
  difference, product: 4
- RMSNorm: as in serving; backward: normalise, the sum of g · x̂ 2, x̂ · mean, difference, times
  1/rms: 6; weight and added gradient 1 more each, the weight's gradient 2
- LayerNorm: sum, difference, square, sum, times 1/σ: 5, weight and bias 1 each; backward: 9 (a
  difference and the sum and difference of mean(g) more than RMSNorm), weight 1, its gradient 2, the
  bias's 1
- SiLU: sigmoid, product: 2; backward: sigmoid, silu, 1 − σ, times silu, plus σ, times dy: 6
- SwiGLU, an output: as in serving; backward: 6 as SiLU, dy · u and du: 8; alpha 2, beta 1, the
  three clamps and their two masks 5
- RoPE, a rotated element: as in serving
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from taut_bench.instruments.work import Arguments, Work, nbytes


def _softmax(call: Arguments) -> Work:
    return Work(5 * call.x.numel(), nbytes(call.x), nbytes(call.x))


def _softmax_backward(call: Arguments) -> Work:
    return Work(4 * call.y.numel(), nbytes(call.dy, call.y), nbytes(call.y))


def _statistic(x: Tensor) -> int:
    """Bytes of one number a row, kept for the backward pass."""
    return x.shape[0] * (8 if x.dtype is torch.float64 else 4)


def _rms_norm_train(call: Arguments) -> Work:
    per_element = 3 + (call.weight is not None) + (call.residual is not None)
    written = nbytes(call.x, call.residual) + _statistic(call.x)
    return Work(per_element * call.x.numel(), nbytes(call.x, call.weight, call.residual), written)


def _rms_norm_backward(call: Arguments) -> Work:
    per_element = 6 + (call.weight is not None) + (call.dt is not None) + 2 * call.with_dweight
    written = nbytes(call.t) + (nbytes(call.weight) if call.with_dweight else 0)
    return Work(
        per_element * call.t.numel(),
        nbytes(call.dy, call.dt, call.t, call.weight, call.rstd),
        written,
    )


def _layer_norm(call: Arguments) -> Work:
    per_element = 5 + (call.weight is not None) + (call.bias is not None)
    written = nbytes(call.x) + 2 * _statistic(call.x)
    return Work(per_element * call.x.numel(), nbytes(call.x, call.weight, call.bias), written)


def _layer_norm_backward(call: Arguments) -> Work:
    per_element = 9 + (call.weight is not None) + 2 * call.with_dweight + call.with_dbias
    written = nbytes(call.x) + (call.with_dweight + call.with_dbias) * nbytes(call.weight)
    return Work(
        per_element * call.x.numel(),
        nbytes(call.dy, call.x, call.weight, call.mean, call.rstd),
        written,
    )


def _silu(call: Arguments) -> Work:
    return Work(2 * call.x.numel(), nbytes(call.x), nbytes(call.x))


def _silu_backward(call: Arguments) -> Work:
    return Work(6 * call.x.numel(), nbytes(call.dy, call.x), nbytes(call.x))


def _form(forward: bool, alpha: float, beta: float, limit: float | None) -> int:
    scaled, clamped = (1, 3) if forward else (2, 5)
    return scaled * (alpha != 1.0) + (beta != 0.0) + clamped * (limit is not None)


def _swiglu(call: Arguments) -> Work:
    flops = (3 + _form(True, call.alpha, call.beta, call.limit)) * call.gate.numel()
    return Work(flops, nbytes(call.gate, call.up), nbytes(call.gate))


def _swiglu_backward(call: Arguments) -> Work:
    flops = (8 + _form(False, call.alpha, call.beta, call.limit)) * call.dy.numel()
    return Work(flops, nbytes(call.dy, call.gate, call.up), nbytes(call.gate, call.up))


def _swiglu_packed(call: Arguments) -> Work:
    flops = (3 + _form(True, call.alpha, call.beta, call.limit)) * call.x.numel() // 2
    return Work(flops, nbytes(call.x), nbytes(call.x) // 2)


def _swiglu_packed_backward(call: Arguments) -> Work:
    flops = (8 + _form(False, call.alpha, call.beta, call.limit)) * call.dy.numel()
    return Work(flops, nbytes(call.dy, call.x), nbytes(call.x))


def _rope_train(call: Arguments) -> Work:
    T, rotated = call.positions.shape[0], call.cos_sin_cache.shape[1]
    heads = call.q.shape[1] + (0 if call.k is None else call.k.shape[1])
    angles = T * rotated * call.cos_sin_cache.element_size()
    read = nbytes(call.q, call.k, call.positions) + angles
    return Work(3 * T * heads * rotated, read, nbytes(call.q, call.k))


TRAINING_WORK: dict[str, Callable[[Arguments], Work]] = {
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
    "rms_norm_train": _rms_norm_train,
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "silu": _silu,
    "silu_backward": _silu_backward,
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "swiglu_packed": _swiglu_packed,
    "swiglu_packed_backward": _swiglu_packed_backward,
    "rope_train": _rope_train,
}
"""Name in `torch.ops.taut` → its work from a call's arguments."""


def rope_table(call: Arguments) -> dict[int, int]:
    """Return which of RoPE's tensors is a table, and the bytes of it that are read."""
    row = call.cos_sin_cache.shape[1] * call.cos_sin_cache.element_size()
    return {2 if call.k is None else 3: call.positions.shape[0] * row}
