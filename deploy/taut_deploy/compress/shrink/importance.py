"""How much each unit of an axis matters, from activations on calibration text.

Neurons and heads: mean magnitude of what the unit sends into the consuming linear layer, times the
norm of the weights that receive it. Channels: mean magnitude after every norm. Blocks: one minus
the cosine between what enters and what leaves.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from torch.utils.hooks import RemovableHandle

from taut_deploy.compress.shrink.axes import shapes
from taut_deploy.errors import ModelError


def run(model: Any, tokens: torch.Tensor, batch: int) -> None:
    """Run the text through the model; hooks see what they asked for.

    Args:
        model: transformers' model.
        tokens: [n, T] int64.
        batch: sequences at a time.
    """
    with torch.inference_mode():
        for part in torch.split(tokens, batch):
            model.base_model(input_ids=part.to(model.device), use_cache=False)


def consumers(model: nn.Module, smaller: nn.Module, width: tuple[int, int]) -> dict[str, nn.Linear]:
    """The linear layers whose inputs shrink from one width to another, by name."""
    before, after = shapes(model), shapes(smaller)
    found = {}
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if isinstance(module, nn.Linear) and (before[key][1], after[key][1]) == width:
            found[name] = module
    return found


def input_importance(
    model: Any, layers: dict[str, nn.Linear], unit: int, tokens: torch.Tensor, batch: int
) -> dict[str, torch.Tensor]:
    """Importance of the units that feed each layer.

    Args:
        model: transformers' model.
        layers: the consuming layers by name.
        unit: neighbouring inputs that are one unit.
        tokens: [n, T] int64.
        batch: sequences at a time.

    Returns:
        [units] fp32 on the CPU for each layer.
    """
    sums = {name: torch.zeros(layer.in_features) for name, layer in layers.items()}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            sums[name] += arguments[0].float().abs().flatten(0, -2).sum(0).cpu()

        return hook

    with_hooks(
        [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()],
        lambda: run(model, tokens, batch),
    )
    found = {}
    for name, layer in layers.items():
        strength = layer.weight.detach().float().norm(dim=0).cpu()
        each = sums[name] / tokens.numel() * strength
        found[name] = each.view(-1, unit).norm(dim=1)
    return found


def norms_of(model: nn.Module, smaller: nn.Module) -> dict[str, nn.Module]:
    """The norms over the hidden channels: modules whose only weight is one number a channel."""
    before, after = shapes(model), shapes(smaller)
    found = {}
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if key in before and len(before[key]) == 1 and before[key] != after[key]:
            found[name] = module
    return found


def channel_statistics(
    model: Any, norms: dict[str, nn.Module], tokens: torch.Tensor, batch: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance of every hidden channel, and what each norm sees.

    Args:
        model: transformers' model.
        norms: by name.
        tokens: [n, T] int64.
        batch: sequences at a time.

    Returns:
        Importance [H], and the mean square of each norm's inputs [H] by name.
    """
    width = int(model.config.hidden_size)
    importance = torch.zeros(width)
    squares = {name: torch.zeros(width) for name in norms}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            squares[name] += arguments[0].float().square().flatten(0, -2).sum(0).cpu()
            importance.add_(out.float().abs().flatten(0, -2).sum(0).cpu())

        return hook

    with_hooks(
        [norm.register_forward_hook(watch(name)) for name, norm in norms.items()],
        lambda: run(model, tokens, batch),
    )
    return importance, {name: value / tokens.numel() for name, value in squares.items()}


def block_influence(
    model: Any, blocks: nn.ModuleList, tokens: torch.Tensor, batch: int
) -> torch.Tensor:
    """One minus the mean cosine between each block's input and output, [blocks] fp32."""
    sums = torch.zeros(len(blocks))

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, named: Any, out: Any) -> None:
            entering = arguments[0] if arguments else named["hidden_states"]
            leaving = out[0] if isinstance(out, tuple) else out
            sums[index] += float((1 - cosine_similarity(entering, leaving, -1).float()).sum())

        return hook

    with_hooks(
        [
            block.register_forward_hook(watch(index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ],
        lambda: run(model, tokens, batch),
    )
    return sums / tokens.numel()


def with_hooks(handles: list[RemovableHandle], work: Callable[[], None]) -> None:
    """Do the work, then take the hooks off."""
    try:
        work()
    finally:
        for handle in handles:
            handle.remove()


def decoder_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder blocks: the longest list of modules of one type.

    Raises:
        ModelError: there is none.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(entry) for entry in module}) == 1
    ]
    if not lists:
        raise ModelError(f"{type(model).__name__}: found no list of decoder blocks")
    return max(lists, key=lambda item: len(item[1]))


def best(importance: torch.Tensor, count: int) -> list[int]:
    """The places of the largest entries, ascending."""
    order = importance.argsort(descending=True, stable=True)[:count]
    return sorted(int(index) for index in order)
