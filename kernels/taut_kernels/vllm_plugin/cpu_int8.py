"""W8A8 on CPUs where vLLM's int8 product is wrong: the same layer with an exact one.

vLLM multiplies int8 on CPUs by oneDNN, whose products saturate where the CPU has no VNNI
(:mod:`taut_kernels.gemm.scaled_mm.cpu_int8`). A worker multiplies a known pair as it starts; where
the answer is wrong, :class:`TautCPUInt8ScaledMMLinearKernel` goes before vLLM's kernel. This module
imports vLLM.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils import replace_parameter

from taut_kernels.gemm.scaled_mm.cpu_int8 import (
    int8_product_error,
    is_exact,
    multiplies_fp16,
    pack_codes,
    split_codes,
)
from taut_kernels.vllm_plugin import known_answer

_TOKENS = (1, 16, 64)


def _multiply(x: Tensor, w: Tensor) -> Tensor:
    """Multiply codes as vLLM's kernel does; scales are 1."""
    # The handler keeps pointers to both.
    transposed, scale = w.t(), torch.ones(w.shape[0], 1)
    handler = _custom_ops.create_onednn_scaled_mm(transposed, scale, torch.float32, True, False, 1)
    y = torch.empty(x.shape[0], w.shape[0])
    ones = torch.ones(x.shape[0], 1)
    _custom_ops.onednn_scaled_mm(handler, x, y, ones, None, None, None)
    return y


@cache
def why_not_stock() -> str | None:
    """Say why vLLM's int8 product must not serve on this CPU, None where it is right."""
    error = int8_product_error(_multiply)
    if is_exact(error):
        return None
    return f"vLLM's int8 product is wrong on this CPU (off by {error:.1%}: it saturates)"


def exact_way() -> str:
    """Return how W8A8 is multiplied exactly here: ``halves`` by oneDNN, ``fp16`` or ``fp32`` codes.

    oneDNN's int8 products without AVX-512 are slower than those.
    """
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return "halves"
    return "fp16" if multiplies_fp16() else "fp32"


class TautCPUInt8ScaledMMLinearKernel(CPUInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8 on a CPU without VNNI, exact.

    The class name is unique on purpose: ``VLLM_DISABLED_KERNELS`` matches it.
    """

    way: str
    weight: Tensor | None
    weight_scale: Tensor

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Decide on the device; a refusal carries its reason and vLLM asks its own kernel."""
        supported, reason = super().is_supported(compute_capability)
        if supported and why_not_stock() is None:
            return False, "vLLM's int8 product is right on this CPU"
        return supported, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare the layer as vLLM does, of weights in halves or, beside it, in 16 or 32 bits."""
        name = self.layer_param_names[0]
        codes = getattr(layer, name).data
        self.way, self.weight = exact_way(), None
        if self.way == "halves":
            halves = torch.nn.Parameter(split_codes(codes), requires_grad=False)
            replace_parameter(layer, name, halves)
        self.process_weights_for_onednn(layer)
        self.linear_method = self._apply_weights_onednn
        scale = getattr(layer, self.layer_param_names[1])
        self.weight_scale = scale.data.float().reshape(-1).expand(codes.shape[0]).contiguous()
        if self.way != "halves":
            self.weight = pack_codes(codes)
            del self.dnnl_handler
        self._check(layer, codes)

    def _apply_weights_onednn(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Quantise the activations and compute the layer; x is [..., K], the result [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        _, _, input_scale, input_zero, azp_adj = self._get_layer_params(layer)
        x_q, x_scale, azp = _custom_ops.onednn_scaled_int8_quant(
            rows, input_scale, input_zero, self.config.input_symmetric
        )
        if self.weight is not None:
            y: Tensor = torch.ops.taut.int8_gemm_cpu.default(
                x_q, self.weight, x_scale, self.weight_scale, azp, bias, x.dtype
            )
        else:
            y = torch.empty((rows.shape[0], self.dnnl_handler.n), dtype=x.dtype)
            twice = torch.cat((x_q, x_q), dim=1)
            _custom_ops.onednn_scaled_mm(self.dnnl_handler, twice, y, x_scale, azp, azp_adj, bias)
        return y.reshape(*x.shape[:-1], y.shape[1])

    def _check(self, layer: torch.nn.Module, codes: Tensor) -> None:
        N, K = codes.shape
        input_scale = self._get_layer_params(layer)[2]
        known_answer.check(
            type(self).__name__,
            f"W8A8 in {self.way}",
            (N, K),
            _TOKENS,
            lambda x: self.apply_weights(layer, x),
            lambda rows: codes[rows].float() * self.weight_scale[rows, None],
            known_answer.int8_block(
                K,
                symmetric=self.config.input_symmetric,
                scale=input_scale,
            ),
            torch.bfloat16,
            codes.device,
        )

    def taut_record(self) -> tuple[str, str | None]:
        """Return what :func:`taut_kernels.vllm_plugin.selection.audit` records."""
        return type(self).__name__, None

    def taut_note(self) -> str | None:
        """Return why it stands in vLLM's place."""
        return f"{why_not_stock()}; multiplied in {self.way}"


OURS, STOCK = TautCPUInt8ScaledMMLinearKernel.__name__, CPUInt8ScaledMMLinearKernel.__name__
