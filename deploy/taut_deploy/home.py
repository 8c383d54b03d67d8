"""Where taut keeps what it fetched and made: ``$TAUT_HOME``, by default ``~/.cache/taut``."""

import os
from dataclasses import dataclass
from pathlib import Path

from taut_deploy.errors import OutputError


@dataclass(frozen=True)
class TautHome:
    """The directories of one taut installation.

    Args:
        root: directory that holds everything below.
    """

    root: Path

    @classmethod
    def from_environment(cls) -> "TautHome":
        """Read ``TAUT_HOME``; the only place that does.

        Raises:
            OutputError: it cannot be a directory.
        """
        configured = os.environ.get("TAUT_HOME")
        if not configured:
            return cls(Path.home() / ".cache" / "taut")
        root = Path(configured)
        reason = _why_unusable(root)
        if reason is not None:
            raise OutputError(f"TAUT_HOME={configured[:80]!r}: {reason}; name a directory")
        return cls(root)

    @property
    def models(self) -> Path:
        """Fetched models, one HF directory each."""
        return self.root / "models"

    @property
    def tasks(self) -> Path:
        """Fetched tasks, a file of items each."""
        return self.root / "tasks"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints that ``taut serve`` compressed by itself."""
        return self.root / "checkpoints"

    @property
    def compiled(self) -> Path:
        """What the workers of ``taut serve`` compiled on a CPU (see :mod:`taut_deploy.cache`)."""
        return self.root / "compiled"

    @property
    def run(self) -> Path:
        """Configuration and logs of the running ``taut serve``."""
        return self.root / "run"


def _why_unusable(root: Path) -> str | None:
    """Why nothing can be kept in ``root``, as far as that shows without writing; None if it can."""
    if not str(root).isprintable():
        return "it holds control characters"
    try:
        for place in (root, *root.absolute().parents):
            if place.exists():
                return None if place.is_dir() else f"{place} is not a directory"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
