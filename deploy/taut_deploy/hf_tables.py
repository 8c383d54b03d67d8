"""Loading checkpoints with quantised embeddings in transformers; :mod:`taut_deploy.hf` installs it.

transformers reads quantised linear layers of compressed-tensors, but no embeddings: its loader asks
every ``nn.Embedding`` for a plain weight. Here the packed table of the embeddings becomes one while
it is read, in the dtype of its scales. A head that is tied to them then has it too; any other head
is a linear layer as always.
"""

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

_METHOD = "compressed-tensors"
_EMBEDDING = "Embedding"
_PARTS = ("weight_packed", "weight_scale", "weight_shape")


class _Unpacked(ConversionOps):  # type: ignore[misc]
    """Makes a weight of a packed table.

    Args:
        scheme: the library's description.
    """

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_told: Any,
    ) -> dict[str, torch.Tensor]:
        """The table in the dtype of its scales, under the target's name."""
        from compressed_tensors.compressors import BaseCompressor

        given = {pattern: _only(input_dict[pattern]) for pattern in source_patterns}
        parts = {pattern.rpartition(".")[2]: tensor for pattern, tensor in given.items()}
        layout = getattr(self._scheme.format, "value", self._scheme.format)
        compressor: Any = BaseCompressor.get_value_from_registry(layout or "pack-quantized")
        return {target_patterns[0]: compressor.decompress(parts, self._scheme)["weight"]}


def _only(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor


class TableQuantizer(CompressedTensorsHfQuantizer):  # type: ignore[misc]
    """transformers' own quantizer, and embeddings."""

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        config = self.compressor.quantization_config
        groups = config.config_groups
        found = [key for key, group in groups.items() if _EMBEDDING in group.targets]
        self._tables: list[WeightConverter] = []
        if found:
            names = {id(module): name for name, module in model.named_modules()}
            embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
            self._tables = [_converter(names[id(embeddings)], groups.pop(found[0]))]
            if model.config.get_text_config().tie_word_embeddings and head is not None:
                # Its table comes with the embeddings; the class of linear layers has it, too.
                config.ignore.append(names[id(head)])
        super()._process_model_before_weight_loading(model, **options)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Transformers' own, and that of the embeddings."""
        return [*super().get_weight_conversions(), *self._tables]


def _converter(name: str, scheme: Any) -> WeightConverter:
    return WeightConverter(
        source_patterns=[f"{name}.{part}" for part in _PARTS],
        target_patterns=[f"{name}.weight"],
        operations=[_Unpacked(scheme)],
    )


def install() -> None:
    """Let transformers load compressed-tensors through this quantizer."""
    AUTO_QUANTIZER_MAPPING[_METHOD] = TableQuantizer
