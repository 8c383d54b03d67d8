"""Codebook layers in vLLM: dequantised once, at load, then a dense product as of any layer.

The checkpoint is small, the memory of the worker is not; log, record and gauge say so. Holds no
arithmetic of its own. This module imports vLLM.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from taut_kernels.formats import codebook
from taut_kernels.formats.layer_description import Codebook
from taut_kernels.vllm_plugin import known_answer
from taut_kernels.vllm_plugin.parted_method import PartedLinearMethod, Wanted
from taut_kernels.vllm_plugin.stored_parts import PartedTensor, StoredPart

_TOKENS = (1, 16, 64)


class TautCodebookLinearMethod(PartedLinearMethod[Codebook]):
    """Indices, scales and books."""

    def __init__(self, parts: list[StoredPart[Codebook]]) -> None:
        super().__init__(parts)
        self._dense = UnquantizedLinearMethod()

    def _create(self, layer: torch.nn.Module, wanted: Wanted) -> None:
        rows, k, dtype, _ = wanted
        sized = [(n, part.layer) for n, part in zip(rows, self._parts, strict=True)]

        def parted(name: str, shapes: list[tuple[int, ...]], kind: torch.dtype) -> PartedTensor:
            return PartedTensor(layer, name, self._names, shapes, kind)

        packed: list[tuple[int, ...]] = [(n, k * one.bits // 8) for n, one in sized]
        scales: list[tuple[int, ...]] = [(n, k // (one.group_size or k)) for n, one in sized]
        books: list[tuple[int, ...]] = [(n // (one.rows or n), one.entries) for n, one in sized]
        self._packed = parted("weight_packed", packed, torch.uint8)
        self._scale = parted("weight_scale", scales, dtype)
        self._book = parted("weight_codebook", books, dtype)
        self._shape = parted("weight_shape", [(2,)] * len(sized), torch.int64)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Dequantise to the dtype of the model, and check the product."""
        self._shape.of_parts(layer)
        stored = zip(
            self._parts,
            self._packed.of_parts(layer),
            self._scale.of_parts(layer),
            self._book.of_parts(layer),
            strict=True,
        )
        exact = torch.cat(
            [
                codebook.dequantise(codebook.unpack_codes(packed, part.layer.bits), scale, book)
                for part, packed, scale, book in stored
            ]
        )
        dtype = self._scale.dtype
        for name in ("weight_packed", "weight_scale", "weight_codebook", "weight_shape"):
            delattr(layer, name)
        layer.weight = torch.nn.Parameter(exact.to(dtype), requires_grad=False)
        self._dense.process_weights_after_loading(layer)
        n, k = exact.shape
        known_answer.check(
            type(self).__name__,
            f"{self.kernel.taut_scheme} dequantised",
            (n, k),
            _TOKENS,
            lambda x: self.apply(layer, x),
            lambda rows: exact[rows],
            known_answer.plain_block(k),
            dtype,
            exact.device,
        )

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer; x is [..., K], the result [..., N]."""
        y: Tensor = self._dense.apply(layer, x, bias)
        return y
