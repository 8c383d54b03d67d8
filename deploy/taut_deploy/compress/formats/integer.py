"""Integer weights: packed into int32 words, or int8 as they are.

Tensor names and packing are compressed-tensors': ``pack-quantized`` packs ``32 // bits`` codes into
an int32 along K, and zero points along N; ``int-quantized`` stores int8 codes.
"""

from dataclasses import dataclass

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from taut_deploy.compress.formats.activations import Activations
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize.grid import GridSpec, QuantizedWeight


@dataclass(frozen=True, eq=False)
class IntegerFormat(WeightFormat):
    """Integers of 2 to 8 bits.

    Args:
        name: the scheme.
        spec: the grid.
        activations: how inputs are rounded.
    """

    name: str
    spec: GridSpec
    activations: Activations

    layout = "int-quantized"

    @property
    def bits(self) -> int:
        """Per weight, scales not counted."""
        return self.spec.num_bits

    @property
    def group_size(self) -> int | None:
        """Weights a scale covers along K, None for all."""
        return self.spec.group_size

    @property
    def symmetric(self) -> bool:
        """Whether there are no zero points."""
        return self.spec.symmetric

    def pack(self, codes: QuantizedWeight) -> dict[str, torch.Tensor]:
        """Codes as they are."""
        return {"weight": codes.codes, "weight_scale": codes.scale}

    def unpack(self, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        """Inverse of :meth:`pack`."""
        return QuantizedWeight(tensors["weight"], tensors["weight_scale"], None)

    def scheme(self, targets: list[str]) -> QuantizationScheme:
        """The config group of layers in this format."""
        per_group = self.spec.group_size is not None
        weights = QuantizationArgs(
            num_bits=self.spec.num_bits,
            type="int",
            symmetric=self.spec.symmetric,
            strategy="group" if per_group else "channel",
            group_size=self.spec.group_size,
            dynamic=False,
        )
        return QuantizationScheme(
            targets=targets,
            weights=weights,
            input_activations=self.activations.arguments,
            format=self.layout,
        )

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""
        return n * k + self._groups(n, k) * self.spec.scale_dtype.itemsize

    def _groups(self, n: int, k: int) -> int:
        return n * (k // (self.spec.group_size or k))


class PackedIntegerFormat(IntegerFormat):
    """Integers packed into int32 words."""

    layout = "pack-quantized"

    def pack(self, codes: QuantizedWeight) -> dict[str, torch.Tensor]:
        """Packed codes, scales, the shape, and packed zero points where there are any."""
        bits = self.spec.num_bits
        tensors = {
            "weight_packed": pack_to_int32(codes.codes, num_bits=bits),
            "weight_scale": codes.scale,
            "weight_shape": torch.tensor(codes.codes.shape, dtype=torch.int64),
        }
        if codes.zero is not None:
            tensors["weight_zero_point"] = pack_to_int32(codes.zero, num_bits=bits, packed_dim=0)
        return tensors

    def unpack(self, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        """Inverse of :meth:`pack`, through the library's own unpacking."""
        bits, scale = self.spec.num_bits, tensors["weight_scale"]
        shape = torch.Size(tensors["weight_shape"].tolist())
        codes = unpack_from_int32(tensors["weight_packed"], bits, shape)
        zero = tensors.get("weight_zero_point")
        if zero is not None:
            zero = unpack_from_int32(zero, bits, torch.Size(scale.shape), packed_dim=0)
        return QuantizedWeight(codes, scale, zero)

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""
        in_word = 32 // self.spec.num_bits
        groups = self._groups(n, k)
        zeros = 0 if self.spec.symmetric else 4 * -(-n // in_word) * (groups // n)
        packed = 4 * n * -(-k // in_word)
        return packed + groups * self.spec.scale_dtype.itemsize + zeros + 16
