"""The checkpoint directory and its manifest, ``taut.json``: one of the seams between the rooms.

The manifest is written last, into a directory that is then renamed: a directory without a valid
manifest is not a checkpoint. ``files`` holds the sha256 of every other file except the volatile
log; ``validation`` is the only part that changes later.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from taut_deploy.errors import CheckpointError, ModelError
from taut_deploy.files import VOLATILE_FILES, digest_of_hashes, sha256_file, write_json_atomically
from taut_deploy.models.directory import require_contained

MANIFEST = "taut.json"
FORMAT_VERSION = 1
_SHAPES: dict[str, type] = {
    "name": str,
    "scheme": str,
    "recipe": dict,
    "base_model": dict,
    "calibration": dict,
    "layers": list,
    "files": dict,
    "max_model_len": int,
}
# What changes the answers of a model that is loaded from the directory.
_LOADED_SUFFIXES = (".safetensors", ".json", ".jinja", ".model")


@dataclass(frozen=True)
class Golden:
    """A prompt whose first greedy token is known: the startup probe of every worker and gateway.

    Args:
        prompt: text.
        expected_text: text of the first token.
        expected_token: id of the first token.
        margin: logit distance to the runner-up; large means robust against rounding.
    """

    prompt: str
    expected_text: str
    expected_token: int
    margin: float


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Args:
        name: public model name.
        scheme: ``W8A8``, ``W4A16``, or ``none`` for an uncompressed copy.
        bits: bits per weight of quantised layers.
        recipe: the recipe as run, defaults filled in.
        recipe_hash: hash of what changes the result.
        base_model: name, digest and source of the model that was compressed.
        calibration: description, hash and size of the calibration set.
        layers: one report per quantised layer.
        golden: readiness probe.
        max_model_len: longest context in tokens.
        libraries: versions that made it.
        files: sha256 per file.
        bytes: size of those files.
        validation: last verdict of ``taut validate``, or None.
        format_version: version of this layout.
    """

    name: str
    scheme: str
    bits: int
    recipe: dict[str, Any]
    recipe_hash: str
    base_model: dict[str, str]
    calibration: dict[str, Any]
    layers: list[dict[str, Any]]
    golden: Golden
    max_model_len: int
    libraries: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    validation: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """``sha256:`` over the hashes of all files."""
        return digest_of_hashes(self.files)


def is_checkpoint(directory: Path) -> bool:
    """Whether the directory has a manifest."""
    return (directory / MANIFEST).is_file()


def seal(directory: Path, manifest: Manifest) -> Manifest:
    """Hash what is in ``directory`` and write the manifest; returns it as written."""
    files = {path.name: sha256_file(path) for path in _content(directory)}
    size = sum(path.stat().st_size for path in _content(directory))
    sealed = replace(manifest, files=files, bytes=size)
    write_json_atomically(directory / MANIFEST, asdict(sealed))
    return sealed


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest without checking its files.

    Raises:
        CheckpointError: no manifest, not JSON, another version, or a missing key.
    """
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory}: no {MANIFEST}, so this is not a taut checkpoint"
        ) from error
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version is {version!r}, this taut reads {FORMAT_VERSION}"
        )
    try:
        manifest = Manifest(**{**data, "golden": Golden(**data["golden"])})
        for name, kind in _SHAPES.items():
            if not isinstance(getattr(manifest, name), kind):
                raise TypeError(f"{name!r} is not a {kind.__name__}")
        return manifest
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: {error}; compress the model again") from error


def verify(directory: Path) -> Manifest:
    """Read the manifest and check every file against it.

    Raises:
        CheckpointError: naming the first file that is missing, cut short, altered or not listed.
    """
    manifest = read_manifest(directory)
    try:
        require_contained(directory)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    for name, expected in sorted(manifest.files.items()):
        path = directory / name
        if not path.is_file():
            raise CheckpointError(
                f"{path}: listed in {MANIFEST} but missing; compress the model again"
            )
        if sha256_file(path) != expected:
            raise CheckpointError(
                f"{path}: its sha256 differs from {MANIFEST} (altered or cut short); "
                "compress the model again"
            )
    extra = {path.name for path in _content(directory)} - manifest.files.keys()
    if unlisted := sorted(name for name in extra if name.endswith(_LOADED_SUFFIXES)):
        raise CheckpointError(f"{directory / unlisted[0]}: not listed in {MANIFEST}; remove it")
    return manifest


def record_validation(directory: Path, verdict: dict[str, Any]) -> None:
    """Store the last verdict in the manifest."""
    write_json_atomically(
        directory / MANIFEST, asdict(replace(read_manifest(directory), validation=verdict))
    )


def _content(directory: Path) -> list[Path]:
    """Files a manifest accounts for, in a stable order."""
    left_out = VOLATILE_FILES | {MANIFEST}
    files = (path for path in directory.iterdir() if path.is_file())
    return sorted(
        path for path in files if path.name not in left_out and not path.name.startswith(".")
    )
