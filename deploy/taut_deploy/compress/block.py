"""One decoder block, compressed as a recipe says: observe, run its stages, report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from taut_deploy.compress.calibrate.observe import InputGroup, observe_block, unobserved
from taut_deploy.compress.formats.protocol import DenseLayer, StoredLayer
from taut_deploy.compress.free_memory import return_freed_memory
from taut_deploy.compress.layers_at_once import solve_layers
from taut_deploy.compress.quantize.scales import row_slices
from taut_deploy.compress.replicas import Replica, over_replicas, replicas_of
from taut_deploy.compress.resolve import Treatment
from taut_deploy.compress.source.calls import call_block
from taut_deploy.compress.stages import BLOCK_STAGES
from taut_deploy.compress.state import BlockState, Example, LayerState
from taut_deploy.compress.threads import over_inputs, single_thread
from taut_deploy.errors import ModelError
from taut_deploy.recipe import Order, Recipe


@dataclass(frozen=True)
class LayerReport:
    """What happened to one linear layer.

    Args:
        name: name in the state dict.
        method: what was done to it, in order, joined by ``+``.
        scheme: what it is stored in; ``dense`` for a pruned layer whose zeros are written out.
        bits: bits per weight, scales not counted.
        group_size: weights per scale, None per channel.
        symmetric: whether there are no zero points.
        density: share of weights kept.
        rank: rank of a factorised layer, None elsewhere.
        relative_error: squared output error over squared output on sampled calibration rows; of
            the weight itself where none were seen.
        samples: calibration tokens seen.
        routed: of an expert that was shown every token because few are routed to it, how many are;
            None elsewhere.
    """

    name: str
    method: str
    scheme: str
    bits: int
    group_size: int | None
    symmetric: bool
    density: float
    rank: int | None
    relative_error: float
    samples: int
    routed: int | None = None

    def as_json(self) -> dict[str, object]:
        """The report as plain data."""
        found = asdict(self)
        if self.routed is None:
            del found["routed"]
        return found


@dataclass(frozen=True)
class CompressedBlock:
    """Result of one block: layers by name inside the block, and a report each."""

    stored: dict[str, StoredLayer]
    reports: list[LayerReport]


def compress_block(
    block: nn.Module,
    prefix: str,
    hidden: torch.Tensor | None,
    arguments: dict[str, Any],
    *,
    recipe: Recipe,
    treatments: Mapping[str, Treatment],
    dtype: torch.dtype,
    batch_size: int,
    target: torch.Tensor | None = None,
    devices: Sequence[torch.device] = (),
) -> CompressedBlock:
    """Compress a loaded block in place: afterwards its linears hold what will be stored.

    Args:
        block: the module, loaded.
        prefix: its name in the state dict.
        hidden: [B, T, H] its input, already from compressed predecessors; None where no stage asks
            for any.
        arguments: its recorded keyword arguments.
        recipe: what to do.
        treatments: of every linear layer, by full name.
        dtype: of the model's weights on disk.
        batch_size: sequences per call.
        target: [B, T, H] the original model's output of this block, where the recipe needs it.
        devices: that share the work, the block's own first; none for its own alone.

    Returns:
        What is stored of every layer that was changed for good, and its report.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    # Weights may be fp32 between stages; the block is not called in that state.
    groups = (
        unobserved(block)
        if hidden is None
        else observe_block(block, hidden, arguments, batch_size, recipe.needs_hessian, devices)
    )
    return_freed_memory()
    _require_seen(prefix, groups, treatments)
    state = _state_of(block, prefix, groups, treatments, devices)
    layers = state.layers
    if hidden is not None and target is not None:
        place = next(block.parameters()).device
        state.example = _example(hidden.to(place), target.to(place), arguments)
    for index, stage in enumerate(recipe.stages):
        if stage.order > Order.TRANSFORM:
            _keep_references(state)
        BLOCK_STAGES[stage.method].run(state, index, stage)
        return_freed_memory()  # of what the stage worked with
    _keep_pruned(layers, dtype)
    changed = {name: layer for name, layer in layers.items() if layer.stored is not None}
    reports = solve_layers(lambda each: [_report(one, dtype) for one in each], changed.values())
    if hidden is not None:
        block.to(hidden.dtype)
    stored = {name: layer.stored for name, layer in changed.items() if layer.stored is not None}
    return CompressedBlock(stored, reports)


def _state_of(
    block: nn.Module,
    prefix: str,
    groups: list[InputGroup],
    treatments: Mapping[str, Treatment],
    devices: Sequence[torch.device],
) -> BlockState:
    layers = {
        name: LayerState(
            full_name,
            cast("nn.Linear", block.get_submodule(name)),
            group,
            treatments[full_name].stages,
            treatments[full_name].format,
        )
        for group in groups
        for name in group.layers
        for full_name in (f"{prefix}.{name}",)
    }
    return BlockState(block, prefix, groups, layers, devices=devices)


def _example(hidden: torch.Tensor, target: torch.Tensor, arguments: dict[str, Any]) -> Example:
    # Recorded in inference mode, whose tensors no gradient may pass.
    plain = tree_map(lambda one: one.clone() if torch.is_tensor(one) else one, arguments)
    return Example(hidden, target, lambda module, batch: call_block(module, batch, plain))


def _require_seen(
    prefix: str, groups: list[InputGroup], treatments: Mapping[str, Treatment]
) -> None:
    seen = {f"{prefix}.{name}" for group in groups for name in group.layers}
    for name, treatment in treatments.items():
        if treatment.stages and name.startswith(f"{prefix}.") and name not in seen:
            raise ModelError(
                f"{name}: no calibration token reached this layer; put it into 'ignore' or "
                "calibrate with more text"
            )


def _keep_references(state: BlockState) -> None:
    for layer in state.layers.values():
        if layer.reference is None:
            layer.reference = layer.module.weight.data


def _keep_pruned(layers: Mapping[str, LayerState], dtype: torch.dtype) -> None:
    """Let layers that were pruned and no more be stored dense, their zeros written out."""
    for layer in layers.values():
        if layer.mask is not None and layer.stored is None:
            # Not through store(): what was done is told already.
            layer.stored = DenseLayer(layer.module.weight.data.to(dtype))
            layer.module.weight.data = layer.stored.dequantize()


def _report(layer: LayerState, dtype: torch.dtype) -> LayerReport:
    if layer.stored is None or layer.reference is None:
        raise TypeError(f"{layer.name}: only what is stored is reported")
    return_freed_memory()  # of the layer before
    kept = layer.format
    return LayerReport(
        layer.name,
        "+".join(layer.methods),
        "dense" if kept is None else kept.name,
        8 * dtype.itemsize if kept is None else kept.bits,
        None if kept is None else kept.group_size,
        True if kept is None else kept.symmetric,
        1.0 if layer.mask is None else round(float(layer.mask.float().mean()), 6),
        layer.rank,
        _relative_error(layer.reference, layer),
        layer.group.tokens,
        layer.group.routed,
    )


def _relative_error(reference: torch.Tensor, layer: LayerState) -> float:
    """Squared error of the layer's output over its square, on the sampled input rows.

    Of the weight itself where no input was seen: as if inputs were all alike.
    """
    sample, stored = layer.group.sample, layer.stored_weight()
    if not len(sample):
        wrong = square = 0.0
        for rows in row_slices(reference):
            exact = reference[rows].float()
            wrong += float((stored[rows] - exact).square_().sum())
            square += float(exact.square().sum())
        return wrong / max(square, 1e-20)
    with single_thread(2 * len(sample) * reference.numel()):
        exact = sample @ reference.float().T
        got = sample @ stored.T
        return float((got - exact).square().sum() / exact.square().sum().clamp(min=1e-20))


def run_block(
    block: nn.Module, hidden: torch.Tensor, arguments: dict[str, Any], batch_size: int
) -> torch.Tensor:
    """The output of a loaded block.

    Args:
        block: the module.
        hidden: [B, T, H] its input.
        arguments: its recorded keyword arguments.
        batch_size: sequences per call.

    Returns:
        [B, T, H].
    """
    return torch.cat([*run_batches(block, hidden, arguments, batch_size)])


def run_prompts(
    block: nn.Module, prompts: Sequence[torch.Tensor], arguments: Sequence[dict[str, Any]]
) -> list[torch.Tensor]:
    """The output of a loaded block for inputs of several lengths.

    Args:
        block: the module.
        prompts: [1, T, H] each.
        arguments: recorded keyword arguments of each.

    Returns:
        [1, T, H] each.
    """

    def call(number: int) -> torch.Tensor:
        with torch.inference_mode():
            return call_block(block, prompts[number], arguments[number])

    largest = max(prompts, key=torch.Tensor.numel)
    return [*over_inputs(call, range(len(prompts)), largest, block)]


def run_batches(
    block: nn.Module,
    hidden: torch.Tensor,
    arguments: dict[str, Any],
    batch_size: int,
    devices: Sequence[torch.device] = (),
) -> Iterator[torch.Tensor]:
    """The same batch by batch, [b, T, H] each.

    Args:
        block: the module.
        hidden: [B, T, H] its input.
        arguments: its recorded keyword arguments.
        batch_size: sequences per call.
        devices: that share the batches, the block's own first; none for its own alone.
    """

    def call(replica: Replica, batch: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return replica.call(batch)

    return over_replicas(call, hidden, batch_size, replicas_of(block, arguments, devices))
