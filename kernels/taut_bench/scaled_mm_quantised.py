"""8-bit products behind vLLM's quantisation, which is how a layer runs them.

A product that starts early, as DeepGEMM's does, gains more behind another call of itself than
behind the quantisation, which lets it start at its last instruction (by groups of 128) or at its
end (by token); so who is faster in a layer is decided by the two together. Both are in the graph
that is timed, and the product is fed what the quantisation wrote. FP8 with 128×128 blocks is
quantised by groups of 128; FP8 and int8 by channel are by token, where ours also runs with an early
start (``taut early``), which `prefer` keeps for layers of fused ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from taut_bench import scaled_mm_block_rivals as rivals
from taut_bench.scaled_mm_layer import OUT_DTYPE, Layer, make_layer, product_ref
from taut_bench.scaled_mm_rivals import Call, Prepare, Product
from taut_bench.scaled_mm_rivals import cutlass_product as cutlass_by_channel
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.scaled_mm.dispatch import launch, make_arrivals
from taut_kernels.gemm.scaled_mm.tile import BLOCK_GROUP, PREFETCH, STARTS_EARLY
from taut_kernels.launch import launcher

KIND = "fp8-block-quantised"
KINDS = {KIND: fp8.BLOCK_OP, "fp8-quantised": fp8.OP, "int8-quantised": w8a8.OP}
"""Name on the command line → op."""


@dataclass(frozen=True, slots=True)
class QuantisedLayer(Layer):
    """A product and the activations its ``x`` and ``x_scale`` were made of.

    Attributes:
        activations: [M, K] bf16.
    """

    activations: Tensor


def _quantise(op: str, rows: Tensor, *, aligned: bool) -> tuple[Tensor, Tensor]:
    """Quantise by vLLM's kernel; scales are [M, 1], of blocks [M, G] with tokens contiguous.

    Args:
        op: the product's.
        rows: [M, K] bf16.
        aligned: groups begin at multiples of 16 bytes, which DeepGEMM's TMA loads need.
    """
    if op != fp8.BLOCK_OP:
        ops = rivals.import_or_refuse("vllm._custom_ops")
        if op == fp8.OP:
            x, x_scale = ops.scaled_fp8_quant(rows, use_per_token_if_dynamic=True)
        else:
            x, x_scale, _ = ops.scaled_int8_quant(rows)
        return x, x_scale
    module: Any = rivals.import_or_refuse(rivals.FP8_UTILS)
    x, x_scale = module.per_token_group_quant_fp8(
        rows, BLOCK_GROUP, column_major_scales=True, tma_aligned_scales=aligned
    )
    return x, x_scale


def make_quantised_layer(op: str, N: int, K: int, M: int) -> QuantisedLayer:
    """Draw a product of quantised activations; see :func:`make_layer`."""
    layer = make_layer(op, N, K, M)
    generator = torch.Generator(layer.x.device).manual_seed(1)
    activations = torch.randn(M, K, generator=generator, device=layer.x.device).to(OUT_DTYPE)
    x, x_scale = _quantise(op, activations, aligned=False)
    operands = (x, layer.weight, x_scale, layer.weight_scale)
    wide = (x, layer.weight, x_scale.double(), layer.weight_scale.double())
    gold, reference = product_ref(op, *wide, torch.float64), product_ref(op, *operands, OUT_DTYPE)
    return QuantisedLayer(op, *operands, gold, reference, activations)


def _taut_product(layer: Layer, weight: Tensor) -> Product:
    """Bind our op, as the plugin calls it."""
    arrivals = make_arrivals(weight.shape[0], weight.device)

    def product(x: Tensor, x_scale: Tensor) -> Tensor:
        y: Tensor = torch.ops.taut.fp8_gemm(
            x, weight, x_scale, layer.weight_scale, None, arrivals, OUT_DTYPE
        )
        return y

    return product


def _taut_by_channel(layer: Layer, weight: Tensor, *, early: bool) -> Product:
    """Bind the tile our table has for it alone; with an early start where its kernel has one."""
    arrivals = make_arrivals(weight.shape[0], weight.device)
    gpu, (N, K) = launcher.gpu_name(weight.device), weight.shape

    def product(x: Tensor, x_scale: Tensor) -> Tensor:
        tile = tiles_scaled_mm.lookup(layer.op, gpu, N, K, x.shape[0]).tile
        if early and tile.kernel in STARTS_EARLY:
            tile = replace(tile, early=True, prefetch=PREFETCH)
        operands = (x, weight, x_scale, layer.weight_scale)
        return launch(tile, *operands, None, None, None, arrivals, OUT_DTYPE)

    return product


def _behind(bind: Callable[[Layer, Tensor], Product], *, aligned: bool) -> Prepare:
    """Put the quantisation in front of a product; ``aligned`` as of :func:`_quantise`."""

    def prepare(layer: Layer, weight: Tensor) -> Call:
        assert isinstance(layer, QuantisedLayer)
        activations, product = layer.activations, bind(layer, weight)
        return lambda M: product(*_quantise(layer.op, activations[:M], aligned=aligned))

    return prepare


BLOCKS: dict[str, Prepare] = {
    "taut": _behind(_taut_product, aligned=True),
    "CUTLASS": _behind(rivals.cutlass_product, aligned=False),
    "DeepGEMM": _behind(rivals.deep_gemm_product, aligned=True),
}
"""Ours gets the scales DeepGEMM gets: it is in front of it that a layer of ours stands."""
BY_CHANNEL: dict[str, Prepare] = {
    "taut": _behind(partial(_taut_by_channel, early=False), aligned=False),
    "taut early": _behind(partial(_taut_by_channel, early=True), aligned=False),
    "CUTLASS": _behind(cutlass_by_channel, aligned=False),
}
PREPARE = dict.fromkeys(KINDS, BY_CHANNEL) | {KIND: BLOCKS}
"""Kind → how to prepare its kernels, by name."""
_NOT_RIVALS_OF_BLOCKS = (
    "cuBLAS blocks, vLLM Triton: no row: vLLM takes neither on Hopper; their products alone are in"
    " the reports of kind fp8-block",
    "FlashInfer: no row: not installed; vLLM takes it below 32 tokens where it is",
)
_NOT_RIVALS_BY_CHANNEL = (
    "cuBLAS: no row: vLLM does not take it here; its products alone are in the reports of kinds fp8"
    " and int8",
)
NOT_RIVALS = dict.fromkeys(KINDS, _NOT_RIVALS_BY_CHANNEL) | {KIND: _NOT_RIVALS_OF_BLOCKS}
