"""Whether a directory's tensors are those of its architecture, before anything is written.

Names, shapes and dtypes are compared with a skeleton that has no storage; then every value is read
once, as the hash of the files was a moment ago. transformers would fill what is absent with random
numbers, and a NaN outside the linear layers would travel into the checkpoint unseen.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from taut_deploy.errors import ModelError
from taut_deploy.models.values import is_finite

_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Tables that old checkpoints store and every architecture computes by itself.
_COMPUTED = (r"rotary_emb\.inv_freq$",)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a shard's header declares it.

    Attributes:
        shard: the file.
        shape: outermost dimension first.
        dtype: in safetensors' words.
    """

    shard: Path
    shape: tuple[int, ...]
    dtype: str


class Reader(Protocol):
    """Reads single tensors."""

    stored: dict[str, StoredTensor]

    def read(self, name: str) -> torch.Tensor:
        """One stored tensor on the CPU."""
        ...


def require_same_tensors(
    directory: Path, skeleton: Any, stored: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """Compare what is stored with the skeleton of the architecture.

    Args:
        directory: the model's, for errors.
        skeleton: model, places and unknown tensors.
        stored: by name.

    Returns:
        Places of the stored tensors that the model has, by name in the skeleton.

    Raises:
        ModelError: naming the first tensor that is missing, has no place, another shape or a dtype
            that is no plain floating type.
    """
    model, places = skeleton.model, skeleton.places
    kept = model.state_dict()
    tied: dict[str, str] = model.all_tied_weights_keys
    roots = {tied.get(name, name) for name in places}
    missing = [name for name in kept if name not in places and tied.get(name, name) not in roots]
    if missing:
        raise ModelError(_missing(directory, missing, model, stored))
    ignorable = [*_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]
    unknown = [
        name
        for name in skeleton.unknown
        if not any(re.search(pattern, name) for pattern in ignorable)
    ]
    if unknown:
        raise ModelError(
            f"{directory}: {len(unknown)} stored tensors have no place in the "
            f"{type(model).__name__} of config.json, the first is {min(unknown)}; "
            "is config.json another model's?"
        )
    found = {name: place for name, place in places.items() if name in kept}
    for name, place in found.items():
        tensor = stored[place.stored]
        if place.shape(tensor.shape) != tuple(kept[name].shape):
            shape = place.unshaped(tuple(kept[name].shape), tensor.shape)
            raise ModelError(
                f"{tensor.shard}: {place.stored}: stored shape {tensor.shape} does not match "
                f"config.json's {shape}"
            )
        _require_floating(place.stored, tensor)
    return found


def _missing(
    directory: Path, missing: Collection[str], model: Any, stored: Mapping[str, StoredTensor]
) -> str:
    first = min(missing)
    message = f"{directory}: {len(missing)} tensors of {type(model).__name__} are in no shard"
    message += f", the first is {first}"
    if stored.keys().isdisjoint(missing) and len(stored) >= len(missing):
        message += f" (stored is, for example, {min(stored)})"
    return message + "; fetch the model again, or compress one stored under transformers' names"


def _require_floating(name: str, tensor: StoredTensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise ModelError(
            f"{tensor.shard}: {name} is stored as {tensor.dtype}, and config.json names no "
            "quantisation; compress a model of bf16, fp16 or fp32 weights"
        )


def require_sound_values(places: Mapping[str, Any], model: Any, reader: Reader) -> None:
    """Read every tensor once: all finite, and those that the model ties equal.

    Args:
        places: where each tensor of the skeleton is stored.
        model: the skeleton's model.
        reader: of the stored tensors.

    Raises:
        ModelError: naming file and tensor.
    """
    for name in dict.fromkeys(place.stored for place in places.values()):
        if not is_finite(reader.read(name)):
            raise ModelError(
                f"{reader.stored[name].shard}: {name} holds NaN or infinity, so the weights are "
                "broken"
            )
    for target, source in model.all_tied_weights_keys.items():
        both = target in places and source in places
        if both and not torch.equal(
            reader.read(places[target].stored), reader.read(places[source].stored)
        ):
            raise ModelError(
                f"{reader.stored[places[target].stored].shard}: {target} differs from {source}, "
                "which config.json ties it to; set tie_word_embeddings to false in config.json"
            )
