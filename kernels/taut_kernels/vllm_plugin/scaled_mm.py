"""The int8 and FP8 linear kernels vLLM chooses for W8A8 layers on Hopper.

Both extend vLLM's CUTLASS kernels, whose weights (as loaded, seen as [K, N]) suit ours, so that the
faster of the two can run at each number of tokens. A layer ours does not apply to at all is handed
to the CUTLASS kernel it extends, with the reason recorded. This module imports vLLM; only
:mod:`.registration` imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops, envs
from vllm.model_executor.kernels.linear import (
    CutlassFP8ScaledMMLinearKernel,
    CutlassInt8ScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.fusion.quant_activation import as_quantized_activation
from vllm.platforms import current_platform

from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm.dispatch import make_arrivals
from taut_kernels.launch import tile_tables
from taut_kernels.launch.compile_ahead import warmed_up
from taut_kernels.vllm_plugin import fused_ops, known_answer, scaled_mm_op
from taut_kernels.vllm_plugin.mode import requested_mode

ARRIVALS = "taut_arrivals"
OUT_DTYPES = (torch.bfloat16, torch.float16)


def why_not_here(compute_capability: int | None) -> str | None:
    """Say why this device runs neither kernel, None where it may.

    Args:
        compute_capability: ×10, or None to ask the platform.
    """
    if not current_platform.is_cuda():
        return f"no taut 8-bit kernel for {current_platform.device_type}"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT asks for results that do not depend on the batch"
    capability = current_platform.get_device_capability()
    found = compute_capability or (capability and capability.to_int())
    if found != 90:
        return f"taut's 8-bit kernels are for compute capability 90, got {found}"
    gpu = current_platform.get_device_name()
    table = tile_tables.of_card(tiles_scaled_mm.tables(), gpu)
    if requested_mode() == "prefer" and table is None:
        return f"not measured against vLLM's kernels on {gpu}; TAUT_KERNELS=require runs it"
    return None


class _Choice:
    """What one layer decided at loading.

    Attributes:
        fall_through: why CUTLASS serves the layer at every number of tokens, or None.
        partly: at which numbers of tokens it does, or None.
    """

    def __init__(self, layer: torch.nn.Module, weight_t: Tensor) -> None:
        """Decide on a layer whose weights are [K, N]; put its arrival counters on it."""
        (K, N), dtype, mode = weight_t.shape, weight_t.dtype, requested_mode()
        gpu = current_platform.get_device_name()
        scaled_mm_op.SURROUNDINGS.in_layer = fused_ops.in_graph()
        self.always = mode == "require"
        self.partly: str | None = None
        self.fall_through = scaled_mm_op.why_not_at_all(dtype, gpu, N, K, mode)
        if self.fall_through is None:
            self.partly = scaled_mm_op.why_partly(dtype, gpu, N, K, mode)
            arrivals = make_arrivals(N, weight_t.device)
            layer.register_buffer(ARRIVALS, arrivals, persistent=False)

    def record(self, ours: str, theirs: str) -> tuple[str, str | None]:
        """Return the kernel's name and why it is not (only) ours, for the audit."""
        if self.fall_through is not None:
            return theirs, f"{self.fall_through}; vLLM {theirs}"
        if self.partly is not None:
            return f"{ours}+{theirs}", f"{self.partly}; vLLM {theirs} there"
        return ours, None


def _compile_every_bucket(
    kernel: Any, layer: torch.nn.Module, weight_t: Tensor, dtype: torch.dtype
) -> None:
    """Run each bucket once, so that no request waits for the compiler."""
    (K, N), device = weight_t.shape, weight_t.device
    gpu = current_platform.get_device_name()
    # Only rank 0 of a row-parallel layer adds the bias, so a layer with one is called both ways.
    biases = {None, getattr(layer, "bias", None)}

    def run() -> None:
        for M in scaled_mm_op.warm_up_tokens(weight_t.dtype, gpu, N, K):
            x = torch.zeros(M, K, dtype=dtype, device=device)
            for bias in biases:
                kernel.apply_weights(layer, x, bias)

    warmed_up(run, alike=(K, N, weight_t.dtype, dtype))


def _check(
    kernel: Any,
    layer: torch.nn.Module,
    weight_t: Tensor,
    weight_scale: Tensor,
    block: known_answer.Block,
    dtype: torch.dtype,
) -> None:
    """Multiply a known block in each bucket; weights are [K, N], scales by tensor or channel."""
    K, N = weight_t.shape
    scale = weight_scale.float().reshape(-1).expand(N)
    scheme = "W8A8" if weight_t.dtype is torch.int8 else "FP8"
    known_answer.check(
        type(kernel).__name__,
        scheme,
        (N, K),
        scaled_mm_op.warm_up_tokens(weight_t.dtype, current_platform.get_device_name(), N, K),
        lambda x: kernel.apply_weights(layer, x),
        lambda rows: weight_t.t()[rows].float() * scale[rows, None],
        block,
        dtype,
        weight_t.device,
        1.0 if weight_t.dtype is torch.int8 else known_answer.FP8_SLACK,
    )


class _OnHopper:
    """What our kernels of layers of 8 bits share; a class of vLLM's comes behind it."""

    choice: _Choice

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Decide on the device; a refusal carries its reason and vLLM asks its own kernels."""
        reason = why_not_here(compute_capability)
        return reason is None, reason


class TautInt8ScaledMMLinearKernel(_OnHopper, CutlassInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8 in int8 on our kernels, symmetric or not, static or dynamic.

    The class name is unique on purpose: ``VLLM_DISABLED_KERNELS`` matches it.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare the layer as for CUTLASS; compile ours where it serves."""
        super().process_weights_after_loading(layer)
        weight_t = self._get_layer_params(layer)[0]
        self.choice = _Choice(layer, weight_t)
        if self.choice.fall_through is None:
            dtype = getattr(layer, "params_dtype", None) or torch.get_default_dtype()
            _compile_every_bucket(self, layer, weight_t, dtype)
            _, weight_scale, input_scale, _, azp_adj = self._get_layer_params(layer)
            block = known_answer.int8_block(
                weight_t.shape[0],
                symmetric=azp_adj is None,
                scale=input_scale,
            )
            _check(self, layer, weight_t, weight_scale, block, dtype)

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Quantise the activations and compute the layer; x is [..., K], the result [..., N]."""
        if self.choice.fall_through is not None:
            y: Tensor = super().apply_weights(layer, x, bias)
            return y
        weight_t, weight_scale, input_scale, input_zero, azp_adj = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1])
        x_q, x_scale, azp = _custom_ops.scaled_int8_quant(
            rows.contiguous(), input_scale, input_zero, symmetric=azp_adj is None
        )
        if input_zero is not None:
            azp = None  # static: in azp_adj already
        y = torch.ops.taut.scaled_mm_by_tokens.default(
            x_q,
            weight_t,
            x_scale,
            weight_scale,
            azp_adj,
            azp,
            bias,
            getattr(layer, ARRIVALS),
            x.dtype,
            self.choice.always,
        )
        return y.view(*x.shape[:-1], weight_t.shape[1])

    def taut_record(self) -> tuple[str, str | None]:
        """Return what :func:`.selection.audit` records."""
        return self.choice.record(type(self).__name__, CutlassInt8ScaledMMLinearKernel.__name__)


class TautFP8ScaledMMLinearKernel(_OnHopper, CutlassFP8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8 in e4m3 on our kernels: weights by tensor or channel, activations by tensor or token.

    The class name is unique on purpose: ``VLLM_DISABLED_KERNELS`` matches it.
    """

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Decide on one layer's scheme; its shape is decided on after loading."""
        for what, key in (("weight", c.weight_quant_key), ("activation", c.activation_quant_key)):
            if key.scale.group_shape.is_per_group():
                return False, f"no taut kernel for {what} scales of groups but in blocks of 128"
        if c.out_dtype not in (None, *OUT_DTYPES):
            return False, f"results must be bfloat16 or float16, got {c.out_dtype}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare the layer as for CUTLASS; compile ours where it serves."""
        super().process_weights_after_loading(layer)
        weight_t = self._get_layer_params(layer)[0]
        self.choice = _Choice(layer, weight_t)
        if self.choice.fall_through is None and weight_t.shape[1] != self.logical_output_size:
            self.choice.fall_through = "its weights had to be padded"
        if self.choice.fall_through is None:
            dtype = self.config.input_dtype
            _compile_every_bucket(self, layer, weight_t, dtype)
            _, weight_scale, input_scale, _ = self._get_layer_params(layer)
            K = weight_t.shape[0]
            block = known_answer.fp8_block(K, group=K, scale=input_scale)
            _check(self, layer, weight_t, weight_scale, block, dtype)

    def apply_weights(self, layer: torch.nn.Module, x: Any, bias: Tensor | None = None) -> Tensor:
        """Quantise the activations unless they come quantised, and compute the layer."""
        if self.choice.fall_through is not None:
            y: Tensor = super().apply_weights(layer, x, bias)
            return y
        weight_t, weight_scale, x_scale, upper_bound = self._get_layer_params(layer)
        quantised = as_quantized_activation(x, self.input_quant_key())
        if quantised is None:
            shape, dtype = x.shape, x.dtype
            rows, x_scale = self.quant_fp8(x.reshape(-1, shape[-1]), x_scale, upper_bound)
        else:
            shape, dtype, x_scale = quantised.orig_shape, quantised.orig_dtype, quantised.scale
            rows = quantised.data.reshape(-1, quantised.data.shape[-1])
        y = torch.ops.taut.scaled_mm_by_tokens.default(
            rows,
            weight_t,
            x_scale,
            weight_scale,
            None,
            None,
            bias,
            getattr(layer, ARRIVALS),
            self.config.out_dtype or dtype,
            self.choice.always,
        )
        return y.view(*shape[:-1], weight_t.shape[1])

    def taut_record(self) -> tuple[str, str | None]:
        """Return what :func:`.selection.audit` records."""
        return self.choice.record(type(self).__name__, CutlassFP8ScaledMMLinearKernel.__name__)


def why_not_chosen(kernel: Any) -> str | None:
    """Say why vLLM holds ``kernel`` although we have one for its type; None where we have not.

    Args:
        kernel: of a quantised linear layer.
    """
    if isinstance(kernel, Int8ScaledMMLinearKernel):
        reason = None
    elif isinstance(kernel, FP8ScaledMMLinearKernel):
        reason = TautFP8ScaledMMLinearKernel.can_implement(kernel.config)[1]
    else:
        return None
    other = "vLLM chose another kernel (disabled or filtered by a flag)"
    return why_not_here(None) or reason or other
