"""FP8 weights with one scale for a whole weight, inputs with one that is fixed beforehand.

What compressed-tensors' ``float-quantized`` calls the strategy ``tensor``, and many publish as FP8.
"""

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs

from taut_deploy.compress.formats.float8 import Float8Format
from taut_deploy.compress.quantize.float8 import Float8Weight


@dataclass(frozen=True, eq=False)
class Float8TensorFormat(Float8Format):
    """FP8 (e4m3) with one scale; layers that an engine joins share it."""

    @property
    def why_no_expert(self) -> str:
        """An engine rounds the inputs of all experts by the largest of their scales."""
        return "vLLM rounds the inputs of all experts by one scale"

    def pack(self, codes: Float8Weight) -> dict[str, torch.Tensor]:
        """Codes as they are, the scale [1]."""
        return {"weight": codes.codes, "weight_scale": codes.scale.reshape(1)}

    def unpack(self, tensors: dict[str, torch.Tensor]) -> Float8Weight:
        """Inverse of :meth:`pack`."""
        return Float8Weight(tensors["weight"], tensors["weight_scale"].reshape(1, 1))

    @property
    def weight_arguments(self) -> QuantizationArgs:
        """``weights`` of a config group."""
        return QuantizationArgs(
            num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False
        )

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""
        return n * k + self.spec.scale_dtype.itemsize
