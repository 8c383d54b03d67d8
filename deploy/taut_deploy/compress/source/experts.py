"""Experts that transformers stacks in 3-D tensors, taken apart into one linear layer per matrix.

Checkpoints store most experts one by one and servers load them so; transformers stacks them when it
loads. In the skeleton every expert is a module of ``nn.Linear`` under the checkpoint's names, so
that each matrix has its own statistics, tokens and error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_STACKED = "gate_up_proj"
_DOWN = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the three matrices of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class LinearExpert(nn.Module):
    """One expert: two projections, their gated product, and the way down.

    Args:
        sizes: hidden and intermediate width.
        names: of the three linear layers.
        stacked: the module it was part of, whose activation it uses.
        dtype: of the weights, which are on the meta device.
    """

    def __init__(
        self, sizes: tuple[int, int], names: ExpertNames, stacked: nn.Module, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden, inner = sizes
        self._names = names
        self._stacked = (stacked,)  # in a tuple, so that its weights are not this module's
        for name, width, out in (
            (names.gate, hidden, inner),
            (names.up, hidden, inner),
            (names.down, inner, hidden),
        ):
            linear = nn.Linear(width, out, bias=False, device="meta", dtype=dtype)
            self.add_module(name, linear)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] to [T, H]."""
        gate = self.get_submodule(self._names.gate)(hidden)
        up = self.get_submodule(self._names.up)(hidden)
        stacked: Any = self._stacked[0]
        if hasattr(stacked, "_apply_gate"):
            inner = stacked._apply_gate(torch.cat([gate, up], -1))
        else:
            inner = stacked.act_fn(gate) * up
        out: torch.Tensor = self.get_submodule(self._names.down)(inner)
        return out


class LinearExperts(nn.Module):
    """A set of experts, each a child named by its number.

    Args:
        stacked: the module of stacked tensors it stands for, on the meta device.
        names: of the linear layers of one expert.

    Attributes:
        num_experts: how many.
        seeing_all: experts that are run on every token, whatever the routing; the result is that
            of the routing all the same.
    """

    def __init__(self, stacked: nn.Module, names: ExpertNames) -> None:
        super().__init__()
        down = stacked.get_parameter(_DOWN)
        hidden, inner = down.shape[1:]
        if is_transposed(stacked):
            hidden, inner = inner, hidden
        self.num_experts = down.shape[0]
        self.seeing_all: frozenset[int] = frozenset()
        for index in range(self.num_experts):
            expert = LinearExpert((hidden, inner), names, stacked, down.dtype)
            self.add_module(str(index), expert)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the experts.

        Args:
            hidden_states: [T, H]; without routing [E * T, H], sorted by expert and weighted.
            top_k_index: [T, K] numbers of experts.
            top_k_weights: [T, K].

        Returns:
            [T, H], or [E * T, H] without routing.
        """
        if top_k_index is None or top_k_weights is None:
            parts = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
            return torch.cat([self._expert(i)(part) for i, part in enumerate(parts.unbind())])
        result = torch.zeros_like(hidden_states)
        for index in range(self.num_experts):
            token, slot = torch.where(top_k_index == index)
            if index in self.seeing_all:
                # A copy, so that no two experts are seen to read the very same tensor.
                out = self._expert(index)(hidden_states.clone())[token]
            elif token.numel():
                out = self._expert(index)(hidden_states[token])
            else:
                continue
            weighted = out * top_k_weights[token, slot, None]
            result.index_add_(0, token, weighted.to(result.dtype))
        return result

    def _expert(self, index: int) -> nn.Module:
        return self.get_submodule(str(index))


def stacked_experts(block: nn.Module) -> dict[str, nn.Module]:
    """Modules of a block that hold gated experts in 3-D tensors without biases, by name."""
    return {
        name: module
        for name, module in block.named_modules()
        if {_STACKED, _DOWN}
        == {key for key, value in module._parameters.items() if value is not None}
        and all(module.get_parameter(key).ndim == 3 for key in (_STACKED, _DOWN))
    }


def is_transposed(stacked: nn.Module) -> bool:
    """Whether stacked weights are [E, K, N] and not [E, N, K]."""
    wide, down = stacked.get_parameter(_STACKED), stacked.get_parameter(_DOWN)
    if wide.shape[1] == 2 * down.shape[2] and wide.shape[2] == down.shape[1]:
        # Both hold where the hidden width is twice the intermediate one: then the module says.
        if wide.shape[2] == 2 * down.shape[1] and wide.shape[1] == down.shape[2]:
            return bool(getattr(stacked, "is_transposed", False))
        return False
    return True


def names_in_checkpoint(conversions: list[Any]) -> ExpertNames | None:
    """What checkpoints of a model call an expert's matrices, by transformers' own conversions.

    Args:
        conversions: of the model; those into stacked tensors name what they are stacked from.
    """
    leaves: Mapping[str, list[str]] = {
        target.rpartition(".")[2]: [source.split("*.")[-1] for source in conversion.source_patterns]
        for conversion in conversions
        for target in conversion.target_patterns
        if "experts" in target
    }
    wide, down = leaves.get(_STACKED, []), leaves.get(_DOWN, [])
    if len(wide) != 2 or len(down) != 1:
        return None
    gate, up, last = (leaf.removesuffix("$").removesuffix(".weight") for leaf in (*wide, *down))
    return ExpertNames(gate, up, last)
