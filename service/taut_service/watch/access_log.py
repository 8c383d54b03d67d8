"""One JSON line a request: who, what, which worker, how it ended.

Never the prompt, never the answer, never a key. A line is made from a template: of its values
only those that came from a client or the configuration need escaping, and those are few and
repeat.

Lines are gathered for ``FLUSH_S`` and written by a thread, since a pipe whose reader is slow
blocks whoever writes to it. Invariant: at most ``MAX_WAITING`` lines wait for that thread; what
comes beyond is dropped and counted, so that a stuck reader costs lines, not requests.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from queue import SimpleQueue
from typing import TextIO

from taut_service.call import CLIENT_CLOSED, Call

FLUSH_S = 0.05
MAX_WAITING = 20_000
"""About 6 MB of lines."""
CLOSE_TIMEOUT_S = 2.0
_LINE = (
    '{"time":%.3f,"id":%s,"route":"%s","model":%s,"variant":%s,"worker":%s,"status":%d,'
    '"seconds":%.6f,"stream":%s,"tries":%d,"caller":%s,"prompt_tokens":%s,"completion_tokens":%s'
    "%s}"
)
_FIRST_ERROR = 400
_escape = json.encoder.encode_basestring_ascii
# Names of models, variants, workers and callers come from the configuration: few, and repeated.
_name = lru_cache(maxsize=4096)(lambda name: _escape(name) if name else "null")


class AccessLog:
    """Takes lines from one event loop.

    Args:
        stream: where lines go; None writes nothing.
        ratio: share of the answered requests that get a line; all others always do.
        on_dropped: told how many lines were dropped.
    """

    def __init__(
        self,
        stream: TextIO | None,
        ratio: float = 1.0,
        on_dropped: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._lines: list[str] = []
        self._keep_below = int(ratio * 2**32)
        self._on_dropped = on_dropped
        self._given = 0
        self._writer = None if stream is None else _Writer(stream)

    @property
    def enabled(self) -> bool:
        """Whether lines are wanted; False once the reader went away."""
        return self._writer is not None and not self._writer.broken

    def request(self, call: Call, seconds: float, trace_id: str = "") -> None:
        """Queue the line of an ended request.

        Args:
            call: the request.
            seconds: from arrival to its end.
            trace_id: of its trace, ``""`` where it has none.
        """
        status = call.answer.status or CLIENT_CLOSED
        if status < _FIRST_ERROR and not self._is_sampled(call.request_id):
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        usage = call.answer.usage
        self._lines.append(
            _LINE
            % (
                time.time(),
                _escape(call.request_id.decode("latin-1")),
                call.route.name,
                _name(call.model),
                _name(call.routed.variant),
                _name(call.routed.worker),
                status,
                seconds,
                "true" if call.streaming else "false",
                call.routed.tries,
                _name(call.admitted.caller),
                usage.prompt_tokens if usage else "null",
                usage.completion_tokens if usage else "null",
                f',"trace_id":"{trace_id}"' if trace_id else "",
            )
        )

    def _is_sampled(self, request_id: bytes) -> bool:
        keep_below = self._keep_below
        # A request that arrives again, at another replica or hop, falls on the same side.
        return keep_below >= 2**32 or zlib.crc32(request_id) < keep_below

    def flush(self) -> None:
        """Hand what is gathered to the writing thread, or drop it if that is far behind."""
        lines, self._lines = self._lines, []
        writer = self._writer
        if writer is None or not lines or writer.broken:
            return
        if self._given - writer.written + len(lines) > MAX_WAITING:
            self._on_dropped(len(lines))
            return
        self._given += len(lines)
        writer.batches.put(lines)

    async def close(self) -> None:
        """Write the rest, for as long as ``CLOSE_TIMEOUT_S``; no lines are taken after it."""
        self.flush()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)


class _Writer:
    """A thread that writes batches; it may be stuck in a write when the process ends."""

    def __init__(self, stream: TextIO) -> None:
        self.batches: SimpleQueue[list[str] | None] = SimpleQueue()
        self.written = 0
        self.broken = False
        self._write = _writer_to(stream)
        self._runner = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._runner.start()

    def close(self) -> None:
        self.batches.put(None)
        self._runner.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (lines := self.batches.get()) is not None:
            if not self.broken:
                try:
                    self._write("\n".join(lines) + "\n")
                except OSError:
                    # The reader went away: the log falls silent, the gateway goes on.
                    self.broken = True
            self.written += len(lines)


def _writer_to(stream: TextIO) -> Callable[[str], object]:
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return stream.write

    def write(text: str) -> None:
        # Past Python's buffer: its lock, held by a thread that is stuck in a write, would make the
        # interpreter abort at its end.
        data = memoryview(text.encode())
        while data:
            written = os.write(descriptor, data)
            data = data[written:]

    return write
