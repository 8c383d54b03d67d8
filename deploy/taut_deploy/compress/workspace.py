"""The hidden directory a compression works in: what is committed there survives ``kill -9``.

Layout of ``.NAME.partial/`` beside the output: the files of the checkpoint to be, and ``.state/``
with the fingerprint, the calibration tokens, the hidden states entering the next block, and one
commit marker per block. A block counts as done when its marker exists; the marker is renamed into
place after everything it stands for.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file

from taut_deploy.checkpoint import Manifest, is_checkpoint, read_manifest
from taut_deploy.compress.tensor_file import ROWS, write_rows, write_tensors
from taut_deploy.documents import read_json
from taut_deploy.errors import OutputError
from taut_deploy.files import (
    disk_errors_named,
    fsync_path,
    write_json_atomically,
)
from taut_deploy.removal import is_own_child, remove_child

_FINGERPRINT = "fingerprint.json"
_STATE = ".state"


class Workspace:
    """Durable intermediate state of one compression.

    Args:
        output: final checkpoint directory.
        fingerprint: everything that determines the result; another fingerprint means starting over.
        resume: False discards what an earlier run left.

    Raises:
        OutputError: if ``output`` exists, or the hidden directory is not one of ours.
    """

    def __init__(self, output: Path, fingerprint: Mapping[str, Any], resume: bool) -> None:
        self.directory = output.parent / f".{output.name}.partial"
        self._state = self.directory / _STATE
        self._output = output
        self.resumed = False
        with disk_errors_named(self.directory):
            self._open(dict(fingerprint), resume)

    def _open(self, fingerprint: dict[str, Any], resume: bool) -> None:
        found = self._state / _FINGERPRINT
        if self.directory.exists() or self.directory.is_symlink():
            if not is_own_child(self.directory, (_STATE,)):
                raise OutputError(
                    f"{self.directory}: exists and was not made by taut; move it away"
                )
            if resume and found.is_file() and read_json(found, OutputError) == fingerprint:
                self.resumed = True
                return
            self._discard(found)
        self._state.mkdir(parents=True)
        write_json_atomically(found, fingerprint)

    def _discard(self, fingerprint: Path) -> None:
        """Remove everything; ``.state`` goes last, so that a kill in between leaves it ours."""
        # First of all: without it no later run takes the rest for a state to resume.
        fingerprint.unlink(missing_ok=True)
        remove_child(self.directory.parent, self.directory.name, (_STATE,))

    def tensors(self, name: str) -> dict[str, torch.Tensor] | None:
        """State tensors saved under ``name``, or None; their memory is that of the file."""
        path = self._state / f"{name}.safetensors"
        return load_file(path) if path.is_file() else None

    def save_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Save state tensors durably."""
        write_tensors(self._state / f"{name}.safetensors", tensors)

    def rows(self, name: str) -> torch.Tensor | None:
        """What :meth:`save_rows` saved under ``name``, or None; its memory is that of the file."""
        found = self.tensors(name)
        return None if found is None else found[ROWS]

    def save_rows(self, name: str, rows: int, batches: Iterable[torch.Tensor]) -> None:
        """Save one tensor durably, of which no more than a batch is in memory."""
        write_rows(self._state / f"{name}.safetensors", rows, batches)

    def drop_tensors(self, name: str) -> None:
        """Forget state tensors that are no longer needed."""
        (self._state / f"{name}.safetensors").unlink(missing_ok=True)

    def save_shard(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write one shard of the checkpoint durably."""
        write_tensors(self.directory / name, tensors)

    def commit(self, name: str, value: Any) -> None:
        """Mark a step as done, with its small result."""
        write_json_atomically(self._state / f"{name}.json", value)

    def committed(self, name: str) -> Any:
        """The result of a step, or None if it is not done."""
        path = self._state / f"{name}.json"
        return read_json(path, OutputError) if path.is_file() else None

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of a step, made and committed where it is not done."""
        value = self.committed(name)
        if value is None:
            value = make()
            self.commit(name, value)
        return value

    def publish(self) -> None:
        """Rename the finished checkpoint into its place.

        The rename is the commit: before it everything needed to go on is still there, after it only
        ``.state`` is left to remove, which :func:`remove_leftovers` does if we are killed first.
        """
        with disk_errors_named(self._output):
            for path in self.directory.iterdir():
                if path.name.startswith("."):
                    if path.is_file():  # a temporary that a killed run left
                        path.unlink()
                else:
                    fsync_path(path)
            self.directory.rename(self._output)
            fsync_path(self._output.parent)
        remove_leftovers(self._output)


def remove_leftovers(output: Path) -> None:
    """Remove the state a run that was killed right after publishing left in the checkpoint."""
    # Two processes may both find it; whatever one of them cannot remove, the other does. What is
    # not ours stays: it is no part of the checkpoint.
    with contextlib.suppress(OSError, OutputError):
        remove_child(output, _STATE, (_FINGERPRINT,))


@contextlib.contextmanager
def sole_writer(output: Path, command: str) -> Iterator[None]:
    """Hold the lock on an output while it is written; its parent is made if need be.

    Args:
        output: directory to make.
        command: for the message, such as ``taut compress``.

    Raises:
        OutputError: another process is writing it.
    """
    lock = FileLock(output.parent / f".{output.name}.lock", timeout=0)
    try:
        with contextlib.ExitStack() as held:
            with disk_errors_named(output):
                output.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock)
            yield
    except Timeout as error:
        raise OutputError(
            f"{output}: another '{command}' is writing it; wait for it or end it"
        ) from error


def finished_result(output: Path, recipe_hash: str) -> Manifest | None:
    """The finished result if it is this very one, None if nothing is there.

    Args:
        output: directory that was asked for.
        recipe_hash: of everything that determines the result.

    Raises:
        OutputError: something else stands in its place.
    """
    if output.is_symlink():
        raise OutputError(f"{output}: is a link; give the directory itself as --output")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if is_checkpoint(output) and (found := read_manifest(output)).recipe_hash == recipe_hash:
        remove_leftovers(output)
        return found
    raise OutputError(f"{output}: holds something else; choose another --output or remove it")
