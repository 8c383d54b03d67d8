"""What each candidate would cost the model, by forward passes alone.

A candidate is anything a layer's weight may become: rounded to a format, of fewer ranks, sparser.
Of every block two things are measured. First how far its output moves when one unit of it (a layer,
or layers decided together) becomes its reference candidate. Second the divergence of the model's
predictions when all of the block becomes so and every later block is as it was. The second is
shared among the block's units in proportion to the first; another candidate's loss is in
proportion to the squared error of the unit's own output. Losses of units are taken to add up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

from taut_deploy.compress.block import run_block
from taut_deploy.compress.calibrate.observe import InputGroup, observe_block
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize import rtn
from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.threads import single_thread

# Enough to rank layers by; every block is run once for each block before it.
SEQUENCES, SEQUENCE_LENGTH = 4, 256
_JUDGED_EVERY = 4


@dataclass(frozen=True)
class Tried:
    """One layer in its candidates.

    Args:
        errors: squared error of the layer's output, by candidate.
        weight: [N, K], what its weight becomes in the unit's reference candidate.
    """

    errors: dict[int, float]
    weight: torch.Tensor


class Scored(Protocol):
    """Layers that get the same candidate."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Full names, all of one block."""

    @property
    def reference(self) -> int:
        """The candidate whose effect on the model is measured."""

    def try_layer(self, name: str, weight: torch.Tensor, inputs: InputGroup) -> Tried:
        """Try every candidate.

        Args:
            name: full name of one of the layers.
            weight: its weight [N, K] fp32.
            inputs: what it reads.
        """


@dataclass(frozen=True)
class Unit:
    """Layers that are rounded to the same format.

    Args:
        layers: full names, all of one block.
        formats: what each candidate stores them in, by its position in the recipe; coarsest first.
    """

    layers: tuple[str, ...]
    formats: dict[int, WeightFormat]

    @property
    def reference(self) -> int:
        """The coarsest."""
        return next(iter(self.formats))

    def try_layer(self, name: str, weight: torch.Tensor, inputs: InputGroup) -> Tried:
        """Round to nearest in every format; the error is that of the sampled inputs."""
        del name
        errors: dict[int, float] = {}
        coarsest: torch.Tensor | None = None
        for candidate, layer_format in self.formats.items():
            with single_thread():
                codes = rtn.quantize_weight(weight, cast("Any", layer_format.spec))
                stored = layer_format.store(codes, inputs.absmax)
                wrong = stored.round_input(inputs.sample) @ stored.dequantize().T
                wrong -= inputs.sample @ weight.T
                errors[candidate] = float(wrong.square().sum())
            coarsest = stored.dequantize() if coarsest is None else coarsest
        if coarsest is None:
            raise AssertionError("a unit has at least one candidate")
        return Tried(errors, coarsest)


@dataclass(frozen=True)
class Score:
    """The losses of one unit, in nats, by candidate."""

    layers: tuple[str, ...]
    losses: dict[str, float]

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        return asdict(self)


class Scoring:
    """One pass over the blocks.

    Args:
        stream: the model, its blocks on disk.
        tokens: [B, T] of the calibration.
        units: in the model's order.
        observed: sequences that layers' inputs are observed on; the first four are run.
        with_hessian: also observe ``x xᵀ`` of the inputs.
    """

    def __init__(
        self,
        stream: StreamedModel,
        tokens: torch.Tensor,
        units: Sequence[Scored],
        *,
        observed: int = SEQUENCES,
        with_hessian: bool = False,
    ) -> None:
        self._stream = stream
        tokens = tokens[:observed, :SEQUENCE_LENGTH]
        parts = [stream.embed(part) for part in torch.split(tokens, SEQUENCES)]
        self._observed = torch.cat(parts)
        self._arguments = stream.enter(tokens[:1])[1]
        self._units = units
        self._with_hessian = with_hessian
        # The model's hidden states with one block changed, by that block's position.
        self._disturbed: dict[int, torch.Tensor] = {}
        # Share of each unit in its block's disturbance, and errors of its candidates' outputs.
        self._moved: dict[int, float] = {}
        self._errors: dict[int, dict[int, float]] = {}

    def run(self, progress: Callable[[DecoderBlock], None]) -> list[Score]:
        """Score every unit.

        Args:
            progress: told each block before it is scored.
        """
        for block in self._stream.blocks:
            progress(block)
            self._stream.load(block.module, block.name)
            self._block(block)
            self._stream.release(block.module)
        reference = self._predictions(self._clean)
        divergence = {
            index: _divergence(reference, self._predictions(hidden))
            for index, hidden in self._disturbed.items()
        }
        return [self._score(number, divergence) for number in range(len(self._units))]

    def _block(self, block: DecoderBlock) -> None:
        inside = [
            number
            for number, unit in enumerate(self._units)
            if unit.layers[0].startswith(f"{block.name}.")
        ]
        entering = self._clean
        groups = observe_block(
            block.module,
            self._observed,
            self._arguments[block.index],
            SEQUENCES,
            self._with_hessian,
        )
        by_layer = {f"{block.name}.{name}": group for group in groups for name in group.layers}
        self._observed = self._call(block, self._observed)
        self._disturbed = {
            index: self._call(block, hidden) for index, hidden in self._disturbed.items()
        }
        disturbing: dict[nn.Linear, torch.Tensor] = {}
        for number in inside:
            changed = self._measure(number, block, by_layer)
            with _exchanged(changed):
                self._moved[number] = _distance(self._call(block, entering), self._clean)
            disturbing |= changed
        if disturbing:
            with _exchanged(disturbing):
                self._disturbed[block.index] = self._call(block, entering)

    def _measure(
        self, number: int, block: DecoderBlock, inputs: dict[str, InputGroup]
    ) -> dict[nn.Linear, torch.Tensor]:
        """Errors of a unit's candidates; returns its layers' weights in the reference."""
        unit = self._units[number]
        errors: dict[int, float] = {}
        changed: dict[nn.Linear, torch.Tensor] = {}
        for name in unit.layers:
            inner = name.removeprefix(f"{block.name}.")
            layer = cast("nn.Linear", block.module.get_submodule(inner))
            tried = unit.try_layer(name, layer.weight.data.float(), inputs[name])
            for candidate, error in tried.errors.items():
                errors[candidate] = errors.get(candidate, 0.0) + error
            changed[layer] = tried.weight
        self._errors[number] = errors
        return changed

    @property
    def _clean(self) -> torch.Tensor:
        """The model's own hidden states of the sequences that are run."""
        return self._observed[:SEQUENCES]

    def _call(self, block: DecoderBlock, hidden: torch.Tensor) -> torch.Tensor:
        # One sequence at a time, so that threads share them.
        return run_block(block.module, hidden, self._arguments[block.index], 1)

    def _predictions(self, hidden: torch.Tensor) -> torch.Tensor:
        judged = hidden[:, ::_JUDGED_EVERY]
        return torch.cat(
            [self._stream.leave(row).log_softmax(-1) for row in torch.split(judged, 1)]
        )

    def _score(self, number: int, divergence: dict[int, float]) -> Score:
        unit = self._units[number]
        owner = next(
            block for block in self._stream.blocks if unit.layers[0].startswith(f"{block.name}.")
        )
        beside = [
            moved
            for other, moved in self._moved.items()
            if self._units[other].layers[0].startswith(f"{owner.name}.")
        ]
        share = self._moved[number] / max(sum(beside), torch.finfo(torch.float32).tiny)
        errors = self._errors[number]
        measured = max(errors[unit.reference], torch.finfo(torch.float32).tiny)
        losses = {
            str(candidate): divergence[owner.index] * share * error / measured
            for candidate, error in errors.items()
        }
        return Score(unit.layers, losses)


@contextmanager
def _exchanged(weights: Mapping[nn.Linear, torch.Tensor]) -> Iterator[None]:
    """Let layers compute with other weights for a while."""
    before = {layer: layer.weight.data for layer in weights}
    for layer, weight in weights.items():
        layer.weight.data = weight.to(layer.weight.dtype)
    try:
        yield
    finally:
        for layer, weight in before.items():
            layer.weight.data = weight


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).square().sum())


def _divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL of two sets of log-probabilities [B, T, V], in nats; never below zero."""
    each = (reference.exp() * (reference - other)).sum(-1)
    return max(0.0, float(each.mean()))
