"""The linear kernel vLLM chooses for FP8 layers with 128 × 128 blocks of weights on Hopper.

It stands in front of the kernel vLLM would have chosen (DeepGEMM, or CUTLASS), prepares the layer
as that one does, quantises as that one does, and multiplies with whichever is faster at a call's
number of tokens. A layer ours does not apply to at all is handed on whole, with the reason
recorded. This module imports vLLM; only :mod:`.registration` imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear as kernel_selection
from vllm.model_executor.kernels.linear import (
    CutlassFp8BlockScaledMMKernel,
    DeepGemmFp8BlockScaledMMKernel,
    Fp8BlockScaledMMLinearKernel,
)
from vllm.platforms import current_platform

from taut_kernels.gemm.scaled_mm.dispatch import make_arrivals
from taut_kernels.gemm.scaled_mm.tile import BLOCK_GROUP
from taut_kernels.vllm_plugin import block_scaled_mm_op as op
from taut_kernels.vllm_plugin import compat, known_answer
from taut_kernels.vllm_plugin.mode import requested_mode
from taut_kernels.vllm_plugin.scaled_mm import ARRIVALS, OUT_DTYPES, why_not_here

_GROUPS = {"weight": (BLOCK_GROUP, BLOCK_GROUP), "activation": (1, BLOCK_GROUP)}


def _rest(config: Any) -> type:
    """Return the kernel vLLM would choose if ours were not there.

    Raises:
        ValueError: there is none.
    """
    ours = TautFp8BlockScaledMMLinearKernel
    return compat.block_kernel_without(ours, config, kernel_selection)


def _name(rest: Any) -> str:
    """Return the op's name of a kernel of vLLM's."""
    if isinstance(rest, CutlassFp8BlockScaledMMKernel):
        return op.CUTLASS
    return op.DEEP_GEMM_UE8M0 if rest.use_deep_gemm_e8m0 else op.DEEP_GEMM


class TautFp8BlockScaledMMLinearKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 with scales of 128 × 128 blocks of weights and of 128 activations of a token.

    The class name is unique on purpose: ``VLLM_DISABLED_KERNELS`` matches it.
    """

    def __init__(self, config: Any) -> None:
        """Make the kernel vLLM would have chosen, too: it prepares, quantises, and takes the rest.

        Raises:
            ValueError: vLLM has no kernel for the layer.
        """
        super().__init__(config)
        # By this name: vLLM 0.26 warms DeepGEMM up where a kernel's ``fallback`` is one of its.
        self.fallback = _rest(config)(config)
        self.quant_fp8 = self.fallback.quant_fp8
        self.rest = _name(self.fallback)
        self.always = False
        self.fall_through: str | None = None
        self.partly: str | None = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Decide on the device; a refusal carries its reason and vLLM asks its own kernels."""
        reason = why_not_here(compute_capability)
        return reason is None, reason

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Decide on one layer's scheme; its shape is decided on after loading."""
        possible, reason = super().can_implement(config)
        if not possible:
            return False, reason
        keys = {"weight": config.weight_quant_key, "activation": config.activation_quant_key}
        for what, key in keys.items():
            found = tuple(key.scale.group_shape)
            if found != _GROUPS[what]:
                return False, f"{what} scales must be of {_GROUPS[what]}, got {found}"
        if config.out_dtype not in OUT_DTYPES:
            return False, f"results must be bfloat16 or float16, got {config.out_dtype}"
        try:
            rest = _rest(config)
        except ValueError as error:
            return False, f"vLLM has no kernel for the other numbers of tokens: {error}"
        if rest not in (DeepGemmFp8BlockScaledMMKernel, CutlassFp8BlockScaledMMKernel):
            return False, f"not measured against {rest.__name__}, vLLM's choice"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare the layer as vLLM's kernel does; compile ours where it serves."""
        self.fallback.process_weights_after_loading(layer)
        weight, weight_scale = self._weights(layer)
        gpu, mode = current_platform.get_device_name(), requested_mode()
        self.always = mode == "require"
        self.fall_through = _why_not_laid_out(weight, weight_scale)
        if self.fall_through is not None:
            return
        N, K = weight.shape
        self.fall_through = op.why_not_at_all(gpu, N, K, mode)
        if self.fall_through is not None:
            return
        self.partly = op.why_partly(gpu, N, K, mode)
        layer.register_buffer(ARRIVALS, make_arrivals(N, weight.device), persistent=False)
        tokens = op.warm_up_tokens(gpu, N, K, self.always)
        for M in tokens:
            self.apply_weights(
                layer, torch.zeros(M, K, dtype=self.config.input_dtype, device=weight.device)
            )
        known_answer.check(
            type(self).__name__,
            "FP8 in blocks of 128",
            (N, K),
            tokens,
            lambda x: self.apply_weights(layer, x),
            lambda rows: _dequantised(weight, weight_scale, rows),
            known_answer.fp8_block(K, group=BLOCK_GROUP, scale=None),
            self.config.input_dtype,
            weight.device,
        )

    def _weights(self, layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
        params = self._get_layer_params(layer)
        scale = params.weight_scale_inv
        return params.weight, params.weight_scale if scale is None else scale

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Quantise the activations and compute the layer; x is [..., K], the result [..., N]."""
        if self.fall_through is not None:
            whole: Tensor = self.fallback.apply_weights(layer, x, bias)
            return whole
        weight, weight_scale = self._weights(layer)
        rows, x_scale = self.quant_fp8(
            x.view(-1, x.shape[-1]), None, None, use_triton=self.fallback.use_triton
        )
        y: Tensor = torch.ops.taut.fp8_block_by_tokens.default(
            rows,
            weight,
            x_scale,
            weight_scale,
            getattr(layer, ARRIVALS),
            self.config.out_dtype,
            self.always,
            self.rest,
        )
        if bias is not None:
            y = y + bias
        return y.view(*x.shape[:-1], weight.shape[0])

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """Multiply as vLLM's kernel does; what its base class asks for, and nobody calls here."""
        y: Tensor = self.fallback.apply_block_scaled_mm(A, B, As, Bs)
        return y

    def taut_record(self) -> tuple[str, str | None]:
        """Return what :func:`.selection.audit` records."""
        ours, theirs = type(self).__name__, type(self.fallback).__name__
        if self.fall_through is not None:
            return theirs, f"{self.fall_through}; vLLM {theirs}"
        if self.partly is not None:
            return f"{ours}+{theirs}", f"{self.partly}; vLLM {theirs} there"
        return ours, None


def _dequantised(weight: Tensor, scale: Tensor, rows: slice) -> Tensor:
    """Return output features ``rows`` of weights [N, K], fp32; scales are of 128 × 128 blocks."""
    N, K = weight.shape
    features = torch.arange(N, device=weight.device)[rows] // BLOCK_GROUP
    columns = torch.arange(K, device=weight.device) // BLOCK_GROUP
    return weight[rows].float() * scale[features][:, columns]


def _why_not_laid_out(weight: Tensor, weight_scale: Tensor) -> str | None:
    """Say why our kernels do not read a layer's weights as vLLM left them, None where they do."""
    if weight.dim() != 2:
        return f"weights must be one matrix, got {tuple(weight.shape)}"
    N, K = weight.shape
    blocks = (-(-N // BLOCK_GROUP), -(-K // BLOCK_GROUP))
    if weight.stride(1) != 1 or weight.stride(0) % 16:
        return f"weights must have contiguous rows of 16 bytes, got strides {weight.stride()}"
    if weight_scale.dtype is not torch.float32 or tuple(weight_scale.shape) != blocks:
        return f"scales must be fp32 {blocks}, got {weight_scale.dtype} {tuple(weight_scale.shape)}"
    if weight_scale.stride(1) != 1:
        return f"scales must be contiguous along K, got strides {weight_scale.stride()}"
    return None


def why_not_chosen(kernel: Any) -> str | None:
    """Say why vLLM holds ``kernel`` although ours is for its type; None where it is for another.

    Args:
        kernel: of a quantised linear layer.
    """
    if not isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        return None
    other = "vLLM chose another kernel (disabled or filtered by a flag)"
    ours = TautFp8BlockScaledMMLinearKernel.can_implement(kernel.config)[1]
    return why_not_here(None) or ours or other
