"""The published W4A16 kernels, each fed the same disk layer: vLLM's four, gemlite, cuBLAS.

Whatever is not installed raises `UnavailableError` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.tuner import w4a16_stock
from taut_kernels.tuner.timing import Subject
from taut_kernels.tuner.w4a16_layer import Layer
from taut_kernels.tuner.w4a16_stock import Operands, Prepare, Prepared, UnavailableError


def cublas(layer: Layer) -> Prepared:
    """The dense product in the activations' dtype: what W4A16 has to beat to be worth it."""

    def run(x: Tensor, own: Operands) -> Tensor:
        (weight,) = own
        assert weight is not None
        return torch.nn.functional.linear(x, weight)

    return Prepared((layer.dense(),), run)


def vllm_triton(layer: Layer) -> Prepared:
    """Run vLLM's Triton kernel: tuned for AMD's cards, its last but one choice on NVIDIA's."""
    (module,) = w4a16_stock.vllm_modules(
        "model_executor.kernels.linear.mixed_precision.triton_w4a16"
    )
    # [K, N/8] words, the nibbles of one next to each other along N.
    weight = formats.pack_weight(formats.unpack_weight(layer.weight_packed, layer.K).t())
    scale = layer.weight_scale.t().contiguous()
    zeros = layer.weight_zero_point
    if zeros is not None:
        zeros = zeros.t().contiguous()
    # The last one counts where there are no zero points.
    last = (layer.group_size, formats.SYMMETRIC_ZERO)

    def run(x: Tensor, own: Operands) -> Tensor:
        y: Tensor = module.triton_w4a16_gemm(x, *own, *last)
        return y

    return Prepared((weight, scale, zeros), run)


def gemlite(layer: Layer) -> Prepared:
    """Run gemlite's Triton kernels with the configurations it ships for the card."""
    try:
        helper = importlib.import_module("gemlite.helper")
    except ImportError as error:
        raise UnavailableError(f"gemlite: {error}") from error
    values = formats.unpack_weight(layer.weight_packed, layer.K) + formats.SYMMETRIC_ZERO
    zeros = layer.stored_zeros().to(layer.weight_scale.dtype)
    processor = helper.A16Wn(device="cuda:0", dtype=layer.x.dtype)
    module = processor.from_weights(
        values.to(torch.uint8), layer.weight_scale, zeros, 4, layer.group_size
    )

    def run(x: Tensor, own: Operands) -> Tensor:
        y: Tensor = module(x)
        return y

    return Prepared((), run)


def fp8_cutlass(layer: Layer) -> Prepared:
    """Run vLLM's FP8 CUTLASS product of the same shape: other weights, twice the bytes.

    Shows what W4A16 competes with; its result is not held to the budget of 4-bit weights.
    """
    (ops,) = w4a16_stock.vllm_modules("_custom_ops")
    weight, weight_scale = ops.scaled_fp8_quant(layer.dense(), use_per_token_if_dynamic=True)
    weight_scale = weight_scale.view(-1, 1)
    fp8_x, x_scale = ops.scaled_fp8_quant(layer.x, use_per_token_if_dynamic=True)

    def run(x: Tensor, own: Operands) -> Tensor:
        M, (weight, weight_scale) = x.shape[0], own
        assert weight is not None
        y: Tensor = ops.cutlass_scaled_mm(
            fp8_x[:M], weight.t(), x_scale[:M], weight_scale, layer.x.dtype
        )
        return y

    return Prepared((weight, weight_scale), run)


OTHER_PRECISION = "FP8 CUTLASS (other weights)"
"""Beside ours for comparison; neither judged nor part of the ratio."""


def why_wrong(name: str, layer: Layer, y: Tensor) -> str | None:
    """Hold a kernel's result to the layer's budget; return a reason, None where it is right.

    Args:
        name: a key of :data:`PREPARE`; :data:`OTHER_PRECISION` is not judged.
        layer: whose product ``y`` is.
        y: [M, N].
    """
    return None if name == OTHER_PRECISION else layer.why_wrong(y)


NOT_RIVALS = (
    "Liger: no row: it has no product with quantised weights",
    "torch.compile: no row: Inductor has no 4-bit product and would dequantise in every call",
)
"""Named in every report, with the reason."""

PREPARE: dict[str, Prepare] = {
    "taut": w4a16_stock.taut,
    "Marlin": w4a16_stock.marlin,
    "Machete": w4a16_stock.machete,
    "Humming": w4a16_stock.humming,
    "vLLM Triton": vllm_triton,
    "gemlite": gemlite,
    "cuBLAS": cublas,
    OTHER_PRECISION: fp8_cutlass,
}


def subject(name: str, calls: Sequence[Prepared], x: Tensor) -> Subject:
    """Bind prepared copies to the activations of one M."""
    return Subject(name, lambda i: calls[i](x), len(calls))
