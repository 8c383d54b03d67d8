"""FP8 products with 128×128 blocks behind vLLM's quantisation, which is how a layer runs them.

A product that starts early, as DeepGEMM's does, gains more behind another call of itself than
behind the quantisation, which lets nobody start; so who is faster in a layer is decided by the two
together. Both are in the graph that is timed, and the product is fed what the quantisation wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from taut_kernels.bench import scaled_mm_block_rivals as rivals
from taut_kernels.bench.scaled_mm_layer import OUT_DTYPE, Layer, make_layer
from taut_kernels.bench.scaled_mm_rivals import Call, Prepare
from taut_kernels.gemm import fp8
from taut_kernels.gemm._scaled_mm_launch import make_arrivals
from taut_kernels.tiles_scaled_mm import BLOCK_GROUP

KIND = "fp8-block-quantised"


@dataclass(frozen=True, slots=True)
class QuantisedLayer(Layer):
    """A product and the activations its ``x`` and ``x_scale`` were made of.

    Attributes:
        activations: [M, K] bf16.
    """

    activations: torch.Tensor


def _quantise(rows: torch.Tensor, *, aligned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise by vLLM's kernel; scales are [M, G] with tokens contiguous.

    Args:
        rows: [M, K] bf16.
        aligned: groups begin at multiples of 16 bytes, which DeepGEMM's TMA loads need.
    """
    module: Any = rivals.import_or_refuse(rivals.FP8_UTILS)
    x, x_scale = module.per_token_group_quant_fp8(
        rows, BLOCK_GROUP, column_major_scales=True, tma_aligned_scales=aligned
    )
    return x, x_scale


def make_quantised_layer(N: int, K: int, M: int) -> QuantisedLayer:
    """Draw a product of quantised activations; see :func:`make_layer`."""
    layer = make_layer(fp8.BLOCK_OP, N, K, M)
    generator = torch.Generator(layer.x.device).manual_seed(1)
    activations = torch.randn(M, K, generator=generator, device=layer.x.device).to(OUT_DTYPE)
    x, x_scale = _quantise(activations, aligned=False)
    operands = (x, layer.weight, x_scale, layer.weight_scale)
    wide = (x, layer.weight, x_scale.double(), layer.weight_scale.double())
    gold = fp8.fp8_gemm_ref(*wide, None, None, torch.float64)
    reference = fp8.fp8_gemm_ref(*operands, None, None, OUT_DTYPE)
    return QuantisedLayer(layer.op, *operands, gold, reference, activations)


def _taut_product(layer: Layer, weight: torch.Tensor) -> rivals.Product:
    """Bind our op, as the plugin calls it."""
    arrivals = make_arrivals(weight.shape[0], weight.device)

    def product(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.taut.fp8_gemm(
            x, weight, x_scale, layer.weight_scale, None, arrivals, OUT_DTYPE
        )
        return y

    return product


def _behind(bind: Callable[[Layer, torch.Tensor], rivals.Product], *, aligned: bool) -> Prepare:
    """Put the quantisation in front of a product; ``aligned`` as of :func:`_quantise`."""

    def prepare(layer: Layer, weight: torch.Tensor) -> Call:
        assert isinstance(layer, QuantisedLayer)
        activations, product = layer.activations, bind(layer, weight)
        return lambda M: product(*_quantise(activations[:M], aligned=aligned))

    return prepare


PREPARE: dict[str, Prepare] = {
    "taut": _behind(_taut_product, aligned=True),
    "CUTLASS": _behind(rivals.cutlass_product, aligned=False),
    "DeepGEMM": _behind(rivals.deep_gemm_product, aligned=True),
}
"""Ours gets the scales DeepGEMM gets: it is in front of it that a layer of ours stands."""
NOT_RIVALS = (
    "cuBLAS blocks, vLLM Triton: no row: vLLM takes neither on Hopper; their products alone are in"
    " the reports of kind fp8-block",
    "FlashInfer: no row: not installed; vLLM takes it below 32 tokens where it is",
)
