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

    def read(self, name: str) -> torch.Tensor:
        """One stored tensor on the CPU."""
        ...


def require_same_tensors(
    directory: Path, model: Any, stored: Mapping[str, StoredTensor]
) -> list[str]:
    """Compare what is stored with the skeleton of the architecture.

    Args:
        directory: the model's, for errors.
        model: a transformers model, its parameters on the meta device.
        stored: by name.

    Returns:
        Names of the stored tensors that are parameters of the model.

    Raises:
        ModelError: naming the first tensor that is missing, has no place, another shape or a dtype
            that is no plain floating type, or that taut cannot carry.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = set(model.state_dict())
    tied: dict[str, str] = model.all_tied_weights_keys
    roots = {tied.get(name, name) for name in stored}
    missing = [name for name in kept if name not in stored and tied.get(name, name) not in roots]
    if missing:
        raise ModelError(_missing(directory, missing, model, stored))
    ignorable = [*_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]
    unknown = [
        name
        for name in stored
        if name not in kept and not any(re.search(pattern, name) for pattern in ignorable)
    ]
    if unknown:
        raise ModelError(
            f"{directory}: {len(unknown)} stored tensors have no place in the "
            f"{type(model).__name__} of config.json, the first is {min(unknown)}; "
            "is config.json another model's?"
        )
    buffers = sorted(kept - parameters.keys())
    if buffers:
        raise ModelError(
            f"{directory}: {buffers[0]} is a stored buffer, which compression does not carry over"
        )
    for name, tensor in stored.items():
        if name in parameters:
            _require_alike(name, tensor, tuple(parameters[name].shape))
    return [name for name in stored if name in parameters]


def _missing(
    directory: Path, missing: Collection[str], model: Any, stored: Mapping[str, StoredTensor]
) -> str:
    first = min(missing)
    message = f"{directory}: {len(missing)} tensors of {type(model).__name__} are in no shard"
    message += f", the first is {first}"
    if stored.keys().isdisjoint(missing) and len(stored) >= len(missing):
        message += f" (stored is, for example, {min(stored)})"
    return message + "; fetch the model again, or compress one stored under transformers' names"


def _require_alike(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelError(
            f"{tensor.shard}: {name}: stored shape {tensor.shape} does not match config.json's "
            f"{shape}"
        )
    if tensor.dtype not in _DTYPES:
        raise ModelError(
            f"{tensor.shard}: {name} is stored as {tensor.dtype}, and config.json names no "
            "quantisation; compress a model of bf16, fp16 or fp32 weights"
        )


def require_sound_values(
    stored: Mapping[str, StoredTensor], names: Collection[str], model: Any, reader: Reader
) -> None:
    """Read every tensor once: all finite, and those that the model ties equal.

    Raises:
        ModelError: naming file and tensor.
    """
    for name in names:
        if not is_finite(reader.read(name)):
            raise ModelError(
                f"{stored[name].shard}: {name} holds NaN or infinity, so the weights are broken"
            )
    for target, source in model.all_tied_weights_keys.items():
        both = target in stored and source in stored
        if both and not torch.equal(reader.read(target), reader.read(source)):
            raise ModelError(
                f"{stored[target].shard}: {target} differs from {source}, which config.json ties "
                "it to; set tie_word_embeddings to false in config.json"
            )
