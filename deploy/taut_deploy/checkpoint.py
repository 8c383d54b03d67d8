"""The checkpoint directory and its manifest, ``taut.json``: one of the seams between the rooms.

The manifest is written last, into a directory that is then renamed: a directory without a valid
manifest is not a checkpoint. ``files`` holds the sha256 of every other file except the volatile
log; ``validation`` is the only part that changes later.
"""

import contextlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from taut_deploy.documents import first_problem, read_json
from taut_deploy.errors import CheckpointError, ModelError
from taut_deploy.files import VOLATILE_FILES, digest_of_hashes, write_json_atomically
from taut_deploy.manifest_parts import why_parts_refused
from taut_deploy.models.directory import require_contained
from taut_deploy.recorded_hashes import RecordedHashes, Verification

MANIFEST = "taut.json"
FORMAT_VERSION = 1
_STRICT = ConfigDict(extra="forbid", strict=True)


def require_public_name(name: str) -> str:
    """A name that is one argument of a command, never a flag, and one line of a log.

    Raises:
        ValueError: it is not.
    """
    if not name or name.startswith("-") or len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(
            f"{name[:40]!r} is no model name: printable characters, at most {_MAX_NAME}, "
            "and no '-' in front"
        )
    return name


def _require_inside(name: str) -> str:
    """A file of the checkpoint: relative, downwards, printable."""
    parts = name.split("/")
    if not name.isprintable() or any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"{name[:80]!r} is no file of the checkpoint")
    return name


_MAX_NAME = 255
_PublicName = Annotated[str, AfterValidator(require_public_name)]
_FileName = Annotated[str, AfterValidator(_require_inside)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Scheme = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,31}$")]
# Beside what is listed: the manifest, the log, and the record of a store that fetched a checkpoint.
_NOT_SEALED = VOLATILE_FILES | {MANIFEST, "taut-model.json"}
# The root of a volume has one, which only its administrator may read.
_OF_FILE_SYSTEM = "lost+found"


@dataclass(frozen=True)
class Golden:
    """A prompt whose first greedy token is known: the startup probe of every worker and gateway.

    Args:
        prompt: text.
        expected_text: text of the first token.
        expected_token: id of the first token.
        margin: logit distance to the runner-up; large means robust against rounding.
    """

    __pydantic_config__ = _STRICT

    prompt: Annotated[str, Field(min_length=1, max_length=4096)]
    expected_text: Annotated[str, Field(min_length=1, max_length=4096)]
    expected_token: Annotated[int, Field(ge=0)]
    margin: Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Args:
        name: public model name.
        scheme: of all quantised layers (``W8A8``, ``W4A16``, …); ``mixed`` where they differ, which
            each layer's report then says; ``dense`` where none is quantised; ``none`` for an
            uncompressed copy.
        bits: bits per weight of quantised layers, the mean where they differ.
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

    __pydantic_config__ = _STRICT

    name: _PublicName
    scheme: _Scheme
    bits: Annotated[int, Field(ge=1, le=64)] | Annotated[float, Field(ge=1, le=64)]
    recipe: dict[str, Any]
    recipe_hash: str
    base_model: dict[str, str]
    calibration: dict[str, Any]
    layers: list[dict[str, Any]]
    golden: Golden
    max_model_len: Annotated[int, Field(ge=1, le=2**31 - 1)]
    libraries: dict[str, str]
    files: dict[_FileName, _Sha256] = field(default_factory=dict)
    bytes: Annotated[int, Field(ge=0)] = 0
    validation: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """``sha256:`` over the hashes of all files."""
        return digest_of_hashes(self.files)


_MANIFEST = TypeAdapter(Manifest)


def is_checkpoint(directory: Path) -> bool:
    """Whether the directory has a manifest."""
    return (directory / MANIFEST).is_file()


def seal(directory: Path, manifest: Manifest) -> Manifest:
    """Hash what is in ``directory`` and write the manifest; returns it as written.

    The hashes are kept, so that a worker which may only read the directory need not read it all.
    """
    hashes = RecordedHashes(directory, "full")
    names = [path.relative_to(directory).as_posix() for path in _content(directory)]
    files = dict(hashes.of(names))
    size = sum(path.stat().st_size for path in _content(directory))
    sealed = replace(manifest, files=files, bytes=size)
    write_json_atomically(directory / MANIFEST, asdict(sealed))
    hashes.save()
    return sealed


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest without checking its files.

    Raises:
        CheckpointError: no manifest, not JSON, another version, or a missing key.
    """
    path = directory / MANIFEST
    try:
        data = read_json(path, CheckpointError)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory}: no {MANIFEST}, so this is not a taut checkpoint"
        ) from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version is {repr(version)[:40]}, this taut reads {FORMAT_VERSION}"
        )
    try:
        # As JSON: there, strict types still let an object be a dataclass.
        manifest = _MANIFEST.validate_json(json.dumps(data, allow_nan=True))
    except ValidationError as error:
        problem = first_problem(error)
        raise CheckpointError(f"{path}: {problem}; compress the model again") from error
    if (reason := why_parts_refused(data)) is not None:
        raise CheckpointError(f"{path}: {reason}; compress the model again")
    return manifest


def verify(
    directory: Path,
    verification: Verification = "recorded",
    say: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Read the manifest and check every file against it.

    Args:
        directory: the checkpoint.
        verification: whether files that did not change since they were hashed are read again.
        say: prints one line for the user.

    Raises:
        CheckpointError: naming the first file that is missing, cut short, altered or not listed.
    """
    manifest = read_manifest(directory)
    try:
        require_contained(directory)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    hashes = RecordedHashes(directory, verification)
    names = sorted(manifest.files)
    for path in (directory / name for name in names):
        if not path.is_file():
            raise CheckpointError(
                f"{path}: listed in {MANIFEST} but missing; compress the model again"
            )
    with contextlib.closing(hashes.of(names)) as found:
        for name, digest in found:
            if digest != manifest.files[name]:
                raise CheckpointError(
                    f"{directory / name}: its sha256 differs from {MANIFEST} (altered or cut "
                    "short); compress the model again"
                )
    require_nothing_else(directory, manifest)
    keep(hashes, directory, say)
    return manifest


def keep(hashes: RecordedHashes, directory: Path, say: Callable[[str], None]) -> None:
    """Keep the hashes of files that were found right, or say once why all are read each time."""
    if (reason := hashes.save()) is not None and hashes.read_bytes:
        say(
            f"{directory}: read {hashes.read_bytes / 1e9:.1f} GB to verify it, and will at each "
            f"start, since no record of that can be kept there ({reason})"
        )


def require_nothing_else(directory: Path, manifest: Manifest) -> None:
    """Check that a checkpoint holds what its manifest lists, at any depth, and nothing else.

    Hidden entries are left out: nothing loads them, and tools keep their own notes there.

    Raises:
        CheckpointError: naming the first file, link, pipe or socket that is not listed.
    """
    for path in _entries(directory):
        name = path.relative_to(directory).as_posix()
        if name in manifest.files:
            continue
        if name not in _NOT_SEALED or not path.is_file():
            raise CheckpointError(
                f"{path}: {_kind(path)} that is not listed in {MANIFEST}; remove it"
            )


def record_validation(directory: Path, verdict: dict[str, Any]) -> None:
    """Store the last verdict in the manifest."""
    write_json_atomically(
        directory / MANIFEST, asdict(replace(read_manifest(directory), validation=verdict))
    )


def _content(directory: Path) -> list[Path]:
    """Files a manifest accounts for, in a stable order."""
    found = (path for path in _entries(directory) if path.is_file())
    return [path for path in found if path.relative_to(directory).as_posix() not in _NOT_SEALED]


def _entries(directory: Path) -> list[Path]:
    """Everything below a checkpoint that is neither hidden nor a directory, in a stable order."""

    def unreadable(error: OSError) -> NoReturn:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from error

    found: list[Path] = []
    for place, folders, files in os.walk(directory, onerror=unreadable):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        folders[:] = [
            name for name in folders if not name.startswith(".") and name != _OF_FILE_SYSTEM
        ]
        found += [Path(place) / name for name in (*files, *links) if not name.startswith(".")]
    return sorted(found)


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    kinds = {
        stat.S_ISLNK: "a link",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISREG: "a file",
    }
    return next((word for applies, word in kinds.items() if applies(mode)), "a device")
