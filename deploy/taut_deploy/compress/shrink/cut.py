"""One axis cut out of a model in memory: importance, choice, the smaller model, and a proof.

The smaller model must compute what the larger one computes with the dropped units silenced; that is
run, not assumed, so a layout nobody thought of is refused instead of cut wrongly. Hidden channels
are the exception: a norm over fewer channels is another function, corrected on the average.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.shrink.axes import Target, keep_blocks, target_of
from taut_deploy.compress.shrink.experts import cut_experts, mixtures
from taut_deploy.compress.shrink.importance import (
    best,
    block_influence,
    channel_statistics,
    consumers,
    decoder_of,
    input_importance,
    norms_of,
    with_hooks,
)
from taut_deploy.compress.shrink.smaller import Cut, fill, probe, probed, require_close
from taut_deploy.compress.skeleton import empty_model
from taut_deploy.errors import ModelError

_Work = Callable[[Any, Target, torch.Tensor, int], Cut]


def cut(model: Any, axis: Any, share: float, tokens: torch.Tensor, batch: int) -> Cut:
    """Shrink one axis.

    Args:
        model: transformers' model, dense, in memory.
        axis: one of :data:`.axes.AXES`.
        share: of its units to keep.
        tokens: [n, T] int64 calibration text.
        batch: sequences at a time.

    Raises:
        ModelError: the configuration cannot say it, or the architecture cannot be cut along it.
    """
    target = target_of(model.config, axis, share)
    require_cuttable(model, target)
    work: dict[str, _Work] = {"depth": _depth, "hidden": _hidden, "experts": cut_experts}
    return work.get(axis, _inputs)(model, target, tokens, batch)


def require_cuttable(model: Any, target: Target) -> None:
    """Refuse by the shapes alone what cannot be cut along an axis.

    Args:
        model: as it is; without weights will do.
        target: what is asked for.

    Raises:
        ModelError: a mixture of experts along another axis than ``experts``, or one whose routing
            is not known.
    """
    if target.axis == "experts":
        mixtures(model, empty_model(target.config, model.dtype), target)
    elif any(parameter.dim() > 2 for parameter in model.parameters()):
        raise ModelError(
            f"--{target.axis}: experts in one tensor cannot be shrunk; use a dense model, or drop "
            "whole experts by --experts"
        )


def _inputs(model: Any, target: Target, tokens: torch.Tensor, batch: int) -> Cut:
    """Neurons, or groups of heads: each block keeps its own."""
    smaller = empty_model(target.config, model.dtype)
    unit = 1
    pieces: list[tuple[int, int, int]] = [(target.before, target.after, 1)]
    if target.axis == "heads":
        pieces = _head_pieces(model.config, target)
        unit = pieces[0][2]
    layers = consumers(model, smaller, (target.before * unit, target.after * unit))
    name, blocks = decoder_of(model)
    owners = _owners(name, len(blocks), layers, target.axis)
    importance = input_importance(model, layers, unit, tokens, batch)
    kept = {block: best(importance[layer], target.after) for block, layer in sorted(owners.items())}

    def chosen(parameter: str) -> dict[tuple[int, int], list[int]]:
        block = next((block for block in kept if parameter.startswith(block + ".")), None)
        if block is None:
            return {}
        return {
            (before * width, after * width): _spread(kept[block], width)
            for before, after, width in pieces
        }

    fill(model, smaller, chosen)
    silenced = {layers[owners[block]]: _spread(units, unit) for block, units in kept.items()}
    _require_same(model, smaller, target.axis, silenced)
    return Cut(smaller, target, kept)


def _head_pieces(config: Any, target: Target) -> list[tuple[int, int, int]]:
    """Units before, after, and the width of one: for query heads of a group, then its key head."""
    width = int(target.config.head_dim)
    per_group = int(config.num_attention_heads) // target.before
    pieces = [(target.before, target.after, per_group * width)]
    return pieces if per_group == 1 else [*pieces, (target.before, target.after, width)]


def _spread(units: list[int], width: int) -> list[int]:
    return [unit * width + place for unit in units for place in range(width)]


def _owners(decoder: str, count: int, layers: dict[str, nn.Linear], axis: str) -> dict[str, str]:
    """The one consuming layer of each block.

    Raises:
        ModelError: a block has none, or several.
    """
    owners = {}
    for index in range(count):
        block = f"{decoder}.{index}"
        names = [name for name in layers if name.startswith(block + ".")]
        if len(names) != 1:
            raise ModelError(
                f"--{axis}: {block} has {len(names)} linear layers that read this axis, expected "
                "one; this architecture cannot be shrunk along it"
            )
        owners[block] = names[0]
    return owners


def _depth(model: Any, target: Target, tokens: torch.Tensor, batch: int) -> Cut:
    """Drop the blocks that change their input least; the last one stays."""
    name, blocks = decoder_of(model)
    influence = block_influence(model, blocks, tokens, batch)
    influence[-1] = torch.inf
    kept = best(influence, target.after)
    smaller = empty_model(keep_blocks(model.config, target.before, kept), model.dtype)
    places = {f"{name}.{new}.": f"{name}.{old}." for new, old in enumerate(kept)}
    fill(model, smaller, lambda _: {}, places)
    return Cut(smaller, target, {"": kept})


def _hidden(model: Any, target: Target, tokens: torch.Tensor, batch: int) -> Cut:
    """Drop channels of the residual stream, everywhere at once."""
    _require_plain_embedding(model)
    smaller = empty_model(target.config, model.dtype)
    norms = norms_of(model, smaller)
    importance, squares = channel_statistics(model, norms, tokens, batch)
    kept = best(importance, target.after)
    fill(model, smaller, lambda _: {(target.before, target.after): kept})
    with torch.no_grad():
        for name, square in squares.items():
            # A norm divides by the size of what is left of its input; keep what it divided by.
            ratio = float((square[kept].mean() / square.mean().clamp(min=1e-20)).sqrt())
            weight: torch.Tensor = smaller.get_submodule(name).weight
            shift = _offset(model.get_submodule(name))
            weight.copy_((weight.float() + shift) * ratio - shift)
    return Cut(smaller, target, {"": kept})


def _offset(norm: Any) -> float:
    """What a norm adds to its weight before it multiplies: 1 for Gemma's, 0 for others."""
    width = int(norm.weight.numel())
    probe = torch.ones(1, 1, width, dtype=norm.weight.dtype, device=norm.weight.device)
    before = norm.weight.detach().clone()
    with torch.no_grad():
        norm.weight.zero_()
        out = norm(probe)
        norm.weight.copy_(before)
    return 1.0 if float(out.abs().max()) > 0.5 else 0.0


@torch.inference_mode()
def _require_plain_embedding(model: Any) -> None:
    """Check that the first block reads embeddings as they are.

    Raises:
        ModelError: they are scaled by a number that follows from the width.
    """
    seen: list[torch.Tensor] = []
    _, blocks = decoder_of(model)

    def hook(module: nn.Module, arguments: Any, named: Any) -> None:
        seen.append(arguments[0] if arguments else named["hidden_states"])

    tokens = probe(model)
    with_hooks(
        [blocks[0].register_forward_pre_hook(hook, with_kwargs=True)],
        lambda: model.base_model(input_ids=tokens, use_cache=False),
    )
    expected = model.get_input_embeddings().weight[tokens]
    if seen[0].shape != expected.shape or not torch.allclose(seen[0], expected, rtol=1e-3):
        raise ModelError(
            f"--hidden: model_type {model.config.model_type!r} scales its embeddings by its width, "
            "which a smaller width would change; use --ffn, --heads or --depth"
        )


def _require_same(
    model: Any, smaller: Any, axis: str, silenced: dict[nn.Linear, list[int]]
) -> None:
    """Check the smaller model against the larger one with its dropped units silenced.

    Raises:
        ModelError: they differ.
    """
    expected: list[torch.Tensor] = []

    def silence(kept: list[int]) -> Callable[..., tuple[torch.Tensor]]:
        def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            mask = torch.zeros_like(arguments[0])
            mask[..., kept] = 1
            return (arguments[0] * mask,)

        return hook

    with_hooks(
        [layer.register_forward_pre_hook(silence(kept)) for layer, kept in silenced.items()],
        lambda: expected.append(probed(model)),
    )
    require_close(probed(smaller), expected[0], axis)
