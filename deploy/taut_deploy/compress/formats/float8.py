"""FP8 weights as compressed-tensors stores them: ``float-quantized``, one scale per channel."""

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from taut_deploy.compress.formats.activations import Activations
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize.float8 import Float8Spec, Float8Weight


@dataclass(frozen=True, eq=False)
class Float8Format(WeightFormat):
    """FP8 (e4m3) with one scale per output channel.

    Args:
        name: the scheme.
        spec: the grid.
        activations: how inputs are rounded.
    """

    name: str
    spec: Float8Spec
    activations: Activations

    @property
    def bits(self) -> int:
        """Per weight, scales not counted."""
        return 8

    @property
    def group_size(self) -> int | None:
        """No groups."""
        return None

    @property
    def symmetric(self) -> bool:
        """Floats have no zero points."""
        return True

    def pack(self, codes: Float8Weight) -> dict[str, torch.Tensor]:
        """Codes as they are."""
        return {"weight": codes.codes, "weight_scale": codes.scale}

    def unpack(self, tensors: dict[str, torch.Tensor]) -> Float8Weight:
        """Inverse of :meth:`pack`."""
        return Float8Weight(tensors["weight"], tensors["weight_scale"])

    @property
    def weight_arguments(self) -> QuantizationArgs:
        """``weights`` of a config group."""
        return QuantizationArgs(
            num_bits=8, type="float", symmetric=True, strategy="channel", dynamic=False
        )

    def scheme(self, targets: list[str]) -> QuantizationScheme:
        """The config group of layers in this format."""
        return QuantizationScheme(
            targets=targets,
            weights=self.weight_arguments,
            input_activations=self.activations.arguments,
            format="float-quantized",
        )

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""
        return n * k + n * self.spec.scale_dtype.itemsize
