"""What exactly was compared, and on what: file hashes, versions, hardware."""

import platform
import resource
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from taut_deploy.checkpoint import MANIFEST, is_checkpoint, read_manifest, require_nothing_else
from taut_deploy.errors import CheckpointError
from taut_deploy.files import VOLATILE_FILES, digest_of_hashes, sha256_file, sha256_files
from taut_deploy.host import cpu_name
from taut_deploy.validate.errors import CouldNotValidateError

_LIBRARIES = ("taut", "torch", "transformers", "compressed-tensors", "safetensors", "numpy")


def directory_identity(path: Path, role: str) -> dict[str, Any]:
    """Describe a model directory and, if it has a manifest, check its files against it.

    Args:
        path: model directory.
        role: ``baseline`` or ``candidate``, named in errors.

    Returns:
        ``kind``, ``path``, ``bytes``, ``files`` (relative path → sha256), ``digest`` over them and,
        when there is a manifest, ``manifest_sha256``, ``recipe_hash`` and ``scheme``.

    Raises:
        CouldNotValidateError: the manifest is unreadable, or a file is not the one it lists.
    """
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and _counts(file, path)]
    found = sha256_files(files)
    hashes = {file.relative_to(path).as_posix(): digest for file, digest in found.items()}
    identity: dict[str, Any] = {
        "kind": "directory",
        "path": str(path),
        "bytes": sum(file.stat().st_size for file in files),
        "digest": digest_of_hashes(hashes),
        "files": hashes,
    }
    if is_checkpoint(path):
        try:
            manifest = read_manifest(path)
            require_nothing_else(path, manifest)
        except CheckpointError as error:
            raise CouldNotValidateError(f"--{role} {error}") from error
        for name, expected in sorted(manifest.files.items()):
            if hashes.get(name) != expected:
                state = "altered or cut short" if name in hashes else "missing"
                raise CouldNotValidateError(f"--{role} {path / name}: {state}, says {MANIFEST}")
        identity["manifest_sha256"] = sha256_file(path / MANIFEST)
        identity["recipe_hash"] = manifest.recipe_hash
        identity["scheme"] = manifest.scheme
    return identity


def _counts(file: Path, root: Path) -> bool:
    """Leave out hidden files and what changes without changing the model."""
    parts = file.relative_to(root).parts
    hidden = any(part.startswith(".") for part in parts)
    return not hidden and file.name not in VOLATILE_FILES | {MANIFEST}


def server_identity(url: str, card: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """Describe a served model by URL and ``/v1/models`` entry; its files are out of reach.

    Args:
        url: base URL.
        card: the entry.
        headers: sent with every request, without secrets.
    """
    return {"kind": "server", "url": url, "model": card, "headers": headers}


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware of this process."""
    return {
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "torch_threads": torch.get_num_threads(),
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        # Linux counts KiB.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
