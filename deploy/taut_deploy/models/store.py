"""The model store: one directory per model, complete or absent.

A fetch builds the model in a hidden sibling directory under a lock and renames it into place, so a
reader never sees half a model and two fetchers never work on the same one. A model of one source is
not replaced by one of another unless the user says so.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, ValidationError

from taut_deploy.documents import first_problem, read_json
from taut_deploy.errors import ModelError, OutputError
from taut_deploy.files import (
    digest_of_hashes,
    disk_errors_named,
    fsync_path,
    sha256_files,
    write_json_atomically,
)
from taut_deploy.models.catalog import CATALOG, PackagedGguf
from taut_deploy.models.directory import model_files, require_model_directory
from taut_deploy.models.download import resolve_hub_revision
from taut_deploy.models.fill import PHASES, Source, fill
from taut_deploy.models.gguf_parts import digest_of_parts, stem_of
from taut_deploy.models.names import (
    belongs_to_catalogue,
    checked_name,
    checked_reference,
    hub_id_and_revision,
    is_hub_id,
    is_name,
    name_of_gguf,
    name_of_hub_id,
    stored_name,
)
from taut_deploy.models.pickled import pickled_files
from taut_deploy.progress import Report, no_report
from taut_deploy.recorded_hashes import RecordedHashes
from taut_deploy.removal import is_own_child, remove_child

RECORD_FILE = "taut-model.json"
_PARTIAL_MARKER = ".taut-partial"
# Either says that the store made a directory: a finished model, or one being made.
_MARKERS = (RECORD_FILE, _PARTIAL_MARKER)
_LOCK_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class ModelRecord:
    """A model that is on disk.

    Args:
        name: store name, or the path's last part for a local directory.
        path: absolute directory.
        digest: ``sha256:`` over the hashes of its configuration, tokenizer and weight files.
        bytes: size of those files.
        source: where it came from, in words.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: str
    path: str
    digest: str
    bytes: int
    source: str

    def as_json(self) -> dict[str, object]:
        """The record as plain data."""
        return asdict(self)


_RECORD = TypeAdapter(ModelRecord)


class ModelStore:
    """Fetches, lists and finds models below one directory.

    Args:
        root: directory of the store; created on the first fetch.
        lock_timeout_s: how long to wait for another fetcher of the same model, seconds.
        progress: told which of a fetch's phases begins.
    """

    def __init__(
        self,
        root: Path,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
        progress: Report = no_report,
    ) -> None:
        self._root = root
        self._progress = progress
        self._lock_timeout_s = lock_timeout_s

    def list(self) -> list[ModelRecord]:
        """Every complete model in the store, by name."""
        if not self._root.is_dir():
            return []
        records = [read_record(path) for path in sorted(self._root.iterdir())]
        return [record for record in records if record is not None]

    def fetch(self, reference: str, *, force: bool = False) -> ModelRecord:
        """Make ``reference`` available on disk and say where.

        Args:
            reference: a catalogue name, a name in the store, a local HF directory, a GGUF file, or
                a hub id ``owner/name`` or ``owner/name@REVISION``. A directory of pickled weights
                is rewritten into the store. Without a revision, what the store has is taken as it
                is; else the newest commit of the main branch.
            force: replace a model of the same name that came from elsewhere.

        Raises:
            ModelError: not found, offline, altered, not a causal LM directory, or its name is
                taken by a model from elsewhere.
        """
        path = Path(os.path.expanduser(checked_reference(reference)))  # noqa: PTH111 - never raises
        if os.path.isdir(path):  # noqa: PTH112 - a name that is too long is no directory
            pickles = pickled_files(path)
            if not pickles:
                return describe_directory(path)
            digest = digest_of_hashes({one.name: sha for one, sha in sha256_files(pickles).items()})
            name = checked_name(path.resolve().name, str(path))
            return self._materialise(name, f"pickle {digest}", path.absolute(), force=force)
        if reference in CATALOG:
            source = CATALOG[reference]
            origin = f"{source.package}=={source.version} ({source.licence})"
            return self._materialise(source.name, origin, source, force=force)
        if path.suffix.lower() == ".gguf":
            if not os.path.isfile(path):  # noqa: PTH113 - likewise
                raise ModelError(f"{path}: no such GGUF file")
            name = name_of_gguf(stem_of(path), str(path))
            origin = f"gguf {digest_of_parts(path)}"
            return self._materialise(name, origin, path.absolute(), force=force)
        if is_hub_id(reference):
            return self._fetch_from_hub(reference, force=force)
        stored = read_record(self._root / reference) if is_name(reference) else None
        if stored is not None:
            return stored
        raise ModelError(
            f"{reference!r}: no such model; give one of {', '.join(sorted(CATALOG))}, "
            "a name of 'taut model list', "
            "a Hugging Face id 'owner/name' or 'owner/name@REVISION', "
            "a local model directory or a .gguf file"
        )

    def find(self, reference: str) -> ModelRecord:
        """Like :meth:`fetch`, but only what is on disk already.

        Raises:
            ModelError: if it would have to be downloaded.
        """
        path = Path(os.path.expanduser(checked_reference(reference)))  # noqa: PTH111 - never raises
        if os.path.isdir(path):  # noqa: PTH112 - a name that is too long is no directory
            return describe_directory(path)
        name = stored_name(reference)
        record = read_record(self._root / name) if is_name(name) else None
        if record is None:
            raise ModelError(
                f"{reference!r}: not in the model store; run 'taut model fetch {reference}' first"
            )
        return record

    def _fetch_from_hub(self, reference: str, *, force: bool) -> ModelRecord:
        model_id, revision = hub_id_and_revision(reference)
        name = name_of_hub_id(model_id, revision)
        existing = read_record(self._root / name)
        # Neither of these can have moved, so no hub is asked.
        fixed = (None, existing.source.rpartition("@")[2] if existing else None)
        if existing and existing.source.startswith(f"hub {model_id}@") and revision in fixed:
            return existing
        source = resolve_hub_revision(model_id, revision)
        return self._materialise(name, f"hub {source}", source, force=force)

    def _materialise(self, name: str, origin: str, source: Source, *, force: bool) -> ModelRecord:
        target = self._root / checked_name(name, origin)
        with disk_errors_named(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
        try:
            with self._locked(name):
                existing = read_record(target)
                if existing is not None and existing.source == origin:
                    return existing
                if not force:
                    _require_same_source(target, existing, origin, source)
                return self._build(target, origin, source)
        except Timeout as error:
            raise ModelError(
                f"{name}: another process has been fetching it for {self._lock_timeout_s:.0f} s; "
                "wait for it, or end it and try again"
            ) from error

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of one model; its file is gone afterwards.

        The file is removed while the lock is held. Whoever waited on the removed one notices (a
        file without links guards nothing) and takes the lock anew.
        """
        file = self._root / f".{name}.lock"
        with FileLock(file, timeout=self._lock_timeout_s):
            try:
                yield
            finally:
                file.unlink(missing_ok=True)

    def _build(self, target: Path, origin: str, source: Source) -> ModelRecord:
        self._remove_stale(target.name)
        partial = self._root / f".{target.name}.partial-{secrets.token_hex(4)}"
        try:
            with disk_errors_named(target):
                partial.mkdir()
                (partial / _PARTIAL_MARKER).touch()
                fill(partial, source, self._progress, _MARKERS)
                # Before they are hashed: it changes what the record of hashes compares.
                _give_rights_of(partial / _PARTIAL_MARKER, partial)
                self._progress(2, PHASES, f"hashing {target.name}")
                hashes = RecordedHashes(partial, "full")
                found = describe_directory(partial, hashes)
                place = str(target.resolve())
                record = replace(found, name=target.name, path=place, source=origin)
                write_json_atomically(partial / RECORD_FILE, record.as_json())
                hashes.save()
                (partial / _PARTIAL_MARKER).unlink()
                self._replace(target, partial)
                fsync_path(self._root)
        finally:
            if partial.exists():
                remove_child(self._root, partial.name, _MARKERS)
        return record

    def _replace(self, target: Path, partial: Path) -> None:
        """Rename ``partial`` into its place; what stands there goes away only afterwards."""
        if not target.exists() and not target.is_symlink():
            partial.rename(target)
            return
        if not is_own_child(target, _MARKERS):
            raise OutputError(f"{target}: was not made by taut; move it away")
        old = self._root / f".{target.name}.partial-{secrets.token_hex(4)}"
        target.rename(old)
        partial.rename(target)
        remove_child(self._root, old.name, _MARKERS)

    def _remove_stale(self, name: str) -> None:
        """Remove what killed fetchers of this model left: we hold its lock, so they are gone."""
        pattern = re.compile(rf"\.{re.escape(name)}\.partial-[0-9a-f]+")
        for path in self._root.iterdir():
            if pattern.fullmatch(path.name) and is_own_child(path, _MARKERS):
                remove_child(self._root, path.name, _MARKERS)


def _require_same_source(
    target: Path, existing: ModelRecord | None, origin: str, source: Source
) -> None:
    """Refuse to put a model where one from elsewhere is or belongs.

    Raises:
        ModelError: naming both and the way out.
        OutputError: what is there was not made by the store.
    """
    if belongs_to_catalogue(target.name) and not isinstance(source, PackagedGguf):
        raise ModelError(
            f"{target.name}: the catalogue's name for another model; rename the file, or put this "
            "one in its place with 'taut model fetch --force'"
        )
    if existing is None:
        if target.exists() or target.is_symlink():
            raise OutputError(f"{target}: exists and was not made by taut; move it away")
        return
    newer = isinstance(source, PackagedGguf) and existing.source.startswith(f"{source.package}==")
    if not newer:
        raise ModelError(
            f"{target.name}: the store holds a model of this name from {_short(existing.source)}, "
            f"this one is from {_short(origin)}; rename the file, or replace it with "
            "'taut model fetch --force'"
        )


def _short(origin: str) -> str:
    return re.sub(r"(sha256:[0-9a-f]{12})[0-9a-f]+", r"\1", origin)


def _give_rights_of(written: Path, directory: Path) -> None:
    """Let all files be as readable as one that was opened plainly, which the umask decides."""
    mode = written.stat().st_mode & 0o777
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def describe_directory(directory: Path, hashes: RecordedHashes | None = None) -> ModelRecord:
    """Hash a model directory and describe it; without ``hashes`` every file is read.

    Raises:
        ModelError: if it is not a causal LM directory with complete safetensors.
    """
    require_model_directory(directory)
    hashes = hashes or RecordedHashes(directory, "full")
    names = [str(file.relative_to(directory)) for file in model_files(directory)]
    return ModelRecord(
        name=directory.resolve().name,
        path=str(directory.resolve()),
        digest=digest_of_hashes(dict(hashes.of(names))),
        bytes=sum((directory / name).stat().st_size for name in names),
        source="local directory",
    )


def read_record(directory: Path) -> ModelRecord | None:
    """What the store wrote about the model in ``directory``; None where it wrote nothing.

    Raises:
        ModelError: if the record is damaged.
    """
    record_file = directory / RECORD_FILE
    if directory.name.startswith(".") or not record_file.is_file():
        return None
    try:
        # As JSON: there, strict types still let an object be a dataclass.
        return _RECORD.validate_json(json.dumps(read_json(record_file, ModelError), allow_nan=True))
    except (ValidationError, ModelError) as error:
        wrong = first_problem(error) if isinstance(error, ValidationError) else str(error)
        reason = wrong.removeprefix(f"{record_file}: ")
        raise ModelError(
            f"{record_file}: damaged ({reason}); remove {directory} and fetch it again"
        ) from error
