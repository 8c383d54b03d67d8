"""A copy of a checkpoint with a known harm: what a guard has to find."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, replace
from pathlib import Path

from taut_deploy.checkpoint import is_checkpoint, read_manifest, seal
from taut_deploy.errors import MeasureError
from taut_deploy.files import (
    copy_files,
    disk_errors_named,
    require_free_space,
    safetensors_disk_errors,
)
from taut_deploy.models.directory import model_files, weight_files


@dataclass(frozen=True)
class Harm:
    """Which tensors are multiplied.

    Args:
        tensors: names as a shell pattern.
        factor: what by.

    Raises:
        MeasureError: the factor is not finite, or changes nothing.
    """

    tensors: str
    factor: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor) or self.factor == 1.0:
            raise MeasureError(
                f"--harm-factor {self.factor:g}: expected a finite number other than 1"
            )


def harmed_copy(source: Path, target: Path, harm: Harm) -> list[str]:
    """Write a checkpoint that differs from another by a harm, and loads as that one does.

    Its manifest lists the changed files by their new hashes and has no verdict: the one that was
    there is about other weights.

    Args:
        source: a checkpoint, or a model directory with safetensors.
        target: folder to make; must not exist.
        harm: what to change.

    Returns:
        Names of the changed tensors.

    Raises:
        MeasureError: no tensor has such a name; nothing was written.
        OutputError: the disk cannot take the copy.
    """
    weights = weight_files(source)
    chosen = [name for file in weights for name in _matching(file, harm.tensors)]
    if not chosen:
        raise MeasureError(
            f"--harm-tensors {harm.tensors!r}: no tensor of {source} has such a name; "
            "such as '*.layers.0.*weight_scale'"
        )
    files = model_files(source)
    require_free_space(target, sum(file.stat().st_size for file in {*files, *weights}))
    with disk_errors_named(target):
        target.mkdir(parents=True)
    copy_files([file for file in files if file not in weights], source, target)
    for file in weights:
        _multiply(file, target / file.relative_to(source), set(chosen), harm.factor)
    if is_checkpoint(source):
        seal(target, replace(read_manifest(source), validation=None))
    return chosen


def _matching(file: Path, pattern: str) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return [name for name in opened.keys() if fnmatch.fnmatchcase(name, pattern)]  # noqa: SIM118


def _multiply(file: Path, target: Path, names: set[str], factor: float) -> None:
    # Imported here: torch takes a second, and other measurements need none.
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    for name in names & tensors.keys():
        values = tensors[name]
        tensors[name] = (values.double() * factor).to(values.dtype)
    with disk_errors_named(target), safetensors_disk_errors():
        save_file(tensors, target, metadata=metadata)
