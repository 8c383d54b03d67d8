"""A trained student written back in the format it came in, shard by shard."""

from pathlib import Path

import torch

from taut_deploy.compress.train.quantized_layers import stored_tensors
from taut_deploy.compress.train.student import Student
from taut_deploy.compress.train.weight_forms import Quantized
from taut_deploy.compress.workspace import Workspace
from taut_deploy.errors import ModelError
from taut_deploy.files import COMPRESSION_REPORT, VOLATILE_FILES, copy_files
from taut_deploy.models.directory import weight_files

_NOT_COPIED = VOLATILE_FILES | {"taut.json", "taut-model.json", COMPRESSION_REPORT}


def write_checkpoint(student: Student, workspace: Workspace) -> None:
    """Write weights, and copy every other file of the student's directory.

    Args:
        student: as it is now.
        workspace: to write into.

    Raises:
        ModelError: a trained weight is not finite, or does not read back.
    """
    from safetensors import safe_open

    for shard in weight_files(student.directory):
        with safe_open(shard, framework="pt") as handle:
            names = list(handle.keys())
            old = {name: handle.get_tensor(name) for name in names}
        workspace.save_shard(shard.name, _shard(student, old))
    _copy_others(student.directory, workspace.directory)


def _shard(student: Student, old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one shard, of the same names, shapes and types."""
    new: dict[str, torch.Tensor] = {}
    for name, before in old.items():
        owner = name.rpartition(".")[0]
        if owner in student.layers and name not in new and _is_part(name):
            new |= _layer(student, owner)
        elif owner not in student.layers or not _is_part(name):
            value = student.effective(name)
            new[name] = before if value is None else value.to(before.dtype)
    for name, before in old.items():
        after = new[name]
        if after.shape != before.shape or after.dtype != before.dtype:
            raise ModelError(
                f"{name}: was {before.dtype} {tuple(before.shape)} and became {after.dtype} "
                f"{tuple(after.shape)}; nothing was written"
            )
        if after.is_floating_point() and not bool(torch.isfinite(after.float()).all()):
            raise ModelError(f"{name}: holds NaN or infinity after training; lower learning_rate")
    return {name: new[name] for name in old}


def _is_part(name: str) -> bool:
    return name.rpartition(".")[2].startswith("weight")


def _layer(student: Student, name: str) -> dict[str, torch.Tensor]:
    module = student.model.get_submodule(name)
    form: Quantized = module.parametrizations.weight[0]
    master = module.parametrizations.weight.original.detach()
    if form.mask is not None:
        master = master * form.mask
    scale = form.scale.detach()
    return stored_tensors(student.layers[name], master.cpu(), scale.cpu(), student.stored)


def _copy_others(source: Path, target: Path) -> None:
    found = (path for path in sorted(source.rglob("*")) if path.is_file())
    others = (path for path in found if _is_copied(path, path.relative_to(source)))
    copy_files(others, source, target)


def _is_copied(path: Path, place: Path) -> bool:
    hidden = any(part.startswith(".") for part in place.parts)
    return not hidden and path.suffix != ".safetensors" and str(place) not in _NOT_COPIED
