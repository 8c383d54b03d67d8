"""The projection in front of a linear loss, and the sums its gradients collect in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from taut_kernels.launch import launcher


class Gradients(NamedTuple):
    """Gradients of a projection's operands; one that is not wanted has no elements."""

    x: Tensor
    weight: Tensor
    bias: Tensor


class Wants(NamedTuple):
    """Which gradients are wanted."""

    x: bool
    weight: bool
    bias: bool


@dataclass(frozen=True, slots=True)
class Projection:
    """Logits = x · weightᵀ + bias, made a part at a time by torch (cuBLAS on CUDA).

    Attributes:
        x: [M, H].
        weight: [V, H], dtype of ``x``.
        bias: [V], dtype of ``x``, or None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def logits(self, out: Tensor, rows: slice, columns: slice = slice(None)) -> Tensor:
        """Write the logits of some rows and columns.

        Args:
            out: [rows, columns], dtype of ``x``.
            rows: of x.
            columns: of the vocabulary.

        Returns:
            ``out``.
        """
        weight = self.weight[columns].t()
        if self.bias is None:
            return torch.mm(self.x[rows], weight, out=out)
        return torch.addmm(self.bias[columns], self.x[rows], weight, out=out)

    def empty_gradients(self, wants: Wants) -> Gradients:
        """Allocate what is wanted; what is not has no elements, a bias that does not exist too."""

        def empty(like: Tensor, wanted: bool) -> Tensor:
            shape = tuple(like.shape) if wanted else (0,)
            return launcher.empty(shape, dtype=like.dtype, device=like.device)

        bias = self.weight[:0, 0] if self.bias is None else self.bias
        return Gradients(
            empty(self.x, wants.x), empty(self.weight, wants.weight), empty(bias, wants.bias)
        )


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Compute total = a · b, or total += a · b.

    Args:
        total: [m, n] in the dtype of ``a`` or fp32, changed.
        a: [m, k].
        b: [k, n], dtype of ``a``.
        first: total holds nothing yet.
    """
    if total.dtype is a.dtype:
        if first:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif total.is_cuda:
        # Sums and result in fp32 in one product, as cuBLAS has them anyway.
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif first:
        # Not `a @ b`: autocast would make that a product in 16 bits.
        torch.mm(a.to(total.dtype), b.to(total.dtype), out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def column_sums(dlogits: Tensor) -> Tensor:
    """Sum [rows, columns] over the rows in at least fp32."""
    return dlogits.sum(dim=0, dtype=torch.promote_types(dlogits.dtype, torch.float32))


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def autocast_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast a projection's operands as autocast casts those of a linear layer."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_projection(x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Hold a projection's operands to the contract.

    Args:
        x: [..., H].
        weight: [V, H].
        bias: [V] or None.
        prefix: of the arguments' names in errors.

    Raises:
        ValueError: a shape, dtype or device is wrong; names the argument.
    """
    if x.dtype not in DTYPES or (x.is_cuda and x.dtype is torch.float64):
        raise ValueError(f"{prefix}x must be bfloat16, float16 or float32, got {x.dtype}")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{prefix}x must have shape [..., H], got {tuple(x.shape)}")
    H = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] != H:
        raise ValueError(f"{prefix}weight must have shape [V, {H}], got {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"{prefix}bias must have shape {(weight.shape[0],)}, got {tuple(bias.shape)}"
        )
    for name, operand in (("weight", weight), ("bias", bias)):
        if operand is not None and (operand.dtype is not x.dtype or operand.device != x.device):
            raise ValueError(
                f"{prefix}{name} must be {x.dtype} on {x.device}, "
                f"got {operand.dtype} on {operand.device}"
            )


def check_chunk(chunk_size: int | None, most: int | None = None) -> None:
    """Hold a chunk size to its range.

    Raises:
        ValueError: it is below 1, or above ``most``.
    """
    if chunk_size is not None and (chunk_size < 1 or (most is not None and chunk_size > most)):
        limit = "" if most is None else f" and at most {most} columns"
        raise ValueError(f"chunk_size must be at least 1{limit}, got {chunk_size}")
