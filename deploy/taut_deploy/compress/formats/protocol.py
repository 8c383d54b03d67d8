"""The one face of a layer format: what it takes, and what is stored.

Stages and the driver know a format by this alone; which one serves a scheme is decided in
:mod:`taut_deploy.compress.formats.registry`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from compressed_tensors.quantization import QuantizationScheme

from taut_deploy.compress.formats.activations import Activations
from taut_deploy.compress.quantize.protocol import Codes, Spec


class StoredLayer(Protocol):
    """A layer as the checkpoint will hold it."""

    def dequantize(self) -> torch.Tensor:
        """The weight it stands for, [N, K] fp32."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written, by name inside the layer."""

    def reads_back(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the reader's own code makes this layer of written tensors."""

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """An input [..., K] as the engine rounds it before the product; the same where it does not.

        Args:
            x: any float dtype, which the result has too.
        """


class LayerFormat(ABC):
    """What a layer is stored in, as far as plan, report and block need to know.

    Attributes:
        name: the scheme.
    """

    name: str

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a stored number, scales not counted."""

    @property
    @abstractmethod
    def group_size(self) -> int | None:
        """Weights a scale covers along K, None where it is no group."""

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """Whether there are no zero points."""

    @abstractmethod
    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""

    def joined_as(self) -> object:
        """What must be equal of layers that vLLM joins into one."""
        return self

    def why_not(self, n: int, k: int) -> str | None:
        """Why a layer [N, K] cannot have this format; None if it can."""
        if self.group_size is not None and k % self.group_size:
            return f"groups of {self.group_size} do not divide its input of {k}"
        return None


class WeightFormat(LayerFormat):
    """How compressed-tensors stores one linear layer under a scheme, and how it is computed.

    Attributes:
        spec: the shape of the grid.
        activations: how inputs are rounded.
    """

    spec: Spec[Any]
    activations: Activations

    @property
    def why_no_expert(self) -> str | None:
        """Why an engine would compute one of many experts otherwise; None where it does not."""
        return None

    @abstractmethod
    def pack(self, codes: Any) -> dict[str, torch.Tensor]:
        """The tensors of one layer's codes, by name inside the layer."""

    @abstractmethod
    def unpack(self, tensors: dict[str, torch.Tensor]) -> Codes:
        """Inverse of :meth:`pack`, through the library's own unpacking."""

    @abstractmethod
    def scheme(self, targets: list[str]) -> QuantizationScheme:
        """The config group of layers in this format."""

    def store(self, codes: Codes, input_absmax: torch.Tensor) -> "StoredCodes":
        """One layer in this format.

        Args:
            codes: of its weight.
            input_absmax: [K] largest input seen per channel, for scales fixed beforehand.
        """
        return StoredCodes(self, codes, self.activations.scale(input_absmax))

    def __eq__(self, other: object) -> bool:
        """Whether two layers in these formats are described by one config group."""
        return isinstance(other, WeightFormat) and self.scheme([]) == other.scheme([])

    def __hash__(self) -> int:
        """By name: equal formats have equal names."""
        return hash(self.name)


class TautFormat(LayerFormat):
    """How a checkpoint of ``quant_method: "taut"`` stores one linear layer."""

    @abstractmethod
    def describe(self, n: int, k: int) -> Any:
        """What ``quantization_config`` says of a layer [N, K], as the loaders describe it."""


@dataclass(frozen=True)
class StoredCodes:
    """Codes in a format.

    Args:
        format: of the layer.
        codes: of its weight.
        input_scale: of its inputs where fixed beforehand, else None.
    """

    format: WeightFormat
    codes: Codes
    input_scale: torch.Tensor | None

    def dequantize(self) -> torch.Tensor:
        """The weight it stands for, [N, K] fp32."""
        return self.codes.dequantize()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written, by name inside the layer."""
        packed = self.format.pack(self.codes)
        return packed if self.input_scale is None else {**packed, "input_scale": self.input_scale}

    def reads_back(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the codes and scales of written tensors are these."""
        # Not what they stand for: that takes many times as long.
        return _same(self.format.unpack(tensors), self.codes)

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """An input as the engine rounds it."""
        return self.format.activations.round(x, self.input_scale)


@dataclass(frozen=True)
class DenseLayer:
    """A pruned layer kept as it is, its zeros written out.

    Args:
        weight: [N, K] in the dtype it is stored in.
    """

    weight: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The weight, [N, K] fp32."""
        return self.weight.float()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written, by name inside the layer."""
        return {"weight": self.weight}

    def reads_back(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the written weight is this one."""
        return torch.equal(tensors["weight"], self.weight)

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """The input as it is."""
        return x


def _same(found: Any, wanted: Any) -> bool:
    """Whether two weights of one kind hold the same tensors."""
    return type(found) is type(wanted) and all(
        _equal(getattr(found, one.name), getattr(wanted, one.name)) for one in fields(wanted)
    )


def _equal(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if found is None or wanted is None or found is wanted:
        return found is wanted
    if found.dtype != wanted.dtype:
        return False
    if found.itemsize == 1:  # torch compares no fp8
        found, wanted = found.view(torch.uint8), wanted.view(torch.uint8)
    return torch.equal(found, wanted)
