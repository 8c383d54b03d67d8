"""What the 8-bit products demand of their operands, checked once at the public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.scaled_mm.dispatch import ALIGNMENT, arrivals_size

OUT_DTYPES = (torch.bfloat16, torch.float16)


def fake_product(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return an 8-bit product's result for shape inference; its dtype is the last operand."""
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=rest[-1])


def why_no_layout(K: int) -> str | None:
    """Say why no 8-bit product has K input features, None where it may."""
    if K < 1 or K % ALIGNMENT:
        return f"input features must be a positive multiple of {ALIGNMENT}, got {K}"
    return None


def check_matrices(x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Check activations and weights.

    Args:
        x: [..., K].
        weight: [N, K].
        dtype: both must have it.

    Returns:
        N and K.

    Raises:
        ValueError: names the argument.
    """
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension")
    if weight.dim() != 2:
        raise ValueError(f"weight must have two dimensions, got {weight.dim()}")
    N, K = weight.shape
    if x.shape[-1] != K:
        raise ValueError(f"x must have {K} columns like weight, got {x.shape[-1]}")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype is not dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if weight.device != x.device:
        raise ValueError(f"weight must be on {x.device}, got {weight.device}")
    # The launchers check the address of the first row, which torch.compile cannot trace.
    if weight.stride(1) != 1 or weight.stride(0) % ALIGNMENT:
        raise ValueError(
            f"weight must have contiguous rows aligned to {ALIGNMENT} bytes, got strides "
            f"{weight.stride()}"
        )
    if reason := why_no_layout(K):
        raise ValueError(f"weight: {reason}")
    return N, K


def check_vector(
    name: str,
    tensor: Tensor | None,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check a scale, zero point or bias: its number of elements, dtype, device and contiguity.

    Args:
        name: for the error.
        tensor: what was given; None is accepted.
        sizes: numbers of elements that are right.
        dtype: it must have.
        device: it must be on.

    Raises:
        ValueError: names the argument.
    """
    if tensor is None:
        return
    if tensor.numel() not in sizes:
        expected = " or ".join(str(size) for size in dict.fromkeys(sizes))
        raise ValueError(f"{name} must have {expected} elements, got {tuple(tensor.shape)}")
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def check_out_dtype(out_dtype: torch.dtype) -> None:
    """Refuse a result type the kernels do not write."""
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be torch.bfloat16 or torch.float16, got {out_dtype}")


def check_arrivals(arrivals: Tensor | None, N: int, device: torch.device) -> None:
    """Check a layer's arrival counters."""
    check_vector("arrivals", arrivals, (arrivals_size(N),), torch.int32, device)


def check_no_gradient(op: str, *tensors: Tensor | None) -> None:
    """Refuse operands a gradient is wanted for: the ops are forward only."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{op} is forward only: call it under torch.no_grad()")
