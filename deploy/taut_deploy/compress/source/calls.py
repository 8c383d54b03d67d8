"""How a model calls its decoder blocks, recorded from its own forward.

In place of every block a recorder keeps what it is called with and hands the hidden states on. What
the blocks are handed besides may be as long as the batch (ALiBi of some families, masks); it is
kept as :class:`PerRow` and fitted to the batch of each later call.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# A call's keyword arguments other than the hidden states, one mapping per decoder block.
BlockArguments = list[dict[str, Any]]


@dataclass(frozen=True)
class PerRow:
    """A tensor with one part per row of the batch, alike for all rows.

    Attributes:
        tensor: of a batch of one row.
        dim: dimension that grows with the batch.
    """

    tensor: torch.Tensor
    dim: int

    def to(self, device: torch.device) -> "PerRow":
        """The same on a device."""
        return PerRow(self.tensor.to(device), self.dim)

    def for_rows(self, rows: int) -> torch.Tensor:
        """The tensor as a batch of ``rows`` would have it."""
        shape = (rows if dim == self.dim else 1 for dim in range(self.tensor.ndim))
        return self.tensor.repeat(*shape)


class Recorder(nn.Module):
    """Stands in for a decoder block: keeps its call and passes hidden states through.

    Args:
        block: the block it stands for, asked for its attributes and its arguments' names.
        as_tuple: hand on a tuple of two, as blocks of some families do.
    """

    def __init__(self, block: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        self._of = (block,)  # in a tuple, so that it does not become a part of this module
        self._as_tuple = as_tuple
        self.hidden: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}
        self.leaves: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the call; the first argument is the hidden states [B, T, H]."""
        signature = inspect.signature(self._of[0].forward)
        named = dict(signature.bind(*args, **kwargs).arguments)
        self.hidden = named.pop(next(iter(signature.parameters)))
        self.arguments = {}
        for parameter in signature.parameters.values():  # **kwargs, whatever its name
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self.arguments |= named.pop(parameter.name, {})
        self.arguments |= named
        hidden = self.leaves(self.hidden)
        return (hidden, None) if self._as_tuple else hidden

    def __getattr__(self, name: str) -> Any:
        # Some models read attributes such as ``attention_type`` off the block before calling it.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._of[0], name)


def call_block(module: nn.Module, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """Run one decoder block; some return several things, the hidden state first.

    Args:
        module: the block.
        hidden: [B, T, H].
        arguments: as recorded, for a batch of any size.
    """
    fitted = {name: _fit(value, hidden.shape[0]) for name, value in arguments.items()}
    out = module(hidden, **fitted)
    result: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
    return result


def _fit(value: Any, rows: int) -> Any:
    if isinstance(value, PerRow):
        return value.for_rows(rows)
    if isinstance(value, tuple):
        return tuple(_fit(part, rows) for part in value)
    return value


def per_row(one: BlockArguments, two: BlockArguments) -> BlockArguments:
    """Mark what grows with the batch.

    Args:
        one: as recorded with one row.
        two: as recorded with that row twice.
    """
    return [
        {name: _marked(value, second[name]) for name, value in first.items()}
        for first, second in zip(one, two, strict=True)
    ]


def _marked(one: Any, two: Any) -> Any:
    if isinstance(one, tuple):
        return tuple(_marked(*parts) for parts in zip(one, two, strict=True))
    if not isinstance(one, torch.Tensor) or one.shape == two.shape:
        return one
    grown = [dim for dim in range(one.ndim) if one.shape[dim] != two.shape[dim]]
    return PerRow(one, grown[0])


def why_not_replayed(one: BlockArguments, other: BlockArguments) -> str | None:
    """Say what keeps recorded arguments from serving other texts; None where nothing does.

    Args:
        one: as recorded with one text.
        other: with another one of the same length.
    """
    for first, second in zip(one, other, strict=True):
        for name, value in first.items():
            if isinstance(value, (dict, list)):
                return f"its blocks share state by '{name}'"
            if not _same(value, second.get(name)):
                return f"'{name}' of its blocks depends on the text"
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(_same(*parts) for parts in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return True
