"""Where a skeleton's decoder blocks are, and where the tensors of its parts are stored.

The decoder is the outermost list of modules that holds most weights; neither the class of the model
nor the names of its parts matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from taut_deploy.compress.skeleton import no_causal_lm
from taut_deploy.compress.source.experts import (
    ExpertNames,
    LinearExperts,
    is_transposed,
    names_in_checkpoint,
    stacked_experts,
)
from taut_deploy.compress.source.linears import linear_layers, replace_conv1d
from taut_deploy.compress.source.names import Place, renamed

# Experts that are stacked on disk, and that servers read one by one as well.
_SPLIT_ON_DISK = frozenset({"Llama4TextExperts"})


@dataclass(frozen=True)
class DecoderBlock:
    """One decoder block: its position, its name in the skeleton, and the module."""

    index: int
    name: str
    module: nn.Module


@dataclass(frozen=True)
class Skeleton:
    """A model whose parameters are on the meta device.

    Attributes:
        model: the transformers model; its experts and ``Conv1D`` are ``nn.Linear``.
        decoder: name of the list of blocks.
        blocks: its entries.
        places: where each tensor of the model comes from, by its name in the skeleton.
        unknown: stored tensors with no place.
    """

    model: Any
    decoder: str
    blocks: list[DecoderBlock]
    places: dict[str, Place]
    unknown: list[str]


def make_skeleton(model: Any, stored: Mapping[str, Any]) -> Skeleton:
    """Find the decoder, take experts apart, and give every stored tensor its place.

    Args:
        model: as built, on the meta device; its experts and ``Conv1D`` are replaced.
        stored: what the checkpoint holds, by name.

    Raises:
        ModelError: no decoder was found, or its blocks hold nothing to compress.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    decoder, layers = find_decoder(model)
    conversions = get_model_conversion_mapping(model)
    new_names = renamed(model, stored, conversions)
    places = {new: Place(name) for name, new in new_names.items()}
    names = names_in_checkpoint(conversions)
    for index, block in enumerate(layers):
        prefix = f"{decoder}.{index}"
        for name in replace_conv1d(block):
            key = f"{prefix}.{name}.weight"
            if key in places:
                places[key] = Place(places[key].stored, turned=True)
        for name, stacked in stacked_experts(block).items():
            _take_apart(block, prefix, name, stacked, names, places)
    _require_linears(model, layers)
    kept = model.state_dict()
    unknown = [name for name, new in new_names.items() if new not in kept and new in places]
    blocks = [DecoderBlock(i, f"{decoder}.{i}", module) for i, module in enumerate(layers)]
    return Skeleton(model, decoder, blocks, places, unknown)


def take_experts_apart(model: Any) -> None:
    """Make a linear layer of every expert's matrix, where checkpoints of the family store them so.

    Args:
        model: on the meta device.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    names = names_in_checkpoint(get_model_conversion_mapping(model))
    if names is not None:
        for name, stacked in stacked_experts(model).items():
            model.set_submodule(name, LinearExperts(stacked, names))


def _require_linears(model: Any, layers: nn.ModuleList) -> None:
    if not any(True for block in layers for _ in linear_layers(block)):
        raise no_causal_lm(model.config, "its blocks hold no linear layers")
    recurrent = all(
        any(name.endswith("A_log") for name, _ in block.named_parameters()) for block in layers
    )
    if recurrent and not hasattr(model.config, "num_attention_heads"):
        raise no_causal_lm(model.config, "its blocks are state space models")


def _take_apart(
    block: nn.Module,
    prefix: str,
    name: str,
    stacked: nn.Module,
    names: ExpertNames | None,
    places: dict[str, Place],
) -> None:
    """Replace stacked experts by linear layers where a checkpoint stores them so, or may."""
    path = f"{prefix}.{name}"
    wide, down = places.get(f"{path}.gate_up_proj"), places.get(f"{path}.down_proj")
    if wide is None or down is None:
        if names is not None:
            block.set_submodule(name, LinearExperts(stacked, names))
        return
    if type(stacked).__name__ not in _SPLIT_ON_DISK:
        return
    names = ExpertNames()
    turned = is_transposed(stacked)
    experts = LinearExperts(stacked, names)
    block.set_submodule(name, experts)
    del places[f"{path}.gate_up_proj"], places[f"{path}.down_proj"]
    for index in range(experts.num_experts):
        expert = f"{path}.{index}"
        for half, leaf in enumerate((names.gate, names.up)):
            places[f"{expert}.{leaf}.weight"] = Place(wide.stored, index, half, turned)
        places[f"{expert}.{names.down}.weight"] = Place(down.stored, index, turned=turned)


def find_decoder(model: Any) -> tuple[str, nn.ModuleList]:
    """The list of decoder blocks and its name; of a model with a vision part, that of its text."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else None
    root = text if isinstance(text, nn.Module) else model
    start = next(name for name, module in model.named_modules() if module is root)
    found: dict[str, nn.ModuleList] = {}
    for name, module in root.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            found[name] = module
    if not found:
        raise no_causal_lm(model.config, "found no list of decoder blocks")
    best = max(found, key=lambda name: sum(p.numel() for p in found[name].parameters()))
    return f"{start}.{best}" if start else best, found[best]
