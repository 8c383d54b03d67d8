"""W8A16 on a CPU, where vLLM has no kernel for it: our product, or the layer dequantised at load.

Ours must give a known answer and be faster than the bf16 product of the same layer over decode and
a prompt; the choice is made once and kept (:mod:`.cpu_choice`). Dequantised, a layer takes a bf16
model's memory, which the record says. Holds no arithmetic. This module imports vLLM.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import MPLinearKernel
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from taut_kernels.formats.token_table import signed_codes
from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.vllm_plugin import compat, cpu_choice, cpu_weight_speed, known_answer

_logger = logging.getLogger(__name__)

BITS = 8
_TOKENS = (1, 16, 64)
_ROWS_AT_ONCE = 4096


@cache
def why_ours() -> str | None:
    """Say why our product serves 8-bit weights here, None where layers are dequantised."""
    if cpu_linear.why_not_here() is not None:
        return None
    reason = cpu_weight_speed.kept("int8-weights", _measure)
    if reason is not None:
        _logger.info("taut kernels: %s; W8A16 layers run on taut::%s", reason, cpu_linear.OP)
    return reason


def obstacle(groups: int, K: int, dtype: torch.dtype) -> str | None:
    """Say why a layer is dequantised here, None where our product serves it.

    Args:
        groups: scales along K.
        K: input features of the layer's shard.
        dtype: of the activations.
    """
    if dtype is not torch.bfloat16:
        return f"no kernel of {BITS}-bit weights on a CPU in {str(dtype).removeprefix('torch.')}"
    reason = cpu_linear.why_not_packed(K, groups, BITS) or cpu_linear.why_not_here()
    if reason is None and why_ours() is None:
        return f"taut::{cpu_linear.OP} is not faster than bf16 on this CPU"
    return reason


def _measure() -> str | None:
    """Compare with the bf16 product that vLLM takes for a layer that is not quantised."""
    layer = cpu_weight_speed.MeasuredLayer(BITS)
    theirs = [_Dense(layer.codes.bfloat16()) for _ in range(cpu_choice.COPIES)]
    return layer.why_faster(
        "vLLM's bf16 product", lambda x: [partial(one.multiply, x, None) for one in theirs]
    )


class _Dense(torch.nn.Module):
    """A layer in 16 bits, as vLLM multiplies one that is not quantised.

    Args:
        weight: [N, K].
        bias: [N] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self._method = UnquantizedLinearMethod()
        self._method.process_weights_after_loading(self)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer; x is [..., K], the result [..., N]."""
        y: Tensor = self._method.apply(self, x, bias)
        return y


class TautCPUW8A16LinearKernel(MPLinearKernel):  # type: ignore[misc]
    """W8A16 on a CPU, symmetric or with zero points.

    The class name is unique on purpose: ``VLLM_DISABLED_KERNELS`` matches it.
    """

    taut_scheme = "W8A16"
    isa: int | None = None
    """Of our product; None where the layer is dequantised."""
    why_dequantised: str | None = None
    dense: _Dense

    @classmethod
    def get_min_capability(cls) -> int:
        """Return -1: no CUDA."""
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Decide on one layer; a refusal carries its reason."""
        reason = _refusal(c)
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Lay the weights out for what multiplies them, in place, and ask a known answer."""
        K, N = self.config.partition_weight_shape
        weight, scale, zero = compat.kernel_weight_params(self, layer)
        stored = _Stored(weight.data, scale.data, None if zero is None else zero.data, N)
        self.why_dequantised = obstacle(scale.shape[1], K, self.config.act_type)
        names = (self.w_q_name, self.w_s_name, self.w_zp_name)
        if self.why_dequantised is None:
            self.isa = int(cpu_linear.best_isa())
            operands = cpu_linear.pack(stored.codes, stored.scale, stored.zero, BITS)
        else:
            bias: Any = layer.bias
            self.dense = _Dense(stored.dequantised(self.config.act_type), bias)
            operands = (torch.empty(0), torch.empty(0), None)
        for name, operand in zip(names, operands, strict=True):
            if name is not None and operand is not None:
                # A plain Parameter: Dynamo does not trace vLLM's parameter classes.
                setattr(layer, name, torch.nn.Parameter(operand, requires_grad=False))
            elif name is not None and hasattr(layer, name):
                setattr(layer, name, None)
        self._check(layer, stored)

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Compute the layer; x is [..., K], the result [..., N]."""
        if self.isa is None:
            return self.dense.multiply(x, bias)
        K, N = self.config.partition_weight_shape
        weight, scale, zero = compat.kernel_weight_params(self, layer)
        y = cpu_linear.multiply(x.reshape(-1, K), weight, scale, zero, bias, N, self.isa)
        return y.view(*x.shape[:-1], N)

    def taut_record(self) -> tuple[str, str | None]:
        """Return what :func:`taut_kernels.vllm_plugin.selection.audit` records."""
        why = self.why_dequantised
        return type(self).__name__, why and f"{why}: dequantised at load, no memory saved"

    def _check(self, layer: torch.nn.Module, stored: _Stored) -> None:
        K, N = self.config.partition_weight_shape
        groups = stored.scale.shape[1]
        zeros = "" if stored.zero is None else " with zero points"
        known_answer.check(
            type(self).__name__,
            f"W8A16 in groups of {K // groups}{zeros}",
            (N, K),
            _TOKENS,
            lambda x: self.apply_weights(layer, x),
            stored.rows,
            known_answer.plain_block(K),
            self.config.act_type,
            stored.codes.device,
        )


class _Stored:
    """A layer as compressed-tensors stores it, unpacked.

    Attributes:
        codes: [N, K] int8.
        scale: [N, G].
        zero: [N, G] int8, or None.

    Args:
        packed: ``weight_packed`` [N, K/4] int32.
        scale: ``weight_scale`` [N, G].
        zero: ``weight_zero_point`` [N/4, G] int32, or None.
        N: output features.
    """

    def __init__(self, packed: Tensor, scale: Tensor, zero: Tensor | None, N: int) -> None:
        parts = (packed[first : first + _ROWS_AT_ONCE] for first in range(0, N, _ROWS_AT_ONCE))
        self.codes = torch.cat([signed_codes(part, BITS).to(torch.int8) for part in parts])
        self.scale, self.zero = scale, None
        if zero is not None:
            by_group = signed_codes(zero.t().contiguous(), BITS)[:, :N]
            self.zero = by_group.t().to(torch.int8).contiguous()

    def rows(self, rows: slice) -> Tensor:
        """Return some output features' weights, fp32 [rows, K]."""
        scale = self.scale[rows].float()
        values = self.codes[rows].float().view(*scale.shape, -1)
        if self.zero is not None:
            values = values - self.zero[rows].float().unsqueeze(-1)
        return (values * scale.unsqueeze(-1)).flatten(1)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return all weights, [N, K] of ``dtype``."""
        starts = range(0, len(self.codes), _ROWS_AT_ONCE)
        parts = (self.rows(slice(first, first + _ROWS_AT_ONCE)).to(dtype) for first in starts)
        return torch.cat(list(parts))


def _refusal(config: Any) -> str | None:
    if not current_platform.is_cpu():
        return f"it is for CPUs, not for {current_platform.device_type}"
    return compat.why_other_weights(config, scalar_types.uint8b128, scalar_types.uint8)
