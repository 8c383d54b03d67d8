"""Loading taut's checkpoints in transformers: ``import taut_deploy.hf``.

Importing registers ``quant_method: "taut"`` through transformers' own registration, and embeddings
of compressed-tensors (:mod:`taut_deploy.hf_tables`); ``from_pretrained`` then loads such a
directory as any other. Low-rank factors stay two products, as they are served;
codebooks and the 4-bit weights under a low-rank correction become dense weights of the model's
dtype, so no memory is saved here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from taut_deploy.compress.formats.activations import Activations
from taut_deploy.compress.formats.integer import PackedIntegerFormat
from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.compress.source.names import renamed
from taut_deploy.hf_tables import install
from taut_kernels.for_deploy import codebook, low_rank_linear
from taut_kernels.for_deploy import layer_description as told

_DENSE = "weight"

install()


@register_quantization_config(told.METHOD)
class TautConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """``quantization_config`` of a checkpoint.

    Args:
        entry: its keys.

    Raises:
        ValueError: it describes something this version does not read.
    """

    def __init__(self, **entry: Any) -> None:
        self.quant_method = told.METHOD
        self.format_version = entry.get("format_version")
        self.layers = entry.get("layers")
        self.descriptions = told.read(entry)

    def to_dict(self) -> dict[str, Any]:
        """The entry as it is in ``config.json``."""
        return told.write(self.descriptions)


@register_quantizer(told.METHOD)
class TautQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts a module that takes the stored tensors in the place of every compressed layer."""

    requires_calibration = True
    quantization_config: TautConfig

    def _process_model_before_weight_loading(self, model: Any, **_options: Any) -> None:
        self._layers = _named_in_model(model, self.quantization_config.descriptions)
        for name, layer in self._layers.items():
            dense = _linear(model, name)
            if isinstance(layer, told.LowRank):
                model.set_submodule(name, _LowRank(dense, layer))
            else:
                model.set_submodule(name, _Codebook(dense, layer))

    def _process_model_after_weight_loading(self, model: Any, **_options: Any) -> None:
        for name in self._layers:
            model.set_submodule(name, model.get_submodule(name).loaded())

    def is_serializable(self) -> bool:
        """Never: ``taut compress`` writes such checkpoints."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Never: a gradient into what is stored is ``taut distil``'s."""
        return False


def _named_in_model(model: Any, described: Mapping[str, told.Layer]) -> dict[str, told.Layer]:
    """The descriptions by what transformers calls a layer; it renames some families' tensors."""
    stored = {f"{name}.{_DENSE}": layer for name, layer in described.items()}
    new = renamed(model, stored, get_model_conversion_mapping(model))
    return {new[name].removesuffix(f".{_DENSE}"): layer for name, layer in stored.items()}


def _linear(model: nn.Module, name: str) -> nn.Module:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear | Conv1D):
        raise ValueError(
            f"config.json: quantization_config: layers.{name}: the model has no such linear layer"
        )
    return module


class _Stored(nn.Module):
    """A layer whose tensors are those of the checkpoint until everything is loaded."""

    bias: nn.Parameter | None

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        weight = dense.get_parameter(_DENSE)
        rows, columns = weight.shape
        turned = isinstance(dense, Conv1D)
        self.in_features, self.out_features = (rows, columns) if turned else (columns, rows)
        self._dtype, self._device = weight.dtype, weight.device
        self.register_parameter("bias", dense._parameters["bias"])
        # Some families set the weights of their layers by hand before those are loaded (GPT-2).
        self.register_buffer(_DENSE, torch.empty(0, device=weight.device), persistent=False)

    def _expect(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        empty = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def _dense_layer(self, weight: torch.Tensor) -> nn.Linear:
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.register_parameter("bias", self.bias)
        return layer


class _Codebook(_Stored):
    """Indices, scales and books; a plain linear layer once loaded."""

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_codebook: torch.Tensor

    def __init__(self, dense: nn.Module, layer: told.Codebook) -> None:
        super().__init__(dense)
        n, k = self.out_features, self.in_features
        self._bits = layer.bits
        self._expect("weight_packed", n, k * layer.bits // 8, dtype=torch.uint8)
        self._expect("weight_scale", n, k // (layer.group_size or k))
        self._expect("weight_codebook", n // (layer.rows or n), layer.entries)
        self._expect("weight_shape", 2, dtype=torch.int64)

    def loaded(self) -> nn.Linear:
        """The layer, its weight dequantised to the dtype of its scales."""
        codes = codebook.unpack_codes(self.weight_packed.data, self._bits)
        weight = codebook.dequantise(codes, self.weight_scale.data, self.weight_codebook.data)
        return self._dense_layer(weight.to(self.weight_scale.dtype))


class _LowRank(_Stored):
    """Two factors, and 4-bit weights they correct where the layer has them."""

    weight_u: torch.Tensor
    weight_v: torch.Tensor
    weight_scale: torch.Tensor
    weight: torch.Tensor

    def __init__(self, dense: nn.Module, layer: told.LowRank) -> None:
        super().__init__(dense)
        n, k = self.out_features, self.in_features
        self._expect("weight_u", n - layer.rank if layer.interpolative else n, layer.rank)
        self._expect("weight_v", layer.rank, k)
        if layer.interpolative:
            self._expect(told.ORDER, n, dtype=torch.int32)
        self._base = layer.base
        if layer.base is not None:
            groups = k // (layer.base.group_size or k)
            self._expect("weight_packed", n, -(-k // 8), dtype=torch.int32)
            self._expect("weight_scale", n, groups)
            self._expect("weight_shape", 2, dtype=torch.int64)
            if not layer.base.symmetric:
                self._expect("weight_zero_point", -(-n // 8), groups, dtype=torch.int32)

    def loaded(self) -> nn.Module:
        """The layer, its 4-bit weights dequantised to the dtype of their scales."""
        del self.weight
        if self._base is not None:
            stored = {name: value.data for name, value in self.named_parameters(recurse=False)}
            spec = GridSpec(4, self._base.group_size, self._base.symmetric, self._dtype)
            codes = PackedIntegerFormat("W4A16", spec, Activations()).unpack(stored)
            weight = codes.dequantize().to(self.weight_scale.dtype)
            for name in stored.keys() - {*told.FACTORS, told.ORDER, "bias"}:
                delattr(self, name)
            self.weight = nn.Parameter(weight, requires_grad=False)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product; x is [..., K], the result [..., N]."""
        order: torch.Tensor | None = getattr(self, told.ORDER, None)
        y = low_rank_linear(x, self.weight_v, [self.weight_u], [order])
        if self._base is not None:
            y = y + nn.functional.linear(x, self.weight)
        return y if self.bias is None else y + self.bias
