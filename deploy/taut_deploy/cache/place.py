"""A directory of compiled artefacts: warm, cold, or not to be used; never a reason not to start.

Layout: ``ROOT/KEY/`` with a folder for each of :data:`VARIABLES` and ``taut-cache.json``, the
marker, which `taut cache warm` writes last. vLLM, Inductor and Triton write even where they find
everything, so a warm directory that cannot be written is copied once to where vLLM's own cache
would be.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from taut_deploy.documents import read_json_object
from taut_deploy.errors import WorkerError

MARKER = "taut-cache.json"
# Each variable, and the folder below KEY that it names. vLLM keeps Inductor's artefacts below its
# own root where it can; the variable is for what is compiled outside of it.
VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


@dataclass(frozen=True)
class CachePlace:
    """Where a worker's compiled artefacts go.

    Args:
        directory: the key's directory, or a copy; None where none can be used.
        state: ``warm``: a worker with this key has answered correctly out of it; ``cold``: it is
            there to be filled; ``unused``: the worker compiles as if nothing had been asked.
        message: one line for the log.
    """

    directory: Path | None
    state: Literal["warm", "cold", "unused"]
    message: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a worker use the directory; empty where there is none."""
        if self.directory is None:
            return {}
        return {name: str(self.directory / folder) for name, folder in VARIABLES.items()}


def read_marker(directory: Path) -> dict[str, Any] | None:
    """The marker of a warm directory; None where there is none that can be read."""
    try:
        return read_json_object(directory / MARKER, WorkerError)
    except (OSError, WorkerError):
        return None


def why_not_writable(directory: Path) -> str | None:
    """Make the folders of a key and write something: rights do not tell of full or read-only disks.

    Returns:
        The reason in the system's words, or None where a worker can compile into the directory.
    """
    try:
        for folder in VARIABLES.values():
            (directory / folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(4096))
        if os.statvfs(directory).f_flag & os.ST_NOEXEC:
            # Shared objects are loaded from there: vLLM would end, not go on without.
            return "mounted noexec"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def open_cache(root: Path, key: str, environment: Mapping[str, str]) -> CachePlace:
    """Find out how the caches of ``key`` under ``root`` can be used.

    Args:
        root: the volume.
        key: of the worker that is about to start.
        environment: of that worker, without caches of ours.
    """
    # vLLM's child processes may start elsewhere.
    directory = root.absolute() / key
    warm = read_marker(directory) is not None
    refusal = why_not_writable(directory)
    if refusal is None:
        state: Literal["warm", "cold"] = "warm" if warm else "cold"
        note = "" if warm else " (this start fills it; 'taut cache warm' does so beforehand)"
        return CachePlace(directory, state, f"compile cache {directory}: {state}{note}")
    if not warm:
        message = f"compile cache {directory}: not used ({refusal}); this start compiles anew"
        return CachePlace(None, "unused", message)
    copy = _of_this_worker(environment) / key
    try:
        _copy(directory, copy)
    except (OSError, shutil.Error) as error:
        message = f"compile cache {directory}: warm, but not used ({refusal}; no copy: {error})"
        return CachePlace(None, "unused", message)
    return CachePlace(
        copy, "warm", f"compile cache {directory}: warm; {refusal}, so its copy {copy} is used"
    )


def _of_this_worker(environment: Mapping[str, str]) -> Path:
    """Beside what vLLM would keep without us: a place that its user chose to load code from."""
    root = environment.get("VLLM_CACHE_ROOT") or "~/.cache/vllm"
    return Path(root).expanduser().absolute() / "taut"


def _copy(directory: Path, target: Path) -> None:
    """Copy a warm directory, unless that was done before; whole or not at all.

    Raises:
        OSError: no room, or no right to write there.
        shutil.Error: a file cannot be read.
    """
    if read_marker(target) is not None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        shutil.copytree(directory, partial, dirs_exist_ok=True, copy_function=shutil.copyfile)
        # copytree gives folders the rights they have on the volume, where nobody may write.
        for folder, _, _ in os.walk(partial):
            Path(folder).chmod(0o700)
        partial.rename(target)
    except (OSError, shutil.Error):
        shutil.rmtree(partial, ignore_errors=True)
        # Another worker with this key may have been faster.
        if read_marker(target) is None:
            raise
