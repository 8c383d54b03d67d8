"""Our RMSNorm as provider ``taut`` of vLLM's IR ops `rms_norm` and `fused_add_rms_norm`.

vLLM takes the first provider of ``--ir-op-priority`` that supports a call; without that flag its
default stays (`native`, which Inductor fuses). This module imports vLLM and holds no arithmetic.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from vllm import ir

from taut_kernels.norm import rms_norm as ops
from taut_kernels.vllm_plugin import compat, record

PROVIDER = "taut"
OPS = ("rms_norm", "fused_add_rms_norm")
refused: dict[str, list[str]] = {}
"""Op → why calls of it in the model loaded last run on vLLM's next provider."""

_logger = logging.getLogger(__name__)


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


def why_not_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, variance_size: int | None
) -> str | None:
    """Say why our norm behind a residual add does not take a call, None where it does.

    Args:
        x: as for :func:`why_not_norm`.
        residual: of x's shape.
        weight: as for :func:`why_not_norm`.
        variance_size: likewise.
    """
    if residual.dtype != x.dtype:
        return f"the residual is {residual.dtype}, the activations are {x.dtype}"
    if reason := why_not_norm(residual, weight, None):
        return f"the residual: {reason}"
    return why_not_norm(x, weight, variance_size)


def _takes_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _said_if_not("rms_norm", why_not_norm(x, weight, variance_size))


def _takes_add_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    reason = why_not_add_norm(x, x_residual, weight, variance_size)
    return _said_if_not("fused_add_rms_norm", reason)


def _said_if_not(op: str, reason: str | None) -> bool:
    """Say whether a call is ours; log and record once why one is not.

    vLLM asks where it lowers a graph, and only providers that it was told of. A graph from its
    cache is not lowered again, and one that Dynamo traces may keep no side effects.
    """
    if reason is None or torch.compiler.is_dynamo_compiling() or reason in refused.get(op, ()):
        return reason is None
    refused.setdefault(op, []).append(reason)
    _logger.info("%s: calls that are not ours: %s", op, reason)
    record.correct({"refused": refused})
    return False


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
