"""Single tensors of a model's directory, in the plain floating type they stand for.

Checkpoints that are stored in low precision are read as the numbers their codes mean, so that
nothing after this module knows of them (:mod:`taut_deploy.compress.source.packed`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from taut_deploy.compress.source.packed import PackedTensor, packed_tensors
from taut_deploy.compress.source.soundness import StoredTensor
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import declared_shards, weight_files


class WeightReader:
    """Reads single tensors out of a directory's safetensors shards.

    Args:
        directory: model directory.
        as_numbers: read weights stored in low precision as the numbers their codes stand for.

    Raises:
        ModelError: a shard is missing or cut short, or index and shards contradict each other.
    """

    def __init__(self, directory: Path, *, as_numbers: bool = False) -> None:
        files: dict[str, StoredTensor] = {}
        for shard in weight_files(directory):
            found = _header(shard)
            if twice := sorted(found.keys() & files.keys()):
                raise ModelError(
                    f"{shard}: {twice[0]} is in {files[twice[0]].shard.name} too; "
                    "fetch the model again"
                )
            files |= found
        for name, shard_name in declared_shards(directory).items():
            if name not in files or files[name].shard.name != shard_name:
                raise ModelError(
                    f"{directory / shard_name}: the index says that it holds {name}, which it "
                    "does not; fetch the model again"
                )
        self._files = files
        self._shard: tuple[Path, Any] | None = None
        self._packed = packed_tensors(directory, files, self._raw) if as_numbers else {}
        self.stored = _as_read(files, self._packed.values())

    @property
    def names(self) -> list[str]:
        """Every tensor's name, in shard order."""
        return list(self.stored)

    def read(self, name: str, entry: int | None = None) -> torch.Tensor:
        """One tensor, on the CPU, in its stored dtype; packed codes as numbers.

        Args:
            name: of the tensor.
            entry: read only this entry of the outermost dimension.

        Raises:
            ModelError: if no shard holds it.
        """
        if name in self._packed:
            packed = self._packed[name]
            return packed.unpack(*(self._raw(part, entry) for part in packed.parts))
        return self._raw(name, entry)

    def _raw(self, name: str, entry: int | None = None) -> torch.Tensor:
        if name not in self._files:
            raise ModelError(f"{name}: no shard of the model holds this tensor")
        shard = self._opened(self._files[name].shard)
        tensor: torch.Tensor = (
            shard.get_tensor(name) if entry is None else shard.get_slice(name)[entry]
        )
        return tensor

    def _opened(self, path: Path) -> Any:
        """A shard, open until another is read: each opening maps all of it and reads its header."""
        if self._shard is None or self._shard[0] != path:
            self._shard = None
            self._shard = path, safe_open(path, framework="pt")
        return self._shard[1]


def _as_read(
    files: dict[str, StoredTensor], packed: Iterable[PackedTensor]
) -> dict[str, StoredTensor]:
    """What is stored, each packed tensor in place of its parts."""
    read = dict(files)
    for tensor in packed:
        first = files[tensor.parts[0]]
        for part in (*tensor.parts, *tensor.unused):
            read.pop(part, None)
        read[tensor.name] = StoredTensor(first.shard, tensor.shape, tensor.dtype)
    return read


def _header(shard: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(shard, framework="pt") as handle:
            parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(shard, tuple(part.get_shape()), part.get_dtype())
                for name, part in parts.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{shard}: cannot be read as safetensors ({error}); fetch the model again"
        ) from error
