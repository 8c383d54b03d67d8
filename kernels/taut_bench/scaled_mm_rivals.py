"""The published 8-bit products, each fed the same layer: vLLM's CUTLASS and Triton, cuBLAS.

`torch._int_mm` gives int32 without scales and takes more than 16 tokens only: a lower bound for a
rival. `torch._scaled_mm` runs with fast accumulation, as CUTLASS and ours do. Whatever is not
installed raises `UnavailableError` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from taut_bench.scaled_mm_layer import OUT_DTYPE, Layer
from taut_kernels.gemm.scaled_mm.dispatch import make_arrivals
from taut_kernels.tuner.refusal import REFUSED, first_line
from taut_kernels.tuner.timing import Subject

Call = Callable[[int], Tensor]
"""Run the product on the layer's first M tokens."""
Product = Callable[[Tensor, Tensor], Tensor]
"""Multiply quantised activations, given with their scales, by a layer's weights."""
Prepare = Callable[[Layer, Tensor], Call]
"""Bind one copy of the layer's weights [N, K]."""


class UnavailableError(RuntimeError):
    """A rival cannot run here, or not this type; the message says why."""


def taut(layer: Layer, weight: Tensor) -> Call:
    """Our op, as the plugin calls it; the layer's scales say which form of FP8 it is."""
    arrivals = make_arrivals(weight.shape[0], weight.device)

    def fp8_call(M: int) -> Tensor:
        y: Tensor = torch.ops.taut.fp8_gemm(
            layer.x[:M],
            weight,
            layer.scales_of(M),
            layer.weight_scale,
            None,
            arrivals,
            OUT_DTYPE,
        )
        return y

    def int8_call(M: int) -> Tensor:
        y: Tensor = torch.ops.taut.w8a8_gemm(
            layer.x[:M],
            weight,
            layer.x_scale[:M],
            layer.weight_scale,
            None,
            None,
            None,
            arrivals,
            OUT_DTYPE,
        )
        return y

    return int8_call if layer.op == "w8a8_gemm" else fp8_call


def _vllm(name: str) -> Any:
    try:
        return importlib.import_module(f"vllm.{name}")
    except ImportError as error:
        raise UnavailableError(f"vLLM: {error}") from error


def cutlass_product(layer: Layer, weight: Tensor) -> Product:
    """Bind vLLM's first choice for either type."""
    ops = _vllm("_custom_ops")

    def product(x: Tensor, x_scale: Tensor) -> Tensor:
        y: Tensor = ops.cutlass_scaled_mm(x, weight.t(), x_scale, layer.weight_scale, OUT_DTYPE)
        return y

    return product


def _require(layer: Layer, op: str, type_: str) -> None:
    if layer.op != op:
        raise UnavailableError(f"takes {type_} only")


def cutlass(layer: Layer, weight: Tensor) -> Call:
    """Run vLLM's first choice for either type."""
    product = cutlass_product(layer, weight)
    return lambda M: product(layer.x[:M], layer.x_scale[:M])


def vllm_triton(layer: Layer, weight: Tensor) -> Call:
    """Run vLLM's Triton kernel, its second choice for int8."""
    module = _vllm("model_executor.layers.quantization.compressed_tensors.triton_scaled_mm")

    def call(M: int) -> Tensor:
        y: Tensor = module.triton_scaled_mm(
            layer.x[:M], weight.t(), layer.x_scale[:M], layer.weight_scale, OUT_DTYPE
        )
        return y

    return call


def scaled_mm_rows(layer: Layer, weight: Tensor) -> Call:
    """Run `torch._scaled_mm` with a scale a token and a channel."""
    _require(layer, "fp8_gemm", "FP8")

    def call(M: int) -> Tensor:
        y: Tensor = torch._scaled_mm(
            layer.x[:M],
            weight.t(),
            layer.x_scale[:M],
            layer.weight_scale.t(),
            out_dtype=OUT_DTYPE,
            use_fast_accum=True,
        )
        return y

    return call


def scaled_mm_tensor(layer: Layer, weight: Tensor) -> Call:
    """Run `torch._scaled_mm` with one scale a tensor: less work than the others do."""
    _require(layer, "fp8_gemm", "FP8")
    one = torch.ones((), device=weight.device)

    def call(M: int) -> Tensor:
        y: Tensor = torch._scaled_mm(
            layer.x[:M], weight.t(), one, one, out_dtype=OUT_DTYPE, use_fast_accum=True
        )
        return y

    return call


def int_mm(layer: Layer, weight: Tensor) -> Call:
    """Run `torch._int_mm`: int32 results, no scales."""
    _require(layer, "w8a8_gemm", "int8")

    def call(M: int) -> Tensor:
        return torch._int_mm(layer.x[:M], weight.t())

    return call


PREPARE: dict[str, Prepare] = {
    "taut": taut,
    "CUTLASS": cutlass,
    "_scaled_mm rows": scaled_mm_rows,
    "_scaled_mm tensor": scaled_mm_tensor,
    "_int_mm": int_mm,
    "vLLM Triton": vllm_triton,
}
OTHER_WORK = (
    "gemlite: no row: its 8-bit products quantise the activations in the same call, which is other"
    " work",
    "Liger: no row: it has no product with quantised weights",
)
NOT_RIVALS = (
    *OTHER_WORK,
    "torch.compile: no row: it calls torch._scaled_mm or torch._int_mm, which are there",
)
"""Named in every report, with the reason."""
DENSE = "cuBLAS bf16 (other weights)"
UNSCALED = ("_scaled_mm tensor", "_int_mm", DENSE)
"""Rivals that leave the scales out: their results are not comparable."""


def applies(name: str, M: int) -> bool:
    """Say whether a kernel takes M tokens."""
    return name != "_int_mm" or M > 16


def subject(name: str, calls: list[Call], M: int) -> Subject:
    """Bind prepared copies to one number of tokens."""
    return Subject(name, lambda i: calls[i](M), len(calls))


def prepare_all(
    layer: Layer,
    names: list[str],
    copies: list[Tensor],
    notes: list[str],
    table: Mapping[str, Prepare] = PREPARE,
) -> dict[str, list[Call]]:
    """Prepare each kernel on every copy of the weights; one that cannot run leaves a note.

    Args:
        layer: the product.
        names: of kernels.
        copies: of the weights, each [N, K].
        notes: where reasons go.
        table: how to prepare the kernels of this kind.

    Returns:
        Calls by name.
    """
    ready = {}
    for name in names:
        where = f"{name} on {layer.op} {tuple(layer.weight.shape)}"
        if name not in table:
            notes.append(f"{where}: not run: not among the kernels of this kind")
            continue
        try:
            ready[name] = [table[name](layer, weight) for weight in copies]
        except REFUSED as error:
            notes.append(f"{where}: not run: {first_line(error)}")
    return ready


def checked_subjects(
    layer: Layer, ready: dict[str, list[Call]], M: int, notes: list[str]
) -> list[Subject]:
    """Return the subjects of one M whose results hold the error budget.

    A kernel that refuses the shape, or errs, leaves a note instead; :data:`UNSCALED` are only run.
    """
    subjects = []
    for name, calls in ready.items():
        if not applies(name, M):
            continue
        where = f"{name} on {layer.op} {tuple(layer.weight.shape)}, M={M}"
        try:
            y = calls[0](M)
        except REFUSED as error:
            notes.append(f"{where}: not run: {first_line(error)}")
            continue
        if name not in UNSCALED and (reason := layer.why_wrong(y)):
            notes.append(f"{where}: WRONG, not timed: {reason}")
            continue
        subjects.append(subject(name, calls, M))
    return subjects
