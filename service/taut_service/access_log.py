"""One JSON line a request: who, what, which worker, how it ended.

Never the prompt, never the answer, never a key.

Lines are gathered for ``FLUSH_S`` and written in one call; the lifespan writes the rest.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, TextIO

FLUSH_S = 0.05


class AccessLog:
    """Writes to a stream from one event loop.

    Args:
        stream: where lines go; None writes nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self.enabled = stream is not None

    def write(self, record: dict[str, Any]) -> None:
        """Queue one line. ``record`` holds JSON scalars only."""
        if self._stream is None:
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        self._lines.append(json.dumps(record, separators=(",", ":")))

    def flush(self) -> None:
        """Write what is queued; a reader that went away silences the log, not the gateway."""
        if self._stream is None or not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            self._stream = None
            self.enabled = False
