"""FP4 weights as compressed-tensors packs them: two in a byte, the first in its low half."""

from dataclasses import dataclass

import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from taut_deploy.compress.formats.activations import Activations
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize.float4 import Float4Spec, Float4Weight

# By twice the magnitude; what is no number of the format is never asked for.
_CODE_OF_HALVES = (0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7)
_SIGN = 8


@dataclass(frozen=True, eq=False)
class Float4Format(WeightFormat):
    """FP4 (e2m1) in groups, inputs in 16 bits.

    Args:
        name: the scheme.
        spec: the grid, which says whether it is NVFP4 or MXFP4.
        activations: how inputs are rounded.
    """

    name: str
    spec: Float4Spec
    activations: Activations

    @property
    def bits(self) -> int:
        """Per weight, scales not counted."""
        return 4

    @property
    def group_size(self) -> int:
        """Weights a scale covers along K."""
        return self.spec.group_size

    @property
    def symmetric(self) -> bool:
        """Floats have no zero points."""
        return True

    def pack(self, codes: Float4Weight) -> dict[str, torch.Tensor]:
        """Packed codes, scales, and the global scale where there is one."""
        table = torch.tensor(_CODE_OF_HALVES, dtype=torch.uint8, device=codes.halves.device)
        bits = table[codes.halves.abs().int()] + _SIGN * (codes.halves < 0).to(torch.uint8)
        tensors = {
            "weight_packed": bits[:, 0::2] | (bits[:, 1::2] << 4),
            "weight_scale": codes.scale,
        }
        if codes.global_scale is not None:
            tensors["weight_global_scale"] = codes.global_scale
        return tensors

    def unpack(self, tensors: dict[str, torch.Tensor]) -> Float4Weight:
        """Inverse of :meth:`pack`, through the library's own unpacking."""
        packed = tensors["weight_packed"]
        values = unpack_fp4_from_uint8(
            packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32
        )
        return Float4Weight(
            values.mul_(2.0).to(torch.int8),
            tensors["weight_scale"],
            tensors.get("weight_global_scale"),
        )

    def scheme(self, targets: list[str]) -> QuantizationScheme:
        """The config group of layers in this format."""
        microscaling = self.spec.powers_of_two
        stored = torch.uint8 if microscaling else torch.float8_e4m3fn
        weights = QuantizationArgs(
            num_bits=4,
            type="float",
            symmetric=True,
            strategy="group" if microscaling else "tensor_group",
            group_size=self.group_size,
            dynamic=False,
            scale_dtype=stored,
            zp_dtype=stored,
        )
        return QuantizationScheme(
            targets=targets,
            weights=weights,
            input_activations=self.activations.arguments,
            format="mxfp4-pack-quantized" if microscaling else "nvfp4-pack-quantized",
        )

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""
        return n * k // 2 + n * (k // self.group_size) + (0 if self.spec.powers_of_two else 4)
