"""Indices of 2 to 4 bits into books of values: packed indices, scales of groups, books."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from taut_deploy.compress.formats.protocol import TautFormat
from taut_deploy.compress.formats.registry import dividing_group_size
from taut_deploy.compress.share.codebook import CodebookSpec, CodebookWeight
from taut_deploy.recipe.stages import Palettize

if TYPE_CHECKING:
    from taut_kernels.for_deploy import layer_description


@dataclass(frozen=True)
class CodebookFormat(TautFormat):
    """Codes packed without gaps, a scale for each group, a book for each block of rows.

    Args:
        spec: shape of the books.
    """

    spec: CodebookSpec

    @property
    def name(self) -> str:  # type: ignore[override]
        """The scheme."""
        return f"CODEBOOK{self.spec.entries}"

    @property
    def bits(self) -> int:
        """Of an index."""
        return self.spec.entries.bit_length() - 1

    @property
    def group_size(self) -> int | None:
        """Weights a scale covers along K, None for all."""
        return self.spec.group_size

    @property
    def symmetric(self) -> bool:
        """Books have no zero points."""
        return True

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""
        element = self.spec.stored_dtype.itemsize
        scales = n * (k // (self.spec.group_size or k))
        entries = n // (self.spec.rows or n) * self.spec.entries
        return n * k * self.bits // 8 + (scales + entries) * element + 16

    def why_not(self, n: int, k: int) -> str | None:
        """Why a layer [N, K] cannot have this format; None if it can."""
        try:
            self.spec.require_fit(n, k)
        except ValueError as error:
            return str(error)
        if k * self.bits % 8:
            return f"its rows of {k} indices of {self.bits} bits are not whole bytes"
        return None

    def describe(self, n: int, k: int) -> "layer_description.Codebook":
        """What ``quantization_config`` says of a layer [N, K]."""
        del n, k
        from taut_kernels.for_deploy import layer_description as told

        return told.Codebook(self.spec.entries, self.spec.group_size, self.spec.rows)


@dataclass(frozen=True)
class StoredCodebook:
    """A palettised layer as the checkpoint holds it.

    Args:
        format: of the layer.
        coded: indices, scales and books.
    """

    format: CodebookFormat
    coded: CodebookWeight

    def dequantize(self) -> torch.Tensor:
        """The weight it stands for, [N, K] fp32."""
        return self.coded.dequantize()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written, by name inside the layer."""
        from taut_kernels.for_deploy import codebook

        return {
            "weight_packed": codebook.pack_codes(self.coded.codes, self.format.bits),
            "weight_scale": self.coded.scale,
            "weight_codebook": self.coded.book,
            "weight_shape": torch.tensor(self.coded.codes.shape, dtype=torch.int64),
        }

    def reads_back(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether written tensors stand for this weight, through the loaders' code."""
        from taut_kernels.for_deploy import codebook

        codes = codebook.unpack_codes(tensors["weight_packed"], self.format.bits)
        read = codebook.dequantise(codes, tensors["weight_scale"], tensors["weight_codebook"])
        return torch.equal(read, self.dequantize())

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """The input as it is."""
        return x


def codebook_format(
    stage: Palettize, input_sizes: Collection[int], dtype: torch.dtype
) -> CodebookFormat:
    """The format a stage asks for, as :func:`.registry.weight_format` chooses it.

    Raises:
        RecipeError: no allowed group size divides every K.
    """
    group = dividing_group_size(stage.method, stage.group_size, input_sizes)
    return CodebookFormat(CodebookSpec(stage.entries, group, stage.rows, dtype))
