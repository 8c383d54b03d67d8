"""``quant_method: "taut"`` in vLLM: which linear method loads each layer of such a checkpoint.

Holds no arithmetic. What a checkpoint may say is :mod:`taut_kernels.formats.layer_description`.
This module imports vLLM; only :mod:`.registration` imports it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from taut_kernels.formats import layer_description as told
from taut_kernels.vllm_plugin.codebook_method import TautCodebookLinearMethod
from taut_kernels.vllm_plugin.low_rank_method import TautLowRankLinearMethod
from taut_kernels.vllm_plugin.stored_parts import StoredPart


class TautFormatConfig(QuantizationConfig):  # type: ignore[misc]
    """Descriptions of the compressed layers; every other layer is dense.

    Args:
        layers: by full name.
    """

    def __init__(self, layers: dict[str, told.Layer]) -> None:
        super().__init__()
        self.layers = layers

    @classmethod
    def get_name(cls) -> str:
        """Return ``taut``."""
        return told.METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return what the products take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least CUDA compute capability, ×10."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file: everything is in ``config.json``."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TautFormatConfig:
        """Parse ``quantization_config``.

        Raises:
            LayerDescriptionError: it says something this version does not read.
        """
        return cls(told.read(config))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Follow a model that calls its layers otherwise than its checkpoint does."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer; None for what is no linear layer.

        Raises:
            ValueError: vLLM builds the layer of parts that are not stored alike, or of experts.
        """
        if not isinstance(layer, LinearBase):
            if any(name.startswith(f"{prefix}.") and ".experts." in name for name in self.layers):
                raise ValueError(
                    f"{prefix}: vLLM multiplies experts in one kernel, which takes no factors and "
                    "no codebooks; compress the model with the experts in 'ignore'"
                )
            return None
        names = self._parts_of(prefix)
        found = [self.layers.get(name) for name in names]
        if all(one is None for one in found):
            return UnquantizedLinearMethod()
        parts = [StoredPart(n, one) for n, one in zip(names, found, strict=True) if one is not None]
        kinds = {type(one) for one in found}
        if len(kinds) > 1:
            raise ValueError(f"{prefix}: vLLM joins {', '.join(names)}, which are not stored alike")
        if kinds == {told.LowRank}:
            return TautLowRankLinearMethod(cast("list[StoredPart[told.LowRank]]", parts))
        return TautCodebookLinearMethod(cast("list[StoredPart[told.Codebook]]", parts))

    def _parts_of(self, prefix: str) -> list[str]:
        """Return the names in the checkpoint of what vLLM makes one layer of."""
        parent, _, leaf = prefix.rpartition(".")
        if prefix in self.layers or leaf not in self.packed_modules_mapping:
            return [prefix]
        return [f"{parent}.{part}" for part in self.packed_modules_mapping[leaf]]


def install() -> None:
    """Make vLLM know the method."""
    register_quantization_config(told.METHOD)(TautFormatConfig)
