"""A linear layer of vLLM's whose parts are stored one by one. This module imports vLLM."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, NamedTuple

import torch
from vllm.model_executor.layers.linear import LinearMethodBase

from taut_kernels.vllm_plugin.stored_parts import L, Served, StoredPart, whole_rows


class Wanted(NamedTuple):
    """What parameters are to be made for.

    Attributes:
        rows: output features of each part.
        k: input features.
        dtype: of the model.
        attributes: vLLM's, for parameters of its own.
    """

    rows: list[int]
    k: int
    dtype: torch.dtype
    attributes: dict[str, Any]


class PartedLinearMethod(LinearMethodBase, Generic[L]):  # type: ignore[misc]
    """One layer of the checkpoint, or several that vLLM joins.

    Args:
        parts: what the layer is made of, in vLLM's order.
    """

    def __init__(self, parts: list[StoredPart[L]]) -> None:
        self._parts = parts
        self._names = [part.name for part in parts]
        self.kernel = Served(parts[0].layer.scheme)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the parameters that the checkpoint's tensors are loaded into."""
        here = (output_partition_sizes, input_size_per_partition)
        rows = whole_rows(self._names, (output_size, input_size), here)
        self._create(layer, Wanted(rows, input_size, params_dtype, extra_weight_attrs))

    @abstractmethod
    def _create(self, layer: torch.nn.Module, wanted: Wanted) -> None:
        """Make the parameters of a layer of vLLM's."""
