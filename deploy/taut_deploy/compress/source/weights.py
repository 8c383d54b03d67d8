"""Single tensors of a model's directory, in the plain floating type they stand for.

Checkpoints that are stored in FP8 by blocks or in MXFP4 are read as the numbers their codes mean,
so that nothing after this module knows of them (:mod:`taut_deploy.compress.source.packed`).
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from taut_deploy.compress.source.packed import PackedTensor, packed_tensors
from taut_deploy.compress.source.soundness import StoredTensor
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import declared_shards, weight_files

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightReader:
    """Reads single tensors out of a directory's safetensors shards.

    Args:
        directory: model directory.

    Raises:
        ModelError: a shard is missing or cut short, index and shards contradict each other, or
            codes are stored without their scales.
    """

    def __init__(self, directory: Path) -> None:
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
        self._packed = packed_tensors(directory, files)
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

    def read_dtype(self, name: str) -> torch.dtype:
        """The dtype in which :meth:`read` gives a tensor."""
        return _DTYPES[self.stored[name].dtype]

    def _raw(self, name: str, entry: int | None) -> torch.Tensor:
        if name not in self._files:
            raise ModelError(f"{name}: no shard of the model holds this tensor")
        with safe_open(self._files[name].shard, framework="pt") as handle:
            tensor: torch.Tensor = (
                handle.get_tensor(name) if entry is None else handle.get_slice(name)[entry]
            )
        return tensor


def _as_read(
    files: dict[str, StoredTensor], packed: Iterable[PackedTensor]
) -> dict[str, StoredTensor]:
    """What is stored, each packed tensor in place of its parts."""
    read = dict(files)
    for tensor in packed:
        first = files[tensor.parts[0]]
        for part in tensor.parts:
            read.pop(part, None)
        read[tensor.name] = StoredTensor(first.shard, tensor.shape, "BF16")
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
