"""Which kernel each layer runs on, and why not ours: asked beforehand, recorded after loading.

A worker audits the loaded model instead of trusting the choice it asked for:
``VLLM_DISABLED_KERNELS``, ``--linear-backend`` and a later plugin all change it silently. `taut
doctor` reads the record a worker leaves in the file named by ``TAUT_KERNELS_REPORT``, or asks
:func:`why_not_ours` about a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from taut_kernels import tiles_decode
from taut_kernels.gemm import w4a16, w4a16_cpu

REPORT_VARIABLE = "TAUT_KERNELS_REPORT"
OUR_PREFIX = "Taut"
FOUR_BIT = ("uint4", "uint4b8")

_logger = logging.getLogger(__name__)


class KernelsNotUsedError(RuntimeError):
    """``TAUT_KERNELS=require``, and a layer would not run on our kernels."""


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What one quantised linear layer of a loaded model runs on.

    Attributes:
        layer: module name, for example ``model.layers.0.mlp.down_proj``.
        kernel: class name of the kernel vLLM holds for it.
        scheme: weight type as vLLM prints it, or the quantisation method's class name.
        reason: why it is not ours; None where it is.
        in_scope: whether our kernels cover the scheme at all (W4A16).
    """

    layer: str
    kernel: str
    scheme: str
    reason: str | None
    in_scope: bool


def why_not_ours(N: int, K: int, group_size: int, *, dtype: torch.dtype, device: str) -> str | None:
    """Say why a W4A16 layer would not run on our kernel.

    Args:
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        group_size: weights a scale covers along K, -1 for one group a channel.
        dtype: of the activations.
        device: ``cpu`` or ``cuda``.

    Returns:
        A reason, or None where our kernel applies.
    """
    if device == "cpu":
        return w4a16.why_no_scheme(K, group_size, dtype) or w4a16_cpu.why_not_supported(
            N, K, group_size, dtype
        )
    return w4a16.why_not_supported(N, K, group_size, dtype)


def why_not_preferred(gpu: str | None, mode: str) -> str | None:
    """Say why ``prefer`` leaves a W4A16 layer to vLLM although our kernel could run it.

    A kernel that may be slower is never put in silently: ours is preferred on cards where it was
    measured against Marlin and Machete and won (kernels/README.md, "Measured facts").

    Args:
        gpu: name of the card, None on a CPU.
        mode: value of ``TAUT_KERNELS``.

    Returns:
        A reason, or None where ours is used.
    """
    if gpu is None or mode != "prefer" or gpu in tiles_decode.tables():
        return None
    return f"not measured against vLLM's kernels on {gpu}; TAUT_KERNELS=require runs it"


def _kernel_of(module: torch.nn.Module) -> Any | None:
    """Find a linear layer's kernel: on its scheme (compressed-tensors) or method (GPTQ, AWQ)."""
    for holder in (getattr(module, "scheme", None), getattr(module, "quant_method", None)):
        for name in ("kernel", "fp8_linear"):
            if (kernel := getattr(holder, name, None)) is not None:
                return kernel
    return None


def audit(
    model: torch.nn.Module,
    refusal: Callable[[Any], str | None],
    eight_bit_refusal: Callable[[Any], str | None] = lambda kernel: None,
) -> Iterator[LayerChoice]:
    """Look at what each quantised linear layer of a loaded model really holds.

    Args:
        model: as vLLM loaded it.
        refusal: our kernel's verdict on an `MPLinearLayerConfig`.
        eight_bit_refusal: why a scaled-mm kernel of vLLM's stands where ours could, None where
            there is none of ours for it.

    Yields:
        One choice a layer, in module order; layers without a kernel object (unquantised) are left
        out.
    """
    for name, module in model.named_modules():
        kernel = _kernel_of(module)
        if kernel is None:
            continue
        kernel_name = type(kernel).__name__
        config = getattr(kernel, "config", None)
        weight_type = getattr(config, "weight_type", None)
        if (record := getattr(kernel, "taut_record", None)) is not None:
            used, reason = record()
            scheme = type(getattr(module, "scheme", None) or module.quant_method).__name__
            yield LayerChoice(name, used, scheme, reason, in_scope=False)
            continue
        if weight_type is None:
            scheme = type(getattr(module, "scheme", None) or module.quant_method).__name__
            why = eight_bit_refusal(kernel) or f"no taut kernel for {scheme} yet"
            reason = f"{why}; vLLM {kernel_name}"
            yield LayerChoice(name, kernel_name, scheme, reason, in_scope=False)
            continue
        scheme, in_scope = str(weight_type), str(weight_type) in FOUR_BIT
        if kernel_name.startswith(OUR_PREFIX):
            yield LayerChoice(name, kernel_name, scheme, None, in_scope)
            continue
        reason = refusal(config) or "vLLM chose another kernel (disabled or filtered by a flag)"
        yield LayerChoice(name, kernel_name, scheme, f"{reason}; vLLM {kernel_name}", in_scope)


def summary(choices: list[LayerChoice]) -> str:
    """Put the choices in one line: layers a kernel, and each distinct reason with its count."""
    kernels = Counter(choice.kernel for choice in choices)
    reasons = Counter(choice.reason for choice in choices if choice.reason is not None)
    line = ", ".join(f"{kernel} ×{count}" for kernel, count in sorted(kernels.items()))
    if reasons:
        line += "; not ours: " + "; ".join(f"{text} (×{n})" for text, n in sorted(reasons.items()))
    return line or "no quantised linear layer"


def refuse_unless_ours(choices: list[LayerChoice]) -> None:
    """Enforce ``TAUT_KERNELS=require``.

    Raises:
        KernelsNotUsedError: a W4A16 layer is not on our kernel (names the first and its reason), or
            no layer is.
    """
    for choice in choices:
        if choice.in_scope and choice.reason is not None:
            raise KernelsNotUsedError(f"TAUT_KERNELS=require: {choice.layer}: {choice.reason}")
    if all(choice.reason is not None for choice in choices):
        raise KernelsNotUsedError(
            f"TAUT_KERNELS=require: no layer runs on a taut kernel ({summary(choices)})"
        )


def write_report(
    choices: list[LayerChoice], mode: str, path: Path, ops: dict[str, Any] | None = None
) -> None:
    """Write the record as JSON, atomically.

    Args:
        choices: of every quantised layer.
        mode: what the worker asked for.
        path: target file; its directory must exist.
        ops: record of :mod:`taut_kernels.vllm_plugin.fused_ops`, or None.

    Raises:
        OSError: the file cannot be written.
    """
    document: dict[str, Any] = {"format": 1, "mode": mode}
    document["layers"] = [asdict(choice) for choice in choices]
    if ops is not None:
        document["ops"] = ops
    # Tensor-parallel workers write the same record at the same time; each has its own temporary
    # file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def conclude(choices: list[LayerChoice], mode: str, ops: dict[str, Any] | None = None) -> None:
    """Log the outcome of a load in one line, leave the report, and refuse what ``require`` forbids.

    Args:
        choices: of every quantised layer.
        mode: ``prefer`` or ``require``.
        ops: record of :mod:`taut_kernels.vllm_plugin.fused_ops`, or None.

    Raises:
        KernelsNotUsedError: as :func:`refuse_unless_ours`.
        OSError: the report cannot be written.
    """
    _logger.info("taut kernels (%s): %s", mode, summary(choices))
    if path := os.environ.get(REPORT_VARIABLE):
        write_report(choices, mode, Path(path), ops)
    if mode == "require":
        refuse_unless_ours(choices)
