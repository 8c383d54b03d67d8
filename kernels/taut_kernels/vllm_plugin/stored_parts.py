"""Loading a vLLM linear layer out of parts that differ in more than their number of rows.

vLLM's own parameters cut one tensor into parts of fixed widths. Factors of other ranks and books of
other lengths do not lie in one rectangle, so each tensor is one flat parameter with a place for
every part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from taut_kernels.formats import layer_description as told

L = TypeVar("L", bound=told.Layer)

_BY_LETTER = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True)
class StoredPart(Generic[L]):
    """One layer of the checkpoint.

    Attributes:
        name: its full name.
        layer: how it is stored.
    """

    name: str
    layer: L


class PartedTensor:
    """One named tensor of every part of a layer.

    Attributes:
        dtype: of all.

    Args:
        layer: vLLM's, which gets a flat parameter of this name to load into.
        name: of the tensor inside a part, such as ``weight_u``.
        parts: names of the parts.
        shapes: of the tensor, one a part.
        dtype: of all.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        name: str,
        parts: list[str],
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self._name, self._parts, self._shapes = name, parts, shapes
        self._loaded: set[int] = set()
        sizes = [math.prod(shape) for shape in shapes]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        flat = torch.nn.Parameter(torch.empty(sum(sizes), dtype=dtype), requires_grad=False)
        flat.weight_loader = self._load  # type: ignore[attr-defined]  # as vLLM's own carry theirs
        layer.register_parameter(name, flat)

    def of_parts(self, layer: torch.nn.Module) -> list[Tensor]:
        """Return the tensor of each part, views of one storage.

        Args:
            layer: the same, loaded.

        Raises:
            ValueError: one was not in the checkpoint.
        """
        for index, part in enumerate(self._parts):
            if index not in self._loaded:
                raise ValueError(f"{part}.{self._name}: is missing from the checkpoint")
        return self._views(getattr(layer, self._name).data)

    def _views(self, flat: Tensor) -> list[Tensor]:
        places = zip(self._starts, self._shapes, strict=True)
        return [flat[start : start + math.prod(shape)].view(shape) for start, shape in places]

    def _load(self, parameter: torch.nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
        index = 0 if shard_id is None else _BY_LETTER.get(shard_id, shard_id)
        if not isinstance(index, int) or index >= len(self._parts):
            raise ValueError(f"{self._parts[0]}.{self._name}: part {shard_id!r} is not described")
        if shard_id is None and len(self._parts) > 1:
            raise ValueError(f"{self._parts[0]}.{self._name}: comes as one, described as parts")
        place = self._views(parameter.data)[index]
        if place.shape != loaded.shape or parameter.dtype.is_floating_point is not (
            loaded.dtype.is_floating_point
        ):
            raise ValueError(
                f"{self._parts[index]}.{self._name}: {loaded.dtype} {tuple(loaded.shape)} is not "
                f"the {tuple(place.shape)} that config.json describes"
            )
        place.copy_(loaded)
        self._loaded.add(index)


def whole_rows(names: list[str], full: tuple[int, int], here: tuple[list[int], int]) -> list[int]:
    """Return the output features of each part, and refuse a layer that tensor parallelism cuts.

    Args:
        names: of the parts.
        full: output and input features of the layer.
        here: output features of each part and input features, as this process has them.

    Raises:
        ValueError: they differ.
    """
    if full != (sum(here[0]), here[1]):
        raise ValueError(
            f"{names[0]}: quant_method taut is served on one device; start with "
            "--tensor-parallel-size 1"
        )
    return here[0] if len(names) > 1 else [full[0]]


class Served:
    """What the record says of a layer, asked as of vLLM's kernel objects.

    Args:
        scheme: of :data:`taut_kernels.formats.layer_description.SERVED`.
    """

    def __init__(self, scheme: str) -> None:
        self.taut_scheme = scheme
        self._beside = ""

    def beside(self, kernel: object) -> None:
        """Name the kernel that does the other part of the layer's work."""
        self._beside = f"{type(kernel).__name__} + "

    def taut_record(self) -> tuple[str, str]:
        """Return the kernel's name, and why it is no (or not only a) kernel of ours."""
        name, reason = told.SERVED[self.taut_scheme]
        return self._beside + name, reason
