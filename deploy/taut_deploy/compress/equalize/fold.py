"""Where factors of an input can be folded: the norm, the value or the up projection in front.

The maths is in :mod:`taut_deploy.compress.equalize.smoothquant` and
:mod:`taut_deploy.compress.equalize.awq`; this module finds the producer of an input and scales it
down, so that the block's function does not change.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from taut_deploy.compress.calibrate.observe import InputGroup

Tie = Callable[[torch.Tensor], torch.Tensor]

# Inputs that are no module's direct output: (consumer's last name, producer's last name). The
# product silu(gate) * up is linear in up; attention is linear in v.
_LINEAR_PRODUCERS = {"down_proj": "up_proj", "o_proj": "v_proj"}


@dataclass(frozen=True)
class Fold:
    """A place that can absorb ``1 / s``.

    Args:
        apply: divides the producer's output channels by ``s`` [K]; returns the factors that were
            really applied, which differ from those asked for by the rounding of the producer's
            stored dtype.
        tie: makes ``s`` equal on channels the producer cannot tell apart.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    tie: Tie


def find_fold(block: nn.Module, group: InputGroup) -> Fold | None:
    """The producer able to absorb this group's factors, or None.

    None too where something else reads what the producer gives: it would see the factors.
    """
    if group.read_elsewhere:
        return None
    if group.producer is not None:
        return _norm_fold(block.get_submodule(group.producer))
    parent, _, leaf = group.layers[0].rpartition(".")
    producer_leaf = _LINEAR_PRODUCERS.get(leaf)
    if producer_leaf is None or len(group.layers) != 1:
        return None
    modules = dict(block.named_modules())
    producer = modules.get(f"{parent}.{producer_leaf}")
    if not isinstance(producer, nn.Linear):
        return None
    if leaf == "down_proj" and f"{parent}.gate_proj" not in modules:
        return None  # no gate: the activation sits between up and down (relu² for one)
    return _linear_fold(producer, group.absmax.shape[0], block, parent)


def _norm_fold(norm: nn.Module) -> Fold | None:
    weight = getattr(norm, "weight", None)
    if (
        not isinstance(weight, torch.Tensor)
        or weight.ndim != 1
        or getattr(norm, "bias", None) is not None
    ):
        return None
    offset = weight_offset(norm, weight)
    if offset is None:
        return None

    def divide(scales: torch.Tensor) -> torch.Tensor:
        before = weight.data.float() + offset
        weight.data = (before / scales - offset).to(weight.dtype)
        after = weight.data.float() + offset
        return torch.where(after != 0, before / after, scales)

    return Fold(divide, lambda scales: scales)


def weight_offset(norm: nn.Module, weight: torch.Tensor) -> float | None:
    """0 for norms that multiply by ``w``, 1 for ``1 + w``; asked of the module itself."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator).to(weight)
    original = weight.data
    try:
        weight.data = torch.zeros_like(original)
        at_zero = norm(x).float()
        weight.data = torch.ones_like(original)
        at_one = norm(x).float()
    finally:
        weight.data = original
    if at_zero.abs().max() == 0:
        return 0.0
    return 1.0 if torch.allclose(at_one, 2 * at_zero, rtol=2e-2, atol=1e-3) else None


def _linear_fold(producer: nn.Linear, k: int, block: nn.Module, parent: str) -> Fold | None:
    """Fold into a linear's output channels; grouped-query heads share theirs."""
    channels = producer.out_features
    if channels == k:
        repeats = 1
        head_dim = k
    else:
        head_dim = int(getattr(block.get_submodule(parent), "head_dim", 0))
        if not head_dim or channels % head_dim or k % channels:
            return None
        repeats = k // channels

    def tie(scales: torch.Tensor) -> torch.Tensor:
        if repeats == 1:
            return scales
        heads = scales.view(-1, repeats, head_dim)
        return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)

    def divide(scales: torch.Tensor) -> torch.Tensor:
        own = scales if repeats == 1 else scales.view(-1, repeats, head_dim)[:, 0].reshape(-1)
        # Kept in fp32: the producer is a linear layer that will be quantised from here without
        # another rounding.
        producer.weight.data = producer.weight.data.float() / own[:, None]
        if producer.bias is not None:
            producer.bias.data = producer.bias.data.float() / own
        return scales

    return Fold(divide, tie)
