"""The state that all connections of one mock engine share: behaviour, counters, who waits."""

from __future__ import annotations

import json
from collections import deque
from typing import Protocol

from taut_deploy.bench.mock_answers import document, error
from taut_deploy.bench.mock_behaviour import Behaviour

MAX_NOTES = 50
_COUNTERS = (
    "started",
    "completed",
    "aborted",
    "faulted",
    "refused",
    "peak",
    "connections",
    "connections_opened",
    "requests",
    "malformed",
    "malformed_requests",
    "scrapes",
)


class Generating(Protocol):
    """A connection with a generation that is running or waits for a place."""

    def begin(self) -> None:
        """Take the place that has become free."""

    def mark(self) -> str:
        """Return the request's mark, "" without one."""


class MockEngine:
    """One engine.

    Args:
        behaviour: to begin with.
        strict: whether requests are checked.
    """

    def __init__(self, behaviour: Behaviour, strict: bool = False) -> None:
        self.behaviour = behaviour
        self.strict = strict
        self.running = self.peak = 0
        self.started = self.completed = self.aborted = self.faulted = self.refused = 0
        self.connections = self.connections_opened = self.requests = 0
        self.aborts: list[tuple[str, float]] = []
        self.malformed: list[str] = []
        self.malformed_requests = self.scrapes = 0
        self.busy: set[Generating] = set()
        self.waiting: deque[Generating] = deque()

    @property
    def plain(self) -> bool:
        """Whether a whole generation is one write."""
        b = self.behaviour
        return not (b.ttft_s or b.itl_s or b.fault or b.capacity)

    def note(self, reason: str) -> None:
        """Write down a malformed request."""
        self.malformed_requests += 1
        if len(self.malformed) < MAX_NOTES:
            self.malformed.append(reason)

    def state(self) -> bytes:
        """Return the counters as a response."""
        state = {name: getattr(self, name) for name in _COUNTERS}
        state |= {"open": len(self.busy), "waiting": len(self.waiting)}
        return document(200, json.dumps(state, allow_nan=False).encode())

    def metrics(self) -> bytes:
        """Return what vLLM's ``/metrics`` says of load, as a response."""
        self.scrapes += 1
        capacity = self.behaviour.capacity or 256
        values = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": len(self.waiting),
            "vllm:kv_cache_usage_perc": min(1.0, self.running / capacity),
            "vllm:prompt_tokens_total": 5 * self.completed,
            "vllm:generation_tokens_total": self.behaviour.chunks * self.completed,
        }
        lines = []
        for name, value in values.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f'# TYPE {name} {kind}\n{name}{{model_name="m",engine="0"}} {value}\n')
        return document(200, "".join(lines).encode(), b"text/plain; version=0.0.4")

    def change(self, body: bytes) -> bytes:
        """Apply a new behaviour and return the response."""
        try:
            self.behaviour = self.behaviour.changed(json.loads(body))
        except (ValueError, AttributeError) as problem:
            return error(400, str(problem))
        return document(200, b"{}")

    def open_marks(self) -> bytes:
        """Return the marks of open generations, as a response."""
        return document(
            200, json.dumps([one.mark() for one in self.busy], allow_nan=False).encode()
        )

    def take_aborts(self) -> bytes:
        """Return and forget which generations were broken off, as a response."""
        aborts, self.aborts = self.aborts, []
        return document(200, json.dumps(aborts, allow_nan=False).encode())
