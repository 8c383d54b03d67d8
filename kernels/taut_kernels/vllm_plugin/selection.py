"""Which kernel each layer runs on, and why not ours: asked beforehand, recorded after loading.

A worker audits the loaded model instead of trusting the choice it asked for:
``VLLM_DISABLED_KERNELS``, ``--linear-backend`` and a later plugin all change it silently. The audit
ends in one log line, in the record (:mod:`.record`), and in the worker's
gauges. `taut doctor` asks :func:`why_not_ours` and :func:`why_not_preferred` about a checkpoint.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from taut_kernels.gemm.w4a16 import cpu as w4a16_cpu
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.gemm.w4a16 import verdict as measured_w4a16
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.vllm_plugin import known_answer, record

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
        shape: output × input features of this process's shard, for example ``6144x4096``; None
            where the layer does not say.
        note: what was measured against our kernel on this shape although it runs, or None.
    """

    layer: str
    kernel: str
    scheme: str
    reason: str | None
    in_scope: bool
    shape: str | None = None
    note: str | None = None


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


def why_not_preferred(
    gpu: str | None, mode: str, N: int, K: int, weights: WeightFormat = DEFAULT
) -> str | None:
    """Say why ``prefer`` leaves a W4A16 layer to vLLM although our kernel could run it.

    A kernel that may be slower is never put in silently: ours is preferred for shapes and formats
    that were measured against Marlin and Machete on this card and won by the rule of
    :mod:`taut_kernels.gemm.w4a16.verdict`.

    Args:
        gpu: name of the card, None on a CPU.
        mode: value of ``TAUT_KERNELS``.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        weights: its format.

    Returns:
        A reason, or None where ours is used.
    """
    if gpu is None or mode != "prefer":
        return None
    reason = measured_w4a16.why_not_preferred(gpu, N, K, weights)
    return reason and f"{reason}; TAUT_KERNELS=require runs it"


def _kernel_of(module: torch.nn.Module) -> Any | None:
    """Find a linear layer's kernel: on its scheme (compressed-tensors) or method (GPTQ, AWQ)."""
    for holder in (getattr(module, "scheme", None), getattr(module, "quant_method", None)):
        for name in ("kernel", "fp8_linear"):
            if (kernel := getattr(holder, name, None)) is not None:
                return kernel
    return None


def _without_kernel(name: str, module: torch.nn.Module) -> LayerChoice | None:
    """Describe a 4-bit linear layer whose method asks for no kernel, None for any other module.

    vLLM (0.26, 0.32) has one for AWQ: without zero points, with ``VLLM_BATCH_INVARIANT``, and for
    shapes that Marlin does not take.
    """
    method = getattr(module, "quant_method", None)
    scheme = str(getattr(getattr(method, "quant_config", None), "quant_type", None))
    shape = _shape_of(module, None)
    if scheme not in FOUR_BIT or shape is None:
        return None
    used = type(method).__name__
    reason = f"vLLM {used} chooses no kernel by layer"
    return LayerChoice(name, used, scheme, reason, in_scope=True, shape=shape)


def _shape_of(module: torch.nn.Module, config: Any) -> str | None:
    """Return N×K of a layer's shard, from the kernel's description or vLLM's linear layer."""
    if (partition := getattr(config, "partition_weight_shape", None)) is not None:
        K, N = partition
        return f"{N}x{K}"
    N = getattr(module, "output_size_per_partition", None)
    K = getattr(module, "input_size_per_partition", None)
    return None if N is None or K is None else f"{N}x{K}"


def audit(
    model: torch.nn.Module,
    refusal: Callable[[Any], str | None],
    eight_bit_refusal: Callable[[Any], str | None] = lambda kernel: None,
    note: Callable[[Any], str | None] = lambda config: None,
) -> Iterator[LayerChoice]:
    """Look at what each quantised linear layer of a loaded model really holds.

    Args:
        model: as vLLM loaded it.
        refusal: our kernel's verdict on an `MPLinearLayerConfig`.
        eight_bit_refusal: why a scaled-mm kernel of vLLM's stands where ours could, None where
            there is none of ours for it.
        note: what is known against our kernel on an `MPLinearLayerConfig` it serves.

    Yields:
        One choice a layer, in module order; unquantised layers are left out.
    """
    for name, module in model.named_modules():
        kernel = _kernel_of(module)
        if kernel is None:
            if (choice := _without_kernel(name, module)) is not None:
                yield choice
            continue
        kernel_name = type(kernel).__name__
        config = getattr(kernel, "config", None)
        shape = _shape_of(module, config)
        weight_type = getattr(config, "weight_type", None)
        if (taut_record := getattr(kernel, "taut_record", None)) is not None:
            used, reason = taut_record()
            method = type(getattr(module, "scheme", None) or module.quant_method).__name__
            scheme = getattr(kernel, "taut_scheme", method)
            said = getattr(kernel, "taut_note", lambda: None)()
            yield LayerChoice(name, used, scheme, reason, False, shape, said)
            continue
        if weight_type is None:
            scheme = type(getattr(module, "scheme", None) or module.quant_method).__name__
            why = eight_bit_refusal(kernel) or f"no taut kernel for {scheme} yet"
            reason = f"{why}; vLLM {kernel_name}"
            yield LayerChoice(name, kernel_name, scheme, reason, in_scope=False, shape=shape)
            continue
        scheme, in_scope = str(weight_type), str(weight_type) in FOUR_BIT
        if kernel_name.startswith(OUR_PREFIX):
            yield LayerChoice(name, kernel_name, scheme, None, in_scope, shape, note(config))
            continue
        reason = refusal(config) or "vLLM chose another kernel (disabled or filtered by a flag)"
        reason = f"{reason}; vLLM {kernel_name}"
        yield LayerChoice(name, kernel_name, scheme, reason, in_scope, shape)


def summary(choices: list[LayerChoice]) -> str:
    """Put the choices in one line: layers a kernel, and each distinct reason with its count."""
    kernels = Counter(choice.kernel for choice in choices)
    reasons = Counter(choice.reason for choice in choices if choice.reason is not None)
    line = ", ".join(f"{kernel} ×{count}" for kernel, count in sorted(kernels.items()))
    if reasons:
        line += "; not ours: " + "; ".join(f"{text} (×{n})" for text, n in sorted(reasons.items()))
    notes = Counter(choice.note for choice in choices if choice.note is not None)
    if notes:
        line += "; ours, but " + "; ".join(f"{text} (×{n})" for text, n in sorted(notes.items()))
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


def conclude(choices: list[LayerChoice], mode: str, ops: dict[str, Any] | None = None) -> None:
    """Log the outcome of a load in one line, leave the report, and refuse what ``require`` forbids.

    Args:
        choices: of every quantised layer.
        mode: ``prefer`` or ``require``.
        ops: record of :mod:`.fused_ops`, or None.

    Raises:
        KernelsNotUsedError: as :func:`refuse_unless_ours`.
        OSError: the report cannot be written.
    """
    _logger.info("taut kernels (%s): %s", mode, summary(choices))
    if (path := record.place()) is not None:
        layers = [asdict(choice) for choice in choices]
        record.write(layers, mode, path, ops, known_answer.results())
    if mode == "require":
        refuse_unless_ours(choices)
