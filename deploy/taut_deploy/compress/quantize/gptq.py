"""GPTQ: round one input channel at a time and push its error onto the channels not yet rounded.

Source: GPTQ, arXiv:2210.17323, §3 (Cholesky form, lazy blocks). Two choices on top of the paper:
the grid of every group is fixed beforehand from the original weights with the Hessian's diagonal as
importance, and columns may be visited in order of importance while groups stay where they are
("static" act-order), so the stored layout is plain and needs no index.
"""

import torch

from taut_deploy.compress.quantize.grid import GridSpec, QuantizedWeight, fit_grid

_LAZY_BLOCK = 128
_MAX_DAMPENING = 1.0


def quantize_weight(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    spec: GridSpec,
    *,
    dampening_frac: float = 0.01,
    act_order: bool = True,
) -> QuantizedWeight:
    """Quantise one linear layer's weight against its input statistics.

    Args:
        weight: [N, K] fp32.
        hessian: [K, K] fp32, mean of ``x xᵀ`` over calibration tokens.
        spec: the grid.
        dampening_frac: share of the mean diagonal added to the diagonal; grows tenfold while the
            matrix is not positive definite.
        act_order: visit columns by falling diagonal.

    Returns:
        Codes with scales and zero points, in the original column order.
    """
    k = weight.shape[1]
    hessian = hessian.clone()
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1.0
    weight = torch.where(dead, torch.zeros_like(weight), weight)
    scale, zero = fit_grid(weight, spec, hessian.diagonal())

    order = (
        hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(k)
    )
    factor = inverse_cholesky(hessian[order][:, order], dampening_frac)
    group_of = torch.arange(k, device=weight.device)[order] // (spec.group_size or k)
    # Input channels are rows from here on, so that one visited channel is contiguous memory.
    channel_scale = scale.float().T[group_of]
    channel_zero = None if zero is None else zero.float().T[group_of]
    visited = _round_with_feedback(
        weight.T[order].contiguous(), factor, channel_scale, channel_zero, spec
    )
    codes = torch.empty_like(visited)
    codes[order] = visited
    return QuantizedWeight(codes.T.to(torch.int8).contiguous(), scale, zero)


def inverse_cholesky(hessian: torch.Tensor, dampening_frac: float) -> torch.Tensor:
    """Upper Cholesky factor of the dampened Hessian's inverse, [K, K].

    Raises:
        ValueError: if the Hessian is not finite, or not positive definite at any dampening tried.
    """
    if not torch.isfinite(hessian).all():
        raise ValueError("the Hessian holds NaN or infinity: calibration activations overflowed")
    mean = hessian.diagonal().mean()
    while dampening_frac <= _MAX_DAMPENING:
        dampened = hessian.clone()
        dampened.diagonal().add_(dampening_frac * mean)
        lower, failed = torch.linalg.cholesky_ex(dampened)
        if not failed:
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        dampening_frac *= 10
    raise ValueError("the Hessian is not positive definite even with 100 % dampening")


def _round_with_feedback(
    remaining: torch.Tensor,
    factor: torch.Tensor,
    channel_scale: torch.Tensor,
    channel_zero: torch.Tensor | None,
    spec: GridSpec,
) -> torch.Tensor:
    """The inner loop; every argument in visiting order.

    Args:
        remaining: [K, N] fp32 weights, overwritten.
        factor: [K, K] from :func:`inverse_cholesky`.
        channel_scale: [K, N] fp32.
        channel_zero: [K, N] fp32 or None.
        spec: the grid.

    Returns:
        [K, N] fp32 integers.
    """
    k = remaining.shape[0]
    codes = torch.empty_like(remaining)
    for start in range(0, k, _LAZY_BLOCK):
        stop = min(start + _LAZY_BLOCK, k)
        block = remaining[start:stop]
        errors = torch.empty_like(block)
        local = factor[start:stop, start:stop]
        for i in range(stop - start):
            scale = channel_scale[start + i]
            zero = 0.0 if channel_zero is None else channel_zero[start + i]
            code = (block[i] / scale + zero).round_().clamp_(spec.low, spec.high)
            error = (block[i] - (code - zero) * scale) / local[i, i]
            block[i + 1 :].addr_(local[i, i + 1 :], error, alpha=-1)
            codes[start + i] = code
            errors[i] = error
        remaining[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return codes
