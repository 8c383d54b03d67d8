"""The load a vLLM server reports on ``/metrics``: requests running and waiting, KV cache in use.

Names as vLLM's V1 engine exports them (vLLM documentation, ``design/metrics``). A server with
several data-parallel engines has one series each: requests add up, of the caches the fullest
counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
_KV_USAGE = b"vllm:kv_cache_usage_perc"


class ReportedLoad(NamedTuple):
    """One scrape.

    Attributes:
        running: requests being generated.
        waiting: requests in the server's own queue.
        kv_usage: share of the KV cache in use, 0 to 1.
        foreign: requests of ``running`` and ``waiting`` that are not this gateway's.
        at: when, seconds of the monotonic clock.
    """

    running: float
    waiting: float
    kv_usage: float
    foreign: float
    at: float


def parse_load(text: bytes, outstanding: int, at: float) -> ReportedLoad | None:
    """Read the three gauges out of a scrape without parsing the rest.

    Args:
        text: Prometheus text format.
        outstanding: this gateway's own requests at the worker, at the time of the scrape.
        at: when it was, seconds of the monotonic clock.

    Returns:
        The load, or None if the server reports no running requests: it is not vLLM.
    """
    running = list(_values(text, _RUNNING))
    if not running:
        return None
    waiting = sum(_values(text, _WAITING))
    total = sum(running) + waiting
    usage = max(_values(text, _KV_USAGE), default=0.0)
    return ReportedLoad(
        sum(running), waiting, min(1.0, max(0.0, usage)), max(0.0, total - outstanding), at
    )


def _values(text: bytes, name: bytes) -> Iterator[float]:
    """Yield the finite values of every series of a metric."""
    start = 0
    while (start := text.find(name, start)) >= 0:
        after = start + len(name)
        begins_line = start == 0 or text[start - 1] == 0x0A
        end = text.find(b"\n", after)
        line = text[after : end if end >= 0 else len(text)]
        start = after
        if not begins_line or line[:1] not in (b"{", b" "):
            continue
        # A label value may hold spaces and even braces, but the value follows the last brace.
        fields = line[line.rfind(b"}") + 1 :].split()
        try:
            value = float(fields[0])
        except (IndexError, ValueError):
            continue
        if 0.0 <= value < 1e12:
            yield value
