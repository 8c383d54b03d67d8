"""Low-rank layers in vLLM: two products, and the 4-bit weights they correct on a W4A16 kernel.

Layers that vLLM joins keep a rank each: one product by all their ``weight_v``, then each part's
``weight_u``. Holds no arithmetic of its own. This module imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsWNA16,
)

from taut_kernels.formats.layer_description import ORDER, LowRank
from taut_kernels.formats.low_rank import dense_rows, low_rank_linear
from taut_kernels.vllm_plugin import known_answer
from taut_kernels.vllm_plugin.parted_method import PartedLinearMethod, Wanted
from taut_kernels.vllm_plugin.stored_parts import PartedTensor, StoredPart

_TOKENS = (1, 16, 64)
_DOWN = "weight_v"


@register_weight_loader_v2_supported_method  # for the tensors of the codes
class TautLowRankLinearMethod(PartedLinearMethod[LowRank]):
    """Low-rank factors, and the codes they correct.

    Args:
        parts: as of the base class.

    Raises:
        ValueError: they are not stored alike.
    """

    def __init__(self, parts: list[StoredPart[LowRank]]) -> None:
        super().__init__(parts)
        base = parts[0].layer.base
        if any(part.layer.base != base for part in parts):
            raise ValueError(f"{', '.join(self._names)}: their codes are not stored alike")
        self._interpolative = parts[0].layer.interpolative
        if any(part.layer.interpolative != self._interpolative for part in parts):
            raise ValueError(f"{', '.join(self._names)}: their factors are not stored alike")
        self._codes: Any = None
        if base is not None:
            self._codes = CompressedTensorsWNA16(
                strategy="channel" if base.group_size is None else "group",
                num_bits=4,
                group_size=base.group_size,
                symmetric=base.symmetric,
                layer_name=self._names[0],
            )

    def _create(self, layer: torch.nn.Module, wanted: Wanted) -> None:
        rows, k, dtype, attributes = wanted
        ranks = [part.layer.rank for part in self._parts]
        self._rows = rows
        ups = [
            (n - rank if self._interpolative else n, rank)
            for n, rank in zip(rows, ranks, strict=True)
        ]
        downs = [(rank, k) for rank in ranks]
        self._up = PartedTensor(layer, "weight_u", self._names, [*ups], dtype)
        self._down = PartedTensor(layer, _DOWN, self._names, [*downs], dtype)
        if self._interpolative:
            orders = [(n,) for n in rows]
            self._order = PartedTensor(layer, ORDER, self._names, [*orders], torch.int32)
        if self._codes is not None:
            self._codes.create_weights(
                layer,
                output_size=sum(rows),
                input_size=k,
                output_partition_sizes=rows,
                input_size_per_partition=k,
                params_dtype=dtype,
                **attributes,
            )
            self.kernel.beside(self._codes.kernel)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the factors as plain parameters, and check the product."""
        ups, downs = self._up.of_parts(layer), self._down.of_parts(layer)
        orders = self._orders_of(layer)
        delattr(layer, "weight_u")
        for index, (up, order) in enumerate(zip(ups, orders, strict=True)):
            layer.register_parameter(_up(index), _plain(up))
            if order is not None:
                layer.register_buffer(_order(index), order.clone(), persistent=False)
        setattr(layer, _DOWN, _plain(torch.cat(downs)))
        if self._codes is not None:
            self._codes.process_weights_after_loading(layer)
        down = getattr(layer, _DOWN)
        ranks = "+".join(str(up.shape[1]) for up in ups)
        known_answer.check(
            type(self).__name__,
            f"low rank {ranks}",
            (sum(self._rows), down.shape[1]),
            _TOKENS,
            lambda x: self._corrections(layer, x),
            lambda rows: dense_rows(downs, ups, rows, orders),
            known_answer.plain_block(down.shape[1]),
            down.dtype,
            down.device,
            slack=_slack(ups) if self._interpolative else 1.0,
        )

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer; x is [..., K], the result [..., N]."""
        y = self._corrections(layer, x)
        if self._codes is not None:
            y = y + self._codes.apply_weights(layer, x, None)
        return y if bias is None else y + bias

    def _corrections(self, layer: torch.nn.Module, x: Tensor) -> Tensor:
        each = range(len(self._parts))
        ups = [getattr(layer, _up(index)) for index in each]
        orders = [getattr(layer, _order(index), None) for index in each]
        return low_rank_linear(x, getattr(layer, _DOWN), ups, orders)

    def _orders_of(self, layer: torch.nn.Module) -> list[Tensor | None]:
        """The order of each part's outputs; taken off the layer."""
        if not self._interpolative:
            return [None] * len(self._parts)
        orders = self._order.of_parts(layer)
        delattr(layer, ORDER)
        return [*orders]


def _slack(ups: list[Tensor]) -> float:
    """How much larger errors are where outputs are sums of others that are rounded already."""
    return max(1.0, *(float(up.float().norm(dim=1).max()) for up in ups))


def _up(index: int) -> str:
    return f"weight_u_{index}"


def _order(index: int) -> str:
    return f"{ORDER}_{index}"


def _plain(tensor: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.contiguous(), requires_grad=False)
