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

from taut_kernels.instruments.work import Work, nbytes


def _softmax(x: torch.Tensor) -> Work:
    return Work(5 * x.numel(), nbytes(x), nbytes(x))


def _softmax_backward(dy: torch.Tensor, y: torch.Tensor) -> Work:
    return Work(4 * y.numel(), nbytes(dy, y), nbytes(y))


def _statistic(x: torch.Tensor) -> int:
    """Bytes of one number a row, kept for the backward pass."""
    return x.shape[0] * (8 if x.dtype is torch.float64 else 4)


def _rms_norm_train(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, epsilon: float
) -> Work:
    del epsilon
    per_element = 3 + (weight is not None) + (residual is not None)
    written = nbytes(x, residual) + _statistic(x)
    return Work(per_element * x.numel(), nbytes(x, weight, residual), written)


def _rms_norm_backward(
    dy: torch.Tensor,
    dt: torch.Tensor | None,
    t: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    with_dweight: bool,
) -> Work:
    per_element = 6 + (weight is not None) + (dt is not None) + 2 * with_dweight
    written = nbytes(t) + (nbytes(weight) if with_dweight else 0)
    return Work(per_element * t.numel(), nbytes(dy, dt, t, weight, rstd), written)


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> Work:
    del epsilon
    per_element = 5 + (weight is not None) + (bias is not None)
    written = nbytes(x) + 2 * _statistic(x)
    return Work(per_element * x.numel(), nbytes(x, weight, bias), written)


def _layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    with_dweight: bool,
    with_dbias: bool,
) -> Work:
    per_element = 9 + (weight is not None) + 2 * with_dweight + with_dbias
    written = nbytes(x) + (with_dweight + with_dbias) * nbytes(weight)
    return Work(per_element * x.numel(), nbytes(dy, x, weight, mean, rstd), written)


def _silu(x: torch.Tensor) -> Work:
    return Work(2 * x.numel(), nbytes(x), nbytes(x))


def _silu_backward(dy: torch.Tensor, x: torch.Tensor) -> Work:
    return Work(6 * x.numel(), nbytes(dy, x), nbytes(x))


def _form(forward: bool, alpha: float, beta: float, limit: float | None) -> int:
    scaled, clamped = (1, 3) if forward else (2, 5)
    return scaled * (alpha != 1.0) + (beta != 0.0) + clamped * (limit is not None)


def _swiglu(
    gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float | None
) -> Work:
    flops = (3 + _form(True, alpha, beta, limit)) * gate.numel()
    return Work(flops, nbytes(gate, up), nbytes(gate))


def _swiglu_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    alpha: float,
    beta: float,
    limit: float | None,
) -> Work:
    flops = (8 + _form(False, alpha, beta, limit)) * dy.numel()
    return Work(flops, nbytes(dy, gate, up), nbytes(gate, up))


def _swiglu_packed(
    x: torch.Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> Work:
    del interleaved
    flops = (3 + _form(True, alpha, beta, limit)) * x.numel() // 2
    return Work(flops, nbytes(x), nbytes(x) // 2)


def _swiglu_packed_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    alpha: float,
    beta: float,
    limit: float | None,
    interleaved: bool,
) -> Work:
    del interleaved
    flops = (8 + _form(False, alpha, beta, limit)) * dy.numel()
    return Work(flops, nbytes(dy, x), nbytes(x))


def _rope_train(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    neox: bool,
    inverse: bool,
) -> Work:
    del neox, inverse
    T, rotated = positions.shape[0], cos_sin_cache.shape[1]
    heads = q.shape[1] + (0 if k is None else k.shape[1])
    angles = T * rotated * cos_sin_cache.element_size()
    read = nbytes(q, k, positions) + angles
    return Work(3 * T * heads * rotated, read, nbytes(q, k))


TRAINING_WORK: dict[str, Callable[..., Work]] = {
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
"""Name in `torch.ops.taut` → its work from the op's arguments."""


def rope_train_table(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    neox: bool,
    inverse: bool,
) -> dict[int, int]:
    """Return which of RoPE's tensors is a table, and the bytes of it that are read."""
    del q, neox, inverse
    row = cos_sin_cache.shape[1] * cos_sin_cache.element_size()
    return {2 if k is None else 3: positions.shape[0] * row}
