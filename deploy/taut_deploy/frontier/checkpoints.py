"""The checkpoints of tries: which are there, what their manifests say, and which are removed."""

from pathlib import Path
from typing import Any

from taut_deploy.checkpoint import MANIFEST, is_checkpoint, read_manifest, record_validation, verify
from taut_deploy.documents import read_json_object
from taut_deploy.errors import CheckpointError
from taut_deploy.frontier.ledger import Try
from taut_deploy.removal import is_own_child, remove_child
from taut_deploy.verdict_record import unsigned

_LOG = "compression_log.json"


class Checkpoints:
    """Directories of one folder, by the place of their candidate.

    Args:
        folder: that holds them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def holds(self, place: str, entry: Try) -> bool:
        """Whether the checkpoint that a try was about is on the disk, with all its files.

        Raises:
            CheckpointError: its manifest cannot be read, or a file is not the one it lists.
        """
        directory = self._folder / place
        if not is_checkpoint(directory):
            return False
        if read_manifest(directory).digest != entry.checkpoint_digest:
            return False
        try:
            verify(directory)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; for that remove {directory} and repeat the command"
            ) from error
        return True

    def seconds(self, place: str) -> float:
        """How long making a checkpoint took, as its log says; 0 for recipes that write none.

        Raises:
            CheckpointError: the log cannot be read.
        """
        try:
            log = read_json_object(self._folder / place / _LOG, CheckpointError)
        except FileNotFoundError:
            return 0.0
        seconds = log.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    def verdict(self, place: str) -> dict[str, Any]:
        """The verdict in a checkpoint's manifest; empty where there is none."""
        return read_manifest(self._folder / place).validation or {}

    def record(self, place: str, entry: Try) -> None:
        """Write a try's verdict into the manifest of its checkpoint, unless it is there."""
        if unsigned(self.verdict(place)) != unsigned(entry.recorded):
            record_validation(self._folder / place, entry.recorded)

    def remove(self, place: str) -> None:
        """Remove a try's checkpoint, and what a refused one left half made.

        Args:
            place: of the checkpoint; nothing need be there.
        """
        left = {
            place: (MANIFEST,),
            f".{place}.partial": (".state",),
            f".{place}.stages": ("taut-stages.json",),
        }
        for name, markers in left.items():
            if (self._folder / name).exists() and is_own_child(self._folder / name, markers):
                remove_child(self._folder, name, markers)
        (self._folder / f".{place}.lock").unlink(missing_ok=True)
