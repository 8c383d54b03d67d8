"""The published W4A16 kernels, each fed the same disk layer.

vLLM's four, gemlite, quack, TurboMind, and cuBLAS's dense product. What is not installed raises
`UnavailableError` with the reason.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.tuner import w4a16_stock
from taut_kernels.tuner.timing import Subject
from taut_kernels.tuner.w4a16_layer import Layer
from taut_kernels.tuner.w4a16_stock import (
    Operands,
    OtherFormatError,
    Prepare,
    Prepared,
    UnavailableError,
)


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


def _modules(*names: str) -> list[Any]:
    """Import a package's modules; libraries that they want and lack are ``OSError``."""
    try:
        return [importlib.import_module(name) for name in names]
    except (ImportError, OSError) as error:
        raise UnavailableError(f"{names[0].partition('.')[0]}: {error}") from error


def _codes(layer: Layer) -> Tensor:
    """Return the weights as stored, [N, K] uint8 in 0..15."""
    values = formats.unpack_weight(layer.weight_packed, layer.K) + formats.SYMMETRIC_ZERO
    return values.to(torch.uint8)


def gemlite(layer: Layer) -> Prepared:
    """Run gemlite's Triton kernels with the configurations it ships for the card."""
    (helper,) = _modules("gemlite.helper")
    zeros = layer.stored_zeros().to(layer.weight_scale.dtype)
    processor = helper.A16Wn(device="cuda:0", dtype=layer.x.dtype)
    module = processor.from_weights(_codes(layer), layer.weight_scale, zeros, 4, layer.group_size)

    def run(x: Tensor, own: Operands) -> Tensor:
        y: Tensor = module(x)
        return y

    return Prepared((), run)


@functools.cache
def _quack_kind(group: int, zero_points: bool) -> Any:
    """Return what quack calls a format: one object for all layers, since it compiles for each."""
    (kinds,) = _modules("quack.operand_transform.formats")
    if zero_points:
        if group != kinds.Int4().group:
            raise OtherFormatError(f"quack: zero points in groups of 128 alone, not {group}")
        return kinds.Int4Awq()
    if group != 32 and group % 64:
        raise OtherFormatError(f"quack: group size {group} is neither 32 nor a multiple of 64")
    return kinds.Int4(group)


def quack(layer: Layer) -> Prepared:
    """Run quack's CuTe kernel with the tile that its own rules have for a number of tokens.

    A byte of its is one on disk: two codes, the lower channel's first.
    """
    (gemm,) = _modules("quack.gemm_w4")
    if layer.x.dtype != torch.bfloat16:
        raise OtherFormatError("quack: bf16 alone")
    scale: Any = layer.weight_scale
    if layer.weight_zero_point is not None:
        scale = (scale, layer.stored_zeros().to(torch.uint8))
    kind = _quack_kind(layer.group_size, layer.weight_zero_point is not None)
    weight, strip = kind.prepare(layer.weight_packed.view(torch.uint8), scale)

    def run(x: Tensor, own: Operands) -> Tensor:
        y: Tensor = gemm.gemm_w4a16(x, *own, n_out=layer.N, wformat=kind)
        return y

    return Prepared((weight, strip), run)


_tuned: set[tuple[int, ...]] = set()
"""What TurboMind has measured its kernels for in this process, and chooses from then on."""


def turbomind(layer: Layer) -> Prepared:
    """Run LMDeploy's TurboMind with the kernel that it finds fastest for a number of tokens."""
    api, kinds = _modules("lmdeploy.turbomind.linear", "lmdeploy.turbomind.weight_format")
    linear = api.get_linear()
    kind = kinds.AWQFormat(block_in=layer.group_size)
    try:
        plan = linear.get_weight_plan(weight_format=kind, dtype=layer.x.dtype)
    except NotImplementedError as error:
        raise OtherFormatError(f"TurboMind: {error}") from error
    weight = linear.prepare_weight(
        _codes(layer).t().contiguous(),
        plan=plan,
        scales=layer.weight_scale.t().contiguous(),
        zeros=layer.stored_zeros().t().contiguous().to(torch.uint8),
    )
    chosen: dict[int, Any] = {}

    def plan_for(x: Tensor) -> Any:
        problem = (len(x), layer.N, layer.K, layer.group_size)
        if problem in _tuned:
            return linear.get_exec_plan(x, weight)
        _tuned.add(problem)
        return linear.tune(x, weight)[0]

    def run(x: Tensor, own: Operands) -> Tensor:
        if len(x) not in chosen:
            chosen[len(x)] = plan_for(x)
        y: Tensor = linear(x, weight, exec_plan=chosen[len(x)])[0]
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
    "quack": quack,
    "TurboMind": turbomind,
    "cuBLAS": cublas,
    OTHER_PRECISION: fp8_cutlass,
}


def subject(name: str, calls: Sequence[Prepared], x: Tensor) -> Subject:
    """Bind prepared copies to the activations of one M."""
    return Subject(name, lambda i: calls[i](x), len(calls))
