"""W8A8 on CPUs where vLLM's int8 product is wrong, or slower than ours: the same layer with ours.

vLLM multiplies int8 on CPUs by oneDNN, whose products saturate where the CPU has no VNNI
(:mod:`taut_kernels.gemm.scaled_mm.cpu_int8`). A worker multiplies a known pair as it starts, and
where the answer is right measures it against ours. :class:`TautCPUInt8ScaledMMLinearKernel` goes
before vLLM's kernel where that is wrong or slower. This module imports vLLM.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils import replace_parameter

from taut_kernels.gemm.scaled_mm import cpu_linear
from taut_kernels.gemm.scaled_mm.cpu_int8 import (
    int8_product_error,
    is_exact,
    multiplies_fp16,
    pack_codes,
    split_codes,
)
from taut_kernels.vllm_plugin import known_answer
from taut_kernels.vllm_plugin.cpu_int8_speed import why_faster

_TOKENS = (1, 16, 64)
_SUMS = "taut_sums"
_OWN = ("vnni", "avx2")


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


def way_of(dtype: torch.dtype, K: int) -> str:
    """Return how a layer is multiplied exactly here.

    Args:
        dtype: of the activations.
        K: input features.

    Returns:
        ``vnni`` or ``avx2``: our own op by these instructions; without it ``stock`` where vLLM's
        product is right, else ``halves`` by oneDNN, ``fp16`` or ``fp32`` codes, the last two
        because oneDNN's int8 products without AVX-512 are slower.
    """
    fits = dtype is torch.bfloat16 and K <= cpu_linear.MOST_FEATURES
    if fits and cpu_linear.why_not_here() is None:
        return "vnni" if cpu_linear.has_vnni() else "avx2"
    if why_not_stock() is None:
        return "stock"
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return "halves"
    return "fp16" if multiplies_fp16() else "fp32"


@cache
def why_ours() -> str | None:
    """Say why our kernel goes before vLLM's on this CPU, None where vLLM's stays."""
    if (reason := why_not_stock()) is not None:
        return reason
    # With AMX vLLM's product is another one, whose tiles ours has nothing against.
    if torch.cpu._is_amx_tile_supported() or cpu_linear.why_not_here() is not None:
        return None
    return why_faster()


class TautCPUInt8ScaledMMLinearKernel(CPUInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8 on a CPU whose int8 product in vLLM is wrong or slow, exact.

    The class name is unique on purpose: ``VLLM_DISABLED_KERNELS`` matches it.
    """

    way: str
    weight: Tensor | None
    weight_scale: Tensor

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Decide on the device; a refusal carries its reason and vLLM asks its own kernel."""
        supported, reason = super().is_supported(compute_capability)
        if supported and why_ours() is None:
            return False, "vLLM's int8 product is right on this CPU, and ours not faster"
        return supported, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare the layer as vLLM does, with weights laid out for the product that serves."""
        name, scale_name = self.layer_param_names[:2]
        codes = getattr(layer, name).data
        N, K = codes.shape
        self.way, self.weight = way_of(torch.get_default_dtype(), K), None
        if self.way == "stock":
            super().process_weights_after_loading(layer)
            return
        if self.way == "halves":
            halves = torch.nn.Parameter(split_codes(codes), requires_grad=False)
            replace_parameter(layer, name, halves)
        self.process_weights_for_onednn(layer)
        scale = getattr(layer, scale_name)
        self.weight_scale = scale.data.float().reshape(-1).expand(N).contiguous()
        if self.way in _OWN:
            self._lay_out(layer, codes)
        else:
            self.linear_method = self._apply_weights_onednn
        if self.way in ("fp16", "fp32"):
            self.weight = pack_codes(codes)
        if self.way != "halves":
            del self.dnnl_handler
        self._check(layer, codes)

    def _lay_out(self, layer: torch.nn.Module, codes: Tensor) -> None:
        """Put what our op reads on the layer, and forget what oneDNN reads."""
        name, scale_name, input_name, zero_name, _ = self.layer_param_names
        packed, sums = cpu_linear.pack(codes)
        layer.register_parameter(name, torch.nn.Parameter(packed, requires_grad=False))
        replace_parameter(
            layer, scale_name, torch.nn.Parameter(self.weight_scale, requires_grad=False)
        )
        layer.register_buffer(_SUMS, sums, persistent=False)
        for given, dtype in ((input_name, torch.float32), (zero_name, torch.int32)):
            if (value := getattr(layer, given, None)) is not None:
                whole = torch.nn.Parameter(value.data.to(dtype).reshape(1), requires_grad=False)
                replace_parameter(layer, given, whole)
        self.linear_method = self._apply_own

    def _apply_own(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer by our op; x is [..., K], the result [..., N]."""
        weight, scale, input_scale, input_zero, _ = self._get_layer_params(layer)
        y: Tensor = torch.ops.taut.int8_linear_cpu.default(
            x.reshape(-1, x.shape[-1]).contiguous(),
            weight,
            scale,
            getattr(layer, _SUMS),
            bias,
            input_scale,
            input_zero,
            self.config.input_symmetric,
            self.way == "vnni",
        )
        return y.reshape(*x.shape[:-1], y.shape[1])

    def _apply_weights_onednn(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Quantise the activations and compute the layer; x is [..., K], the result [..., N]."""
        if self.way == "stock":
            stock: Tensor = super()._apply_weights_onednn(layer, x, bias)
            return stock
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
        if self.way == "stock":
            return f"multiplied by vLLM's own product: {cpu_linear.why_not_here()}"
        own = f"; {cpu_linear.why_not_here()}" if self.way not in _OWN else ""
        return f"{why_ours()}; multiplied in {self.way}{own}"


OURS, STOCK = TautCPUInt8ScaledMMLinearKernel.__name__, CPUInt8ScaledMMLinearKernel.__name__
