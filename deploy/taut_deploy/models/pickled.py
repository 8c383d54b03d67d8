"""A directory of ``pytorch_model.bin`` to one of safetensors.

A pickle may run any code when it is read; ``weights_only`` lets it make tensors and nothing else.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taut_deploy.documents import read_json_object
from taut_deploy.errors import ModelError
from taut_deploy.files import require_free_space, safetensors_disk_errors, write_json_atomically
from taut_deploy.models.directory import require_contained
from taut_deploy.models.download import HUB_PATTERNS
from taut_deploy.models.pretrained import reason_of

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_SHARD = re.compile(r"pytorch_model-[0-9]+-of-[0-9]+\.bin")


def pickled_files(directory: Path) -> list[Path]:
    """The pickles a model consists of, in order; none where it has safetensors.

    Raises:
        ModelError: the index is damaged, or names a file that is missing or elsewhere.
    """
    if any(directory.glob("*.safetensors")):
        return []
    if not (directory / _INDEX).is_file():
        return [path for path in (directory / _SINGLE,) if path.is_file()]
    index = directory / _INDEX
    names = read_json_object(index, ModelError).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{index}: no JSON object with a 'weight_map'; fetch it again")
    files = []
    for name in sorted({str(value) for value in names.values()}):
        if not _SHARD.fullmatch(name) or not (directory / name).is_file():
            raise ModelError(
                f"{index}: weight_map: {name[:80]!r} is no pytorch_model-….bin of this directory; "
                "fetch the model again"
            )
        files.append(directory / name)
    return files


def convert_pickled(source: Path, destination: Path) -> None:
    """Write the weights as safetensors and copy the other files.

    Args:
        source: directory with ``pytorch_model.bin``, or with its shards and their index.
        destination: an existing directory.

    Raises:
        ModelError: a file holds something else than named tensors, or is damaged.
        OutputError: the disk has too little room.
        OSError: the disk is full all the same.
    """
    from safetensors.torch import save_file

    files = pickled_files(source)
    size = sum(file.stat().st_size for file in files)
    require_free_space(destination, size, "set TAUT_HOME to another disk")
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        shard = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # Tied tensors share memory, which safetensors refuses.
        tensors = {name: tensor.contiguous().clone() for name, tensor in _tensors(file)}
        with safetensors_disk_errors():
            save_file(tensors, destination / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
    write_json_atomically(
        destination / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": weight_map},
    )
    require_contained(source)
    kept = {path for pattern in HUB_PATTERNS for path in source.glob(pattern) if path.is_file()}
    for path in sorted(kept):
        if path.name != _INDEX:
            shutil.copyfile(path, destination / path.name)


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    import pickle

    import torch

    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise ModelError(
            f"{file}: not a pickle of tensors alone ({reason_of(error, 120)}); take the model's "
            "safetensors files"
        ) from error
    for name, value in found.items() if isinstance(found, dict) else [("", None)]:
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{file}: holds {type(found).__name__} of something else than named tensors; take "
                "the model's safetensors files"
            )
        yield name, value
