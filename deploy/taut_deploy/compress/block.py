"""One decoder block, compressed as a recipe says: observe, smooth, quantise, report."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn

from taut_deploy.compress.calibrate.observe import InputGroup, observe_block
from taut_deploy.compress.equalize.fold import find_fold
from taut_deploy.compress.equalize.smoothquant import choose_scales
from taut_deploy.compress.quantize import gptq, rtn
from taut_deploy.compress.quantize.grid import GridSpec, QuantizedWeight, fake_quantize_tokens
from taut_deploy.compress.threads import single_thread
from taut_deploy.errors import ModelError
from taut_deploy.recipe import Quantize, Smooth


@dataclass(frozen=True)
class LayerReport:
    """What happened to one linear layer.

    Args:
        name: name in the state dict.
        method: algorithm that chose the codes, with ``smooth+`` in front where factors were folded
            in.
        bits: bits per weight, scales not counted.
        group_size: weights per scale, None per channel.
        symmetric: whether there are no zero points.
        density: share of weights kept.
        rank: rank of a factorised layer, None here.
        relative_error: squared output error over squared output on sampled calibration rows.
        samples: calibration tokens seen.
    """

    name: str
    method: str
    bits: int
    group_size: int | None
    symmetric: bool
    density: float
    rank: int | None
    relative_error: float
    samples: int

    def as_json(self) -> dict[str, object]:
        """The report as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class CompressedBlock:
    """Result of one block: layers by name inside the block, and a report each."""

    weights: dict[str, QuantizedWeight]
    reports: list[LayerReport]


def compress_block(
    block: nn.Module,
    prefix: str,
    hidden: torch.Tensor,
    arguments: dict[str, Any],
    *,
    smooth: Smooth | None,
    quantize: Quantize,
    spec: GridSpec,
    ignored: Callable[[str], bool],
    batch_size: int,
) -> CompressedBlock:
    """Compress a loaded block in place: afterwards its linears hold the dequantised weights.

    Args:
        block: the module, loaded.
        prefix: its name in the state dict.
        hidden: [B, T, H] its input, already from compressed predecessors.
        arguments: its recorded keyword arguments.
        smooth: smoothing stage or None.
        quantize: quantisation stage.
        spec: integer grid.
        ignored: says of a full layer name whether it stays as it is.
        batch_size: sequences per call.

    Returns:
        Codes and reports of every layer that was quantised.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    # Weights may be fp32 between smoothing and quantisation; the block is not called in that state.
    needs_hessian = quantize.algorithm == "gptq"
    groups = observe_block(block, hidden, arguments, batch_size, needs_hessian)
    weights: dict[str, QuantizedWeight] = {}
    reports: list[LayerReport] = []
    smoothed = [_smooth_group(block, group, smooth, quantize, spec) for group in groups]
    for group, was_smoothed in zip(groups, smoothed, strict=True):
        for name in group.layers:
            full_name = f"{prefix}.{name}"
            if ignored(full_name):
                continue
            layer = _linear(block, name)
            with single_thread():
                quantized = _quantize_layer(full_name, layer, group, quantize, spec)
            error = _relative_error(layer, quantized, group)
            layer.weight.data = quantized.dequantize()
            if quantize.scheme == "W8A8":
                layer.register_forward_pre_hook(
                    lambda _module, args: (fake_quantize_tokens(args[0]),)
                )
            weights[name] = quantized
            method = ("smooth+" if was_smoothed else "") + quantize.algorithm
            reports.append(
                LayerReport(
                    full_name,
                    method,
                    quantize.num_bits,
                    spec.group_size,
                    spec.symmetric,
                    1.0,
                    None,
                    error,
                    group.tokens,
                )
            )
    block.to(hidden.dtype)
    return CompressedBlock(weights, reports)


def _smooth_group(
    block: nn.Module, group: InputGroup, smooth: Smooth | None, quantize: Quantize, spec: GridSpec
) -> bool:
    """Choose and fold smoothing factors; the group's statistics follow. Says if they did."""
    fold = find_fold(block, group) if smooth is not None else None
    if smooth is None or fold is None:
        return False
    layers = [_linear(block, name) for name in group.layers]
    weights = [layer.weight.data.float() for layer in layers]
    alpha = None if smooth.alpha == "auto" else smooth.alpha

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        quantized = rtn.quantize_weight(weight, spec).dequantize()
        return (fake_quantize_tokens(x) if quantize.scheme == "W8A8" else x) @ quantized.T

    scales = choose_scales(group.sample, group.absmax, weights, product, alpha, fold.tie)
    if bool((scales == 1).all()):
        return False
    scales = fold.apply(scales)
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight * scales  # fp32 until it is quantised
    group.absmax = group.absmax / scales
    group.sample = group.sample / scales
    if group.hessian is not None:
        group.hessian = group.hessian / scales[:, None] / scales[None, :]
    return True


def _linear(block: nn.Module, name: str) -> nn.Linear:
    return cast("nn.Linear", block.get_submodule(name))


def _quantize_layer(
    name: str, layer: nn.Linear, group: InputGroup, quantize: Quantize, spec: GridSpec
) -> QuantizedWeight:
    weight = layer.weight.data.float()
    # Either would spread silently: NaN compares false and ends as code 0 of scale 0.
    for what, tensor in (("weight", weight), ("input during calibration", group.absmax)):
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name}: its {what} holds NaN or infinity; the model is broken")
    if group.hessian is None:
        return rtn.quantize_weight(weight, spec)
    return gptq.quantize_weight(
        weight,
        group.hessian,
        spec,
        dampening_frac=quantize.dampening_frac,
        act_order=quantize.act_order,
    )


def _relative_error(layer: nn.Linear, quantized: QuantizedWeight, group: InputGroup) -> float:
    """Squared error of the layer's output over its square, on the sampled input rows."""
    exact = group.sample @ layer.weight.data.float().T
    got = group.sample @ quantized.dequantize().T
    return float((got - exact).square().sum() / exact.square().sum().clamp(min=1e-20))
