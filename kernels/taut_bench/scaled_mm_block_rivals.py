"""The published FP8 products with 128×128 blocks of weights and groups of 128 activations.

Each is fed the same layer, its scales laid out before the clock starts as its own quantiser would
have left them. The layouts, for x_scale [M, G] and weight_scale [N/128, G], G = ceil(K/128):

- vLLM's Triton kernel: both as they are, rows contiguous;
- ours: x_scale with strides (1, M), as CUTLASS has it (any do; those are read fastest), the
  weights' as they are;
- vLLM's CUTLASS: x_scale with strides (1, M), the weights' transposed; tokens as they are, since it
  swaps the operands where M is no multiple of 4 (vLLM pull request 44572, in 0.26);
- DeepGEMM: x_scale with strides (1, M rounded up to 4), which its TMA loads need; the weights' as
  they are, kept in fp32;
- cuBLAS, through `torch.nn.functional.scaled_mm`: tokens padded to a multiple of 4, x_scale with
  strides (1, M), the weights' padded to a multiple of 4 along K, and transposed.

Source: vLLM 0.26, model_executor/kernels/linear/scaled_mm/{cutlass,triton,deep_gemm}.py; PyTorch,
aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_block1x128_block128x128`.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from taut_bench import scaled_mm_rivals
from taut_bench.scaled_mm_layer import OUT_DTYPE, Layer, token_major
from taut_bench.scaled_mm_rivals import DENSE, OTHER_WORK, Call, Prepare, Product, UnavailableError
from taut_kernels.gemm.scaled_mm.tile import BLOCK_GROUP

FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"
_DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
"""A package of its own first, as vLLM looks for it."""
_PADDED_TO = 4
_ABSENT = (AttributeError, OSError)
"""What a build without the operator raises, or a just-in-time compiler that is not there."""


def import_or_refuse(name: str) -> Any:
    """Import a module of a rival.

    Raises:
        UnavailableError: it is not there, or cannot start here.
    """
    try:
        return importlib.import_module(name)
    # DeepGEMM asserts that it finds CUDA, and loads libraries.
    except (ImportError, AssertionError, OSError) as error:
        raise UnavailableError(f"{name}: {error or type(error).__name__}") from error


def _refusing(call: Call) -> Call:
    """Turn what is absent into a refusal, which the bench notes."""

    def guarded(M: int) -> Tensor:
        try:
            return call(M)
        except _ABSENT as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error

    return guarded


def _rounded_up(count: int) -> int:
    return -(-count // _PADDED_TO) * _PADDED_TO


@lru_cache(maxsize=2)
def _padded(x: Tensor, M: int, rows: int) -> Tensor:
    """Return the first M rows of x [≥ M, K], and zeros up to ``rows``."""
    if rows == M:
        return x[:M]
    padded = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=x.device)
    padded[:M] = x[:M]
    return padded


@lru_cache(maxsize=1)
def _dense(x: Tensor) -> Tensor:
    return x.to(OUT_DTYPE)


def cutlass_product(layer: Layer, weight: Tensor) -> Product:
    """Bind vLLM's CUTLASS; it takes scales with strides (1, M)."""
    ops = import_or_refuse("vllm._custom_ops")

    def product(x: Tensor, x_scale: Tensor) -> Tensor:
        y: Tensor = ops.cutlass_scaled_mm(
            x, weight.t(), out_dtype=OUT_DTYPE, scale_a=x_scale, scale_b=layer.weight_scale.t()
        )
        return y

    return product


def cutlass(layer: Layer, weight: Tensor) -> Call:
    """Run vLLM's choice for Hopper where DeepGEMM is not installed."""
    product = cutlass_product(layer, weight)
    return _refusing(lambda M: product(layer.x[:M], token_major(layer.x_scale, M, M)))


def deep_gemm(layer: Layer, weight: Tensor) -> Call:
    """Run DeepGEMM, vLLM's first choice, with scales in fp32 and early starts, as vLLM sets it.

    It compiles for seconds at the first call of most shapes and numbers of tokens.
    """
    product = deep_gemm_product(layer, weight)
    return _refusing(
        lambda M: product(layer.x[:M], token_major(layer.x_scale, M, _rounded_up(M))[:M])
    )


def deep_gemm_product(layer: Layer, weight: Tensor) -> Product:
    """Bind DeepGEMM; it takes scales with strides (1, M rounded up to 4)."""
    module = _import_deep_gemm()

    def product(x: Tensor, x_scale: Tensor) -> Tensor:
        y = torch.empty(len(x), weight.shape[0], dtype=OUT_DTYPE, device=weight.device)
        module.fp8_gemm_nt((x, x_scale), (weight, layer.weight_scale), y, disable_ue8m0_cast=True)
        return y

    return product


def _import_deep_gemm() -> Any:
    reasons = []
    for name in _DEEP_GEMM:
        try:
            module = import_or_refuse(name)
            if hasattr(module, "set_pdl"):
                module.set_pdl(True)
            return module
        except UnavailableError as error:
            reasons.append(str(error))
    raise UnavailableError("; ".join(reasons))


def cublas(layer: Layer, weight: Tensor) -> Call:
    """Run cuBLAS on blocks, which PyTorch offers from 2.10 on; without fast accumulation."""
    if not hasattr(functional, "scaled_mm"):
        raise UnavailableError(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm")
    groups = layer.weight_scale.shape[1]
    weight_scale = functional.pad(layer.weight_scale, (0, _rounded_up(groups) - groups)).t()
    kinds = functional.ScalingType

    def call(M: int) -> Tensor:
        rows = _rounded_up(M)
        y: Tensor = functional.scaled_mm(
            _padded(layer.x, M, rows),
            weight.t(),
            token_major(layer.x_scale, M, rows),
            kinds.BlockWise1x128,
            weight_scale,
            kinds.BlockWise128x128,
            output_dtype=OUT_DTYPE,
        )
        return y[:M]

    return _refusing(call)


def vllm_triton(layer: Layer, weight: Tensor) -> Call:
    """Run vLLM's Triton kernel, whose tables hold few shapes; the others take a default tile."""
    module = import_or_refuse(FP8_UTILS)
    block = [BLOCK_GROUP, BLOCK_GROUP]

    def call(M: int) -> Tensor:
        y: Tensor = module.w8a8_triton_block_scaled_mm(
            layer.x[:M], weight, layer.x_scale[:M], layer.weight_scale, block, OUT_DTYPE
        )
        return y

    return _refusing(call)


def dense(layer: Layer, weight: Tensor) -> Call:
    """Run the dense product in bf16, no scales: twice the bytes, what FP8 has to beat."""
    dense_weight = weight.to(OUT_DTYPE)

    def call(M: int) -> Tensor:
        return _dense(layer.x)[:M] @ dense_weight.t()

    return call


PREPARE: dict[str, Prepare] = {
    "taut": scaled_mm_rivals.taut,
    "CUTLASS": cutlass,
    "DeepGEMM": deep_gemm,
    "cuBLAS blocks": cublas,
    "vLLM Triton": vllm_triton,
    DENSE: dense,
}
NOT_RIVALS = (
    "FlashInfer: no row: as vLLM calls it (under 32 tokens), it quantises the activations in the"
    " same call, which is other work",
    "Marlin: no row: it takes activations in bf16, which is other work",
    *OTHER_WORK,
    "torch.compile: no row: torch._scaled_mm by way of torch.nn.functional.scaled_mm is there",
)
"""Named in every report, with the reason."""
