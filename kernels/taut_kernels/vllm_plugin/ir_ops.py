"""Our RMSNorm as provider ``taut`` of vLLM's IR ops `rms_norm` and `fused_add_rms_norm`.

vLLM takes the first provider of ``--ir-op-priority`` that supports a call; without that flag its
default stays (`native`, which Inductor fuses). This module imports vLLM and holds no arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir

from taut_kernels.fused import rms_norm as ops
from taut_kernels.vllm_plugin import compat

PROVIDER = "taut"
OPS = ("rms_norm", "fused_add_rms_norm")


def why_not_norm(x: Tensor, weight: Tensor | None, variance_size: int | None) -> str | None:
    """Say why our norm does not take a call, None where it does.

    Args:
        x: activations, real or fake.
        weight: of the norm, or None.
        variance_size: columns the mean square is taken over, None for all.
    """
    if variance_size is not None:
        return "the mean square is taken over a part of the row"
    if x.dtype not in ops.DTYPES:
        return f"activations are {x.dtype}"
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        return f"the weight is {weight.dtype}, the activations are {x.dtype}"
    if x.dim() != 2 and not x.is_contiguous():
        return "the rows lie at more than one stride"
    if x.stride(-1) != 1 or x.shape[-1] > ops.MAX_N:
        return f"a row of {x.shape[-1]} columns at stride {x.stride(-1)}"
    return None


def _takes_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return why_not_norm(x, weight, variance_size) is None


def _takes_add_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        why_not_norm(x, weight, variance_size) is None
        and x_residual.dtype == x.dtype
        and why_not_norm(x_residual, weight, None) is None
    )


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Normalise; parameters and result are those of vLLM's IR op."""
    rows = x.view(-1, x.shape[-1])
    y: Tensor = torch.ops.taut.rms_norm.plain(rows, weight, epsilon)
    return y.view(x.shape)


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the residual in place and normalise; parameters and results are vLLM's."""
    rows, residual = (t.view(-1, x.shape[-1]) for t in (x, x_residual))
    y: Tensor = torch.ops.taut.rms_norm.default(rows, weight, residual, epsilon)
    return y.view(x.shape), x_residual


def install(supported: bool) -> None:
    """Register the provider in this process, once.

    Args:
        supported: whether this platform runs our CUDA kernels; vLLM passes over a provider that is
            not.

    Raises:
        IncompatibleVllmError: this vLLM's IR ops have other parameters.
    """
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    compat.register_ir_provider(ir.ops.rms_norm, PROVIDER, rms_norm, _takes_norm, supported)
    compat.register_ir_provider(
        ir.ops.fused_add_rms_norm,
        PROVIDER,
        fused_add_rms_norm,
        _takes_add_norm,
        supported,
        inplace=True,
    )


def live_providers() -> dict[str, str]:
    """Return which provider vLLM asks first for each op, in a worker after its start."""
    found = {}
    for name in OPS:
        priority = getattr(ir.ops, name).get_priority()
        found[name] = priority[0] if priority else "native"
    return found
