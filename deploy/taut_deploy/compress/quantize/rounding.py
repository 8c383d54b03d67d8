"""Learned rounding: a block's codes and scales move until the block's output is right.

Source: AutoRound, "Optimize weight rounding via signed gradient descent", arXiv:2309.05516, §3:
an offset in [-0.5, 0.5] is added to every weight before it is rounded, gradients pass straight
through the rounding, and only their signs are used, with a step that falls linearly to 0. Three
choices of ours: the start may be any codes (GPTQ's, so that a few steps are enough), one factor per
scale is learned in place of two clipping factors, and of a float's grid an offset counts in the
distance between its numbers where the weight lies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from taut_deploy.compress.block_error import BlockError, Call, judging_sequences
from taut_deploy.compress.quantize.float8 import Float8Weight
from taut_deploy.compress.quantize.grid import QuantizedWeight
from taut_deploy.compress.quantize.protocol import Codes

LEARNED_AT_A_TIME = 4
"""Sequences in a step."""

_SCALE_RANGE = 0.1
# How far a scale moves the largest code of its group, of a code's own step. It moves a whole group:
# at the codes' pace the best scales are jumped over.
_SCALE_PACE = 0.7
# How far from its code a latent begins, in grid steps. GPTQ's codes are often not the nearest ones:
# beginning at the border, a first step would undo all of its corrections at once.
_START = 0.2


class LearnedSpec(Protocol):
    """Codes that can be learned: what is rounded to, before the scale."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype the scales are stored in."""

    @property
    def steps_at_end(self) -> int:
        """The largest code over how far it is from the next one."""

    def nearest(self, places: torch.Tensor) -> torch.Tensor:
        """The nearest codes of values [N, K] in their units, fp32."""

    def step_at(self, codes: torch.Tensor) -> torch.Tensor:
        """How far apart codes are at codes [N, K], of that shape or what broadcasts to it."""

    def coded(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> Codes:
        """The weight of codes [N, K], scales and zero points [N, G]."""


@dataclass(frozen=True)
class Start:
    """Where a layer's search begins.

    Args:
        latent: [N, K] fp32, in the units of codes and before rounding: ``w / scale + zero``.
        step: how far apart codes are there, [N, K] or what broadcasts to it.
        scale: [N, G] in the stored dtype.
        zero: [N, G] int8, or None when symmetric.
        spec: the grid.
        mask: [N, K] bool, False where a weight was pruned and stays zero; None where none was.
    """

    latent: torch.Tensor
    step: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    spec: LearnedSpec
    mask: torch.Tensor | None = None


def start_from(
    weight: torch.Tensor,
    quantized: QuantizedWeight | Float8Weight,
    spec: LearnedSpec,
    mask: torch.Tensor | None = None,
) -> Start:
    """Begin close to given codes, on the side where the weight lies.

    Args:
        weight: [N, K] fp32.
        quantized: codes with their grid, from any method.
        spec: the grid.
        mask: [N, K] bool, False where a weight was pruned.
    """
    zero = quantized.zero if isinstance(quantized, QuantizedWeight) else None
    return start_at(weight, quantized.codes.float(), quantized.scale, spec, zero=zero, mask=mask)


def start_at(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    spec: LearnedSpec,
    *,
    zero: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> Start:
    """The same from codes [N, K] fp32, scales and zero points [N, G]."""
    repeats = weight.shape[1] // scale.shape[1]
    shift = 0.0 if zero is None else zero.float().repeat_interleave(repeats, 1)
    step = spec.step_at(codes)
    places = weight / scale.float().repeat_interleave(repeats, 1) + shift
    latent = torch.clamp(places, codes - _START * step, codes + _START * step)
    return Start(latent, step, scale, zero, spec, mask)


class _Rounded(nn.Module):
    """One layer's learned offset and scale factors."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self.start = start
        self.offset = nn.Parameter(torch.zeros_like(start.latent))
        self.factor = nn.Parameter(torch.zeros_like(start.scale, dtype=torch.float32))

    def forward(self) -> torch.Tensor:
        start = self.start
        n, k = start.latent.shape
        shape = (n, start.scale.shape[1], -1)
        wanted = self.wanted()
        codes = wanted + (start.spec.nearest(wanted) - wanted).detach()
        codes = codes.view(shape)
        if start.zero is not None:
            codes = codes - start.zero.float()[..., None]
        return (codes * self.scale()[..., None]).view(n, k)

    def wanted(self) -> torch.Tensor:
        """[N, K] fp32, what will be rounded: a pruned weight does not move."""
        mask = self.start.mask
        offset = self.offset * self.start.step
        return self.start.latent + (offset if mask is None else offset * mask)

    def scale(self) -> torch.Tensor:
        """[N, G] fp32, holding values of the stored dtype; the gradient ignores that rounding."""
        learned = self.start.scale.float() * (1 + self.factor)
        stored = learned.to(self.start.spec.scale_dtype).float()
        return learned + (stored - learned).detach()

    def result(self) -> Codes:
        spec = self.start.spec
        scale = self.scale().to(spec.scale_dtype)
        return spec.coded(spec.nearest(self.wanted()), scale, self.start.zero)


def learn_rounding(
    block: nn.Module,
    starts: Mapping[str, Start],
    hidden: torch.Tensor,
    target: torch.Tensor,
    call: Call,
    *,
    steps: int = 200,
    batch: int = LEARNED_AT_A_TIME,
    rate: float | None = None,
    seed: int = 0,
) -> dict[str, Codes]:
    """Tune the rounding of a block's layers together.

    Args:
        block: the block, unchanged by this function; other weights stay as they are in it.
        starts: layers to tune, by their name in the block.
        hidden: [B, T, H] the block's inputs, from compressed predecessors.
        target: [B, T, H] the outputs wanted for them.
        call: runs the block on a batch of inputs.
        steps: signed-gradient steps, at most 200 are of use.
        batch: sequences a step.
        rate: first step, in grid steps; ``1 / steps`` when None.
        seed: order of the sequences.

    Returns:
        The codes of the best step on the sequences that judge (a sixteenth of ``hidden``, never
        trained on, at least one of two), the start included: never worse there than the start.

    Raises:
        ValueError: there are fewer than two sequences, or the loss is not finite.
    """
    judges = judging_sequences(len(hidden))
    rounded = {name: _Rounded(start) for name, start in starts.items()}
    error = BlockError(block, rounded, call)
    generator = torch.Generator().manual_seed(seed)
    best_error, best = error.judge(hidden[:judges], target[:judges]), _results(rounded)
    rate = 1 / max(1, steps) if rate is None else rate
    judge_every = max(1, steps // 20)
    for step in range(steps):
        picked = judges + torch.randperm(hidden.shape[0] - judges, generator=generator)[:batch]
        _descend(rounded, error, hidden[picked], target[picked], rate * (1 - step / steps))
        if (step + 1) % judge_every == 0:
            found = error.judge(hidden[:judges], target[:judges])
            if found < best_error:
                best_error, best = found, _results(rounded)
    return best


def _descend(
    rounded: Mapping[str, _Rounded],
    error: BlockError,
    hidden: torch.Tensor,
    target: torch.Tensor,
    step: float,
) -> None:
    """One signed-gradient step on every offset and factor."""
    layers = list(rounded.values())
    with torch.enable_grad():
        parameters = [p for layer in layers for p in (layer.offset, layer.factor)]
        gradients = torch.autograd.grad(error.of(hidden, target), parameters)
    with torch.no_grad():
        for layer, of_offset, of_factor in zip(
            layers, gradients[::2], gradients[1::2], strict=True
        ):
            layer.offset.sub_(of_offset.sign(), alpha=step)
            pace = _SCALE_PACE / layer.start.spec.steps_at_end
            layer.factor.sub_(of_factor.sign(), alpha=pace * step)
            layer.offset.clamp_(-0.5, 0.5)
            layer.factor.clamp_(-_SCALE_RANGE, _SCALE_RANGE)


@torch.no_grad()
def _results(rounded: Mapping[str, _Rounded]) -> dict[str, Codes]:
    return {name: layer.result() for name, layer in rounded.items()}
