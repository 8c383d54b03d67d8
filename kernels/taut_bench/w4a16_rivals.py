"""The published W4A16 kernels, each fed the same disk layer: vLLM's three, gemlite, cuBLAS.

Marlin and Machete are vLLM's operators, with weights prepared as its kernel classes prepare them
(the classes themselves want a tensor-parallel group). Whatever is not installed raises
`UnavailableError` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from taut_bench.w4a16_layer import Layer
from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.instruments.timing import Subject

Call = Callable[[torch.Tensor], torch.Tensor]
Prepare = Callable[[Layer], Call]
"""Prepare one copy of a layer's weights and return the call on it."""


class UnavailableError(RuntimeError):
    """A rival cannot run here; the message says why."""


class OtherFormatError(UnavailableError):
    """A rival does not take the layer's format, whatever its shape; the message says why."""


def operands(layer: Layer) -> tuple[Any, ...]:
    """Return the operands of `taut::w4a16_gemm` behind the activations."""
    qweight = formats_mma.repack_weight(layer.weight_packed, layer.K)
    scales = formats_mma.repack_scale(layer.weight_scale)
    zeros = None
    if layer.weight_zero_point is not None:
        zeros = formats_mma.repack_zero_point(layer.weight_zero_point, layer.N)
    arrivals = w4a16.make_arrivals(layer.N, layer.x.device)
    return qweight, scales, zeros, None, arrivals, layer.group_size


def taut(layer: Layer) -> Call:
    """Run `taut::w4a16_gemm`, whatever regime it chooses."""
    op, given = torch.ops.taut.w4a16_gemm.default, operands(layer)

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = op(x, *given)
        return y

    return call


def cublas(layer: Layer) -> Call:
    """The dense product in the activations' dtype: what W4A16 has to beat to be worth it."""
    weight = layer.dense()

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    return call


def _vllm(*names: str) -> list[Any]:
    try:
        return [importlib.import_module(f"vllm.{name}") for name in names]
    except ImportError as error:
        raise UnavailableError(f"vLLM: {error}") from error


def _weight_type(layer: Layer, scalar_types: Any) -> Any:
    """Return vLLM's name of the weights: uint4 wants zero points, uint4b8 has 8 for all of them."""
    return scalar_types.uint4b8 if layer.weight_zero_point is None else scalar_types.uint4


def _vllm_group(layer: Layer, taken: Sequence[int]) -> int:
    """Return the group size as vLLM says it, -1 for a channel, where its kernel takes it."""
    group = -1 if layer.group_size == layer.K else layer.group_size
    if group not in taken:
        raise OtherFormatError(f"group size {group} is none of vLLM's for it, {list(taken)}")
    return group


def _marlin_zeros(layer: Layer, marlin_utils: Any) -> torch.Tensor:
    """Return zero points [K/G, N/8] int32 in Marlin's order, empty where the layer has none."""
    if layer.weight_zero_point is None:
        empty: torch.Tensor = marlin_utils.marlin_make_empty_g_idx(layer.x.device)
        return empty
    stored = layer.stored_zeros().t().to(torch.int32).contiguous()
    zeros: torch.Tensor = marlin_utils.marlin_zero_points(
        stored, size_k=layer.K // layer.group_size, size_n=layer.N, num_bits=4
    )
    return zeros


def marlin(layer: Layer) -> Call:
    """Run vLLM's Marlin, prepared as its `MarlinLinearKernel` does."""
    quantization = "model_executor.layers.quantization.utils.marlin_utils"
    ops, marlin_utils, scalar_type = _vllm("_custom_ops", quantization, "scalar_type")
    group = _vllm_group(layer, marlin_utils.MARLIN_SUPPORTED_GROUP_SIZES)
    device = layer.x.device
    empty = marlin_utils.marlin_make_empty_g_idx(device)
    weight = ops.gptq_marlin_repack(
        layer.weight_packed.t().contiguous(), perm=empty, size_k=layer.K, size_n=layer.N, num_bits=4
    )
    scale = marlin_utils.marlin_permute_scales(
        layer.weight_scale.t().contiguous(), layer.K, layer.N, group
    )
    zeros = _marlin_zeros(layer, marlin_utils)
    kind = _weight_type(layer, scalar_type.scalar_types)
    workspace = marlin_utils.marlin_make_workspace_new(device)

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = marlin_utils.apply_gptq_marlin_linear(
            input=x,
            weight=weight,
            weight_scale=scale,
            weight_zp=zeros,
            g_idx=empty,
            g_idx_sort_indices=empty,
            workspace=workspace,
            wtype=kind,
            output_size_per_partition=layer.N,
            input_size_per_partition=layer.K,
            is_k_full=True,
        )
        return y

    return call


def machete(layer: Layer) -> Call:
    """Run vLLM's Machete, its first choice on Hopper, prepared as `MacheteLinearKernel` does."""
    quantization = "model_executor.layers.quantization.utils.machete_utils"
    ops, machete_utils, scalar_type = _vllm("_custom_ops", quantization, "scalar_type")
    kind, dtype = _weight_type(layer, scalar_type.scalar_types), layer.x.dtype
    group = _vllm_group(layer, machete_utils.query_machete_supported_group_sizes(dtype))
    # Machete wants [K/8, N] with the K words next to each other, as they lie on disk.
    weight = ops.machete_prepack_B(
        layer.weight_packed.clone().t(), a_type=dtype, b_type=kind, group_scales_type=dtype
    )
    scale, zeros = layer.weight_scale.t().contiguous(), None
    if layer.weight_zero_point is not None:
        # Times the scale and rounded, as vLLM does it.
        zeros = (-1.0 * scale * layer.stored_zeros().t().to(dtype)).contiguous()

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ops.machete_mm(
            a=x,
            b_q=weight,
            b_type=kind,
            b_group_scales=scale,
            b_group_zeros=zeros,
            b_group_size=group,
        )
        return y

    return call


def vllm_triton(layer: Layer) -> Call:
    """Run vLLM's Triton kernel: tuned for AMD's cards, its last but one choice on NVIDIA's."""
    (module,) = _vllm("model_executor.kernels.linear.mixed_precision.triton_w4a16")
    # [K, N/8] words, the nibbles of one next to each other along N.
    weight = formats.pack_weight(formats.unpack_weight(layer.weight_packed, layer.K).t())
    scale = layer.weight_scale.t().contiguous()
    zeros = layer.weight_zero_point
    if zeros is not None:
        zeros = zeros.t().contiguous()
    # The last one counts where there are no zero points.
    last = (layer.group_size, formats.SYMMETRIC_ZERO)

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = module.triton_w4a16_gemm(x, weight, scale, zeros, *last)
        return y

    return call


def gemlite(layer: Layer) -> Call:
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

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = module(x)
        return y

    return call


def fp8_cutlass(layer: Layer) -> Call:
    """Run vLLM's FP8 CUTLASS product of the same shape: other weights, twice the bytes.

    Shows what W4A16 competes with; its result is not held to the budget of 4-bit weights.
    """
    (ops,) = _vllm("_custom_ops")
    weight, weight_scale = ops.scaled_fp8_quant(layer.dense(), use_per_token_if_dynamic=True)
    weight_scale = weight_scale.view(-1, 1)
    fp8_x, x_scale = ops.scaled_fp8_quant(layer.x, use_per_token_if_dynamic=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        M = x.shape[0]
        y: torch.Tensor = ops.cutlass_scaled_mm(
            fp8_x[:M], weight.t(), x_scale[:M], weight_scale, layer.x.dtype
        )
        return y

    return call


OTHER_PRECISION = "FP8 CUTLASS (other weights)"
"""Beside ours for comparison; neither judged nor part of the ratio."""


def why_wrong(name: str, layer: Layer, y: torch.Tensor) -> str | None:
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
    "taut": taut,
    "Marlin": marlin,
    "Machete": machete,
    "vLLM Triton": vllm_triton,
    "gemlite": gemlite,
    "cuBLAS": cublas,
    OTHER_PRECISION: fp8_cutlass,
}


def subject(name: str, calls: list[Call], x: torch.Tensor) -> Subject:
    """Bind prepared copies to the activations of one M."""
    return Subject(name, lambda i: calls[i](x), len(calls))
