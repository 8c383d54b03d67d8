"""Which stored tensor fills which place of the skeleton, and what a place is called in a file.

Checkpoints keep the names they were published under; transformers renames some when it loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from taut_deploy.compress.source.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the skeleton comes from.

    Attributes:
        stored: name of the stored tensor.
        entry: entry of its outermost dimension, None for all of it.
        half: 0 or 1 for that half of its wide dimension, None for all.
        turned: whether the skeleton holds it transposed.
    """

    stored: str
    entry: int | None = None
    half: int | None = None
    turned: bool = False

    def read(self, reader: WeightReader) -> torch.Tensor:
        """The tensor as the skeleton holds it, in its stored dtype."""
        tensor = reader.read(self.stored, self.entry)
        tensor = tensor.T if self.turned else tensor
        if self.half is not None:
            tensor = tensor.chunk(2, 0)[self.half]
        return tensor.contiguous()

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The skeleton's shape for a stored one."""
        shape = stored if self.entry is None else stored[1:]
        shape = shape[::-1] if self.turned else shape
        return shape if self.half is None else (shape[0] // 2, *shape[1:])

    def unshaped(self, shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[int, ...]:
        """The stored shape that the skeleton's would need."""
        if self.half is not None:
            shape = (2 * shape[0], *shape[1:])
        shape = shape[::-1] if self.turned else shape
        return shape if self.entry is None else (stored[0], *shape)


def renamed(model: Any, stored: Mapping[str, Any], conversions: list[Any]) -> dict[str, str]:
    """The name transformers gives each stored tensor, before it stacks any.

    Args:
        model: the skeleton, experts still stacked.
        stored: by stored name.
        conversions: of the model, by transformers.
    """
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    kept = model.state_dict()
    prefix = model.base_model_prefix
    names = {}
    for name in stored:
        new, _ = rename_source_key(name, renamings, [], prefix, kept)
        names[name] = new if new in kept else _with_prefix(new, prefix, kept)
    return names


def _with_prefix(name: str, prefix: str, kept: Mapping[str, Any]) -> str:
    """Put the prefix of the base model in front of an expert's name where its siblings have it."""
    root = name.partition(".experts.")[0]
    if root != name and any(key.startswith(f"{prefix}.{root}.") for key in kept):
        return f"{prefix}.{name}"
    return name
