"""A compressed checkpoint as a trainable transformers model, and the same model untrained."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from taut_deploy.checkpoint import is_checkpoint, read_manifest
from taut_deploy.compress.job import compute_dtype, stored_dtype
from taut_deploy.compress.lowrank.whitened_svd import Factors
from taut_deploy.compress.skeleton import empty_model
from taut_deploy.compress.source.weights import WeightReader
from taut_deploy.compress.train.fake_quantize import codes_of, nearest_in_cell
from taut_deploy.compress.train.quantized_layers import (
    QuantizedLayer,
    layer_schemes,
    read_layer,
    require_trained_inputs,
)
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.compress.train.weight_forms import LowRank, Quantized, Rounded, TokenRounding
from taut_deploy.diagnose.own_format import own_layers
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import read_config
from taut_deploy.models.pretrained import load_config
from taut_kernels.for_deploy import layer_description as told

# Fewer exact zeros than this are chance, more are a pruning to keep.
_PRUNED = 0.05


@dataclass(frozen=True)
class Student:
    """A model whose parameters are fp32 master weights.

    Args:
        directory: of the checkpoint.
        model: transformers' model; its weights are computed from the masters.
        stored: dtype of weights and scales on disk.
        layers: the quantised layers, by the name of their module.
        pruned: names of the weights whose zeros stay.
        low_rank: names of the modules that are stored as two factors.
    """

    directory: Path
    model: Any
    stored: torch.dtype
    layers: dict[str, QuantizedLayer]
    pruned: tuple[str, ...]
    low_rank: frozenset[str]

    def masters(self) -> dict[str, nn.Parameter]:
        """Every master weight by the name it is stored under, and the scales' logarithms."""
        return {_plain(name): value for name, value in self.model.named_parameters()}

    def effective(self, name: str) -> torch.Tensor | None:
        """What the model computes with for a stored name, fp32 on the CPU; None if it has none."""
        owner, _, leaf = name.rpartition(".")
        if owner in self.low_rank and leaf in told.FACTORS:
            factors = self.model.get_submodule(owner).parametrizations.weight
            factor: torch.Tensor = getattr(factors, f"original{told.FACTORS.index(leaf)}")
            return factor.detach().float().cpu()
        try:
            value = getattr(self.model.get_submodule(owner), leaf)
        except AttributeError:
            return None
        return value.detach().float().cpu() if isinstance(value, torch.Tensor) else None

    def trained(self, settings: TrainSettings) -> dict[str, nn.Parameter]:
        """The masters that settings ask to train."""
        chosen = {}
        for name, value in self.masters().items():
            ratio = name.endswith(".log_ratio")
            block_matrix = value.dim() >= 2 and any(part.isdigit() for part in name.split("."))
            # One scale of a whole weight may be that of other layers, too: an engine joins them.
            fixed = ratio and (settings.scales == "fixed" or value.numel() == 1)
            if fixed or (settings.train == "linear" and not ratio and not block_matrix):
                continue
            chosen[name] = value
        return chosen


def open_student(
    directory: Path,
    settings: TrainSettings,
    device: str,
    *,
    rounded: Path | None = None,
    trust_remote_code: bool = False,
    held_on: str | None = None,
) -> Student:
    """Load a checkpoint for training.

    Args:
        directory: compressed-tensors or low-rank checkpoint, or a plain (pruned, shrunk) model.
        settings: how it starts.
        device: ``cpu`` or ``cuda``.
        rounded: directory of the weights that were rounded, for ``start`` other than ``codes``.
        trust_remote_code: let the model's own Python code run.
        held_on: device of the weights until they are moved; ``device`` if None.

    Raises:
        ModelError: a tensor is missing or of another shape, or the format cannot be trained.
    """
    stored = stored_dtype(directory)
    compute, device = compute_dtype(stored, device), held_on or device
    config = load_config(directory, trust_remote_code=trust_remote_code)
    model = empty_model(config, compute, trust_remote_code=trust_remote_code)
    reader = WeightReader(directory)
    entry = read_config(directory).get("quantization_config")
    factors = _factors(directory, entry, reader)
    quantised = layer_schemes(model, entry) if isinstance(entry, dict) and not factors else ()
    layers = {name: read_layer(name, scheme, reader) for name, scheme in quantised}
    starts = _starts(layers, settings.start, rounded)
    densities = _densities(directory)
    pruned: list[str] = []
    tied: dict[int, nn.Parameter] = {}
    for owner, name, leaf, parameter in list(_parameters(model)):
        layer = layers.get(name.rpartition(".")[0]) if leaf == "weight" else None
        pair = factors.get(name.rpartition(".")[0]) if leaf == "weight" else None
        if id(parameter) not in tied:
            start = starts[layer.name] if layer is not None else None
            value = _value(name, parameter, start if pair is None else pair.product(), reader)
            tied[id(parameter)] = nn.Parameter(value.to(device))
        owner._parameters[leaf] = tied[id(parameter)]
        mask = _mask(name, parameter, layer, tied[id(parameter)], densities)
        if mask is not None:
            pruned.append(name)
        form: nn.Module
        if layer is not None:
            form = Quantized(layer, stored, compute, mask)
        elif pair is not None:
            form = LowRank(pair, stored, compute)
        else:
            form = Rounded(stored, compute, mask)
        parametrize.register_parametrization(owner, leaf, form.to(device), unsafe=True)
    for name, buffer in model.named_buffers():
        if name in reader.stored:
            buffer.copy_(reader.read(name))
    for name, layer in layers.items():
        _round_inputs(model.get_submodule(name), layer, reader)
    return Student(directory, model.to(device), stored, layers, tuple(pruned), frozenset(factors))


def _factors(directory: Path, entry: Any, reader: WeightReader) -> dict[str, Factors]:
    """The two factors of each low-rank layer, fp32; none in a checkpoint of another method.

    Raises:
        ModelError: the checkpoint is of a method, or has a layer, that cannot be trained.
    """
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    described = own_layers({"quantization_config": entry})
    if entry is not None and described is None and method != "compressed-tensors":
        raise ModelError(
            f"{directory / 'config.json'}: quant_method {method!r} cannot be trained; distil a "
            "compressed-tensors or low-rank checkpoint or a dense model"
        )
    found = {}
    for name, layer in (described or {}).items():
        if not isinstance(layer, told.LowRank) or layer.base is not None:
            raise ModelError(
                f"{directory / 'config.json'}: {name} is {layer.scheme}, which cannot be trained; "
                "distil a compressed-tensors or low-rank checkpoint or a dense model"
            )
        up, down = (reader.read(f"{name}.{leaf}").float() for leaf in told.FACTORS)
        order = reader.read(f"{name}.{told.ORDER}") if layer.interpolative else None
        found[name] = Factors(up, down, order)
    return found


def _starts(
    layers: dict[str, QuantizedLayer], start: str, rounded: Path | None
) -> dict[str, torch.Tensor]:
    """The master weight each quantised layer begins with, by module."""
    if start == "codes" or rounded is None:
        return {name: layer.weight for name, layer in layers.items()}
    reader = WeightReader(rounded)
    found = {}
    for name, layer in layers.items():
        base = reader.read(f"{name}.weight").float()
        if base.shape != layer.weight.shape:
            raise ModelError(
                f"start: {name}.weight: the teacher's shape {tuple(base.shape)} is not the "
                f"student's {tuple(layer.weight.shape)}; use codes"
            )
        if start == "cells":
            codes = codes_of(layer.weight, layer.scale, layer.zero, layer.grid)
            base = nearest_in_cell(base, codes, layer.scale, layer.zero)
        found[name] = base
    return found


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Owner, full name, own name and value of every parameter; tied ones once for each owner."""
    for prefix, owner in model.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, f"{prefix}.{leaf}" if prefix else leaf, leaf, parameter


def _value(
    name: str,
    parameter: nn.Parameter,
    start: torch.Tensor | None,
    reader: WeightReader,
) -> torch.Tensor:
    """The fp32 value a master begins with: ``start``, or what is stored under its name.

    Raises:
        ModelError: it has another shape than the architecture says.
    """
    value = reader.read(name).float() if start is None else start
    if value.shape != parameter.shape:
        raise ModelError(
            f"{name}: stored shape {tuple(value.shape)} does not match config.json's "
            f"{tuple(parameter.shape)}"
        )
    return value


def _densities(directory: Path) -> dict[str, float]:
    """Share of weights kept of each layer that the manifest reports one for."""
    if not is_checkpoint(directory):
        return {}
    layers = read_manifest(directory).layers
    return {str(layer.get("name")): float(layer.get("density", 1.0)) for layer in layers}


def _mask(
    name: str,
    parameter: nn.Parameter,
    layer: QuantizedLayer | None,
    value: torch.Tensor,
    densities: dict[str, float],
) -> torch.Tensor | None:
    """Where a pruned weight is not zero, or None where it was not pruned."""
    inside_block = any(part.isdigit() for part in name.split("."))
    if parameter.dim() != 2 or not inside_block:
        return None
    density = densities.get(name.removesuffix(".weight"), 1.0)
    if layer is not None:
        return (layer.weight != 0).to(value.device) if density < 1.0 else None
    kept = value != 0
    return kept if density < 1.0 or float(kept.float().mean()) < 1.0 - _PRUNED else None


def _round_inputs(module: nn.Module, layer: QuantizedLayer, reader: WeightReader) -> None:
    """Round the layer's inputs where its scheme does.

    Raises:
        ModelError: in a way that is not trained.
    """
    require_trained_inputs(layer.scheme, layer.name)
    inputs = layer.scheme.input_activations
    if inputs is None:
        return
    kind = str(getattr(inputs.type, "value", inputs.type))
    scale = None if inputs.dynamic else reader.read(f"{layer.name}.input_scale").float()
    module.register_forward_pre_hook(TokenRounding("int" if kind == "int" else "float8", scale))


def _plain(name: str) -> str:
    """The stored name of a parametrised weight; a form's own parameters keep theirs."""
    before, marker, after = name.partition("parametrizations.")
    if not marker:
        return name
    leaf, _, rest = after.partition(".")
    return before + (leaf if rest == "original" else f"{leaf}.{rest.rpartition('.')[2]}")
