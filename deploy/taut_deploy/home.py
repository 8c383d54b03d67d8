"""Where taut keeps what it fetched and made: ``$TAUT_HOME``, by default ``~/.cache/taut``."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TautHome:
    """The directories of one taut installation.

    Args:
        root: directory that holds everything below.
    """

    root: Path

    @classmethod
    def from_environment(cls) -> "TautHome":
        """Read ``TAUT_HOME``; the only place that does."""
        configured = os.environ.get("TAUT_HOME")
        return cls(Path(configured) if configured else Path.home() / ".cache" / "taut")

    @property
    def models(self) -> Path:
        """Fetched models, one HF directory each."""
        return self.root / "models"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints that ``taut serve`` compressed by itself."""
        return self.root / "checkpoints"

    @property
    def run(self) -> Path:
        """Configuration and logs of the running ``taut serve``."""
        return self.root / "run"
