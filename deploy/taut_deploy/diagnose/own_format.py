"""Whether a model is of ``quant_method: "taut"``, and what its layers are."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from taut_deploy.errors import ModelError

if TYPE_CHECKING:
    from taut_kernels.for_deploy import layer_description


def own_layers(config: Mapping[str, Any]) -> "dict[str, layer_description.Layer] | None":
    """The description of each compressed layer; None for a model of another method.

    Args:
        config: the model's ``config.json``.

    Raises:
        ModelError: it says something this version does not read; names layer and key.
    """
    entry = config.get("quantization_config")
    if not isinstance(entry, Mapping) or entry.get("quant_method") != "taut":
        return None
    from taut_kernels.for_deploy import layer_description as told

    try:
        return told.read(entry)
    except told.LayerDescriptionError as error:
        raise ModelError(f"config.json: quantization_config: {error}") from error
