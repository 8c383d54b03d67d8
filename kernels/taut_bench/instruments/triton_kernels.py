"""The Triton kernels behind an op of ours, compiled here for a GPU that need not be here."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from taut_bench.instruments import aot
from taut_bench.instruments.aot import AotResult
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.recorder import KernelVariant

KERNELS = {
    "w4a16_gemm": r"w4a16_(decode|wgmma|dequantize|reorder) ",
    "w8a8_gemm": r"w8a8_gemm ",
    "fp8_gemm": r"fp8_(gemm|block) ",
    "rms_norm": r"(add_)?rms_norm ",
    "rms_norm_quant": r"(add_)?rms_norm_quant (?!static)",
    "rms_norm_static_quant": r"(add_)?rms_norm_quant static",
    "silu_mul": r"silu_mul (?!.*static)",
    "silu_mul_quant": r"silu_mul_quant ",
    "silu_mul_static_quant": r"silu_mul .*static",
    "row_quant": r"row_quant ",
    "rope": r"rope ",
    "rope_apart": r"rope_apart ",
    "cross_entropy": r"(cross_entropy|scale)\b",
    "linear_cross_entropy": r"(cross_entropy|block_statistics|block_gradient|scale)\b",
    "linear_kl": r"divergence (?!jsd)|scale\b",
    "linear_jsd": r"divergence jsd|scale\b",
    "softmax": r"softmax(_backward)? ",
    "layer_norm": r"layer_norm(_backward)? |norm_backward column",
    "rms_norm_train": r"(add_)?rms_norm_(train|backward) |norm_backward column",
    "silu": r"silu(_backward)? ",
    "swiglu": r"swiglu(_backward)? .*two",
    "swiglu_packed": r"silu_mul (?!.*static)|swiglu_backward ",
    "rope_train": r"rope_train ",
    "attention": r"attention ",
    "paged_decode": r"paged_decode ",
    "cache_write": r"cache_write ",
    "matmul": r"matmul ",
    "transpose": r"transpose ",
    "conv2d": r"conv2d ",
    "max_pool2d": r"max_pool2d ",
    "avg_pool2d": r"avg_pool2d ",
    "reduce": r"reduce ",
}
"""Op → what the labels of its kernels match in :func:`.aot.every_variant`."""


def variants_of(op: str) -> list[KernelVariant]:
    """Every form of an op's kernels; ``op`` is a key of :data:`KERNELS`."""
    pattern = re.compile(KERNELS[op])
    return [variant for variant in aot.every_variant() if pattern.match(variant.label)]


def compile_kernels(op: str, target: str, most: int) -> tuple[list[AotResult], int]:
    """Compile kernels of an op ahead of time.

    Args:
        op: a key of :data:`KERNELS`.
        target: ``sm_80`` or ``sm_90``.
        most: forms to compile, spread over all of them; each takes a second or more.

    Returns:
        The results, and how many forms there are.

    Raises:
        InstrumentError: an op without a kernel of ours, or a target that is not known.
    """
    if target not in aot.SHARED_MEMORY_BYTES:
        known = ", ".join(sorted(aot.SHARED_MEMORY_BYTES))
        raise InstrumentError(f"--target {target}: use {known}")
    if op not in KERNELS:
        raise InstrumentError(f"--target: {op} has no Triton kernel of ours")
    variants = [variant for variant in variants_of(op) if target == variant.target]
    step = max(1, len(variants) // most)
    chosen = variants[::step][:most]
    return [aot.compile_variant(variant) for variant in chosen], len(variants)


def text(results: list[AotResult], forms: int) -> str:
    """Write results as Markdown."""
    lines = [
        f"{len(results)} of {forms} forms of its Triton kernels, compiled here",
        "",
        "| kernel | tile | registers | shared | spills | |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        lines.append(
            f"| {one.target} {one.label} | {one.tile} | {one.registers} | {one.shared_bytes} B "
            f"| {one.spill_bytes} B | {one.failure or 'ok'} |"
        )
    return "\n".join(lines)


def as_json(results: list[AotResult], forms: int) -> dict[str, Any]:
    """The results as plain data."""
    return {"forms": forms, "compiled": [asdict(one) for one in results]}
