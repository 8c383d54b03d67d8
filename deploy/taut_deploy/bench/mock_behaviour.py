"""How the mock engine behaves: what it answers, how slowly, and what it does wrong.

One frozen record. It can be given on the command line, replaced while the engine runs
(``POST /mock/behaviour`` with any of the fields as JSON), or changed for one request by a query
string of the same names (``/v1/completions?fault=reset&at_byte=300``), which a gateway passes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

FAULTS = frozenset(
    {
        "",
        "hang",  # takes the request and never answers
        "stall",  # sends ``at_byte`` bytes of the answer and then nothing, connection open
        "close",  # sends ``at_byte`` bytes and ends the connection (FIN)
        "reset",  # sends ``at_byte`` bytes and resets the connection (RST)
        "kill",  # sends ``at_byte`` bytes and kills the whole engine process (SIGKILL)
        "garbage",  # answers with bytes that are not HTTP
        "bad_chunk",  # where a chunk ends after ``at_byte`` bytes, bytes that are no chunk
        "status",  # answers with ``status``
        "not_json",  # events whose data is not JSON
        "bad_utf8",  # events that are not UTF-8
        "unterminated",  # the last event lacks its blank line, and there is no [DONE]
        "trickle",  # one byte at a time, ``trickle_s`` apart
    }
)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One way to behave. Times are seconds, sizes bytes.

    Attributes:
        ttft_s: pause before the first byte of a generation.
        itl_s: pause before each further chunk; a whole answer waits for all of them.
        chunks: tokens of an answer, one event each.
        chunk_text: text of one token.
        capacity: generations at a time, 0 for no limit.
        queue: generations that may wait beyond ``capacity``; further ones get 503.
        health: status of ``GET /health``.
        fault: one of :data:`FAULTS`; "" for none.
        fault_every: the fault hits each n-th generation, 1 for all.
        at_byte: where in the response (head included) the fault strikes.
        status: of the answer under ``fault="status"``.
        trickle_s: pause between bytes under ``fault="trickle"``.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    chunks: int = 4
    chunk_text: str = " tok"
    capacity: int = 0
    queue: int = 0
    health: int = 200
    fault: str = ""
    fault_every: int = 1
    at_byte: int = 0
    status: int = 503
    trickle_s: float = 0.01

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"fault: {self.fault!r} is not one of {', '.join(sorted(FAULTS))}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"{field.name}: {value} is negative")
        if self.fault_every < 1:
            raise ValueError("fault_every: must be 1 or more")

    def changed(self, values: Mapping[str, Any]) -> Behaviour:
        """Return a copy with some fields replaced.

        Args:
            values: field name → value, or text to be read as one.

        Raises:
            ValueError: an unknown field, or a value that does not fit.
        """
        read: dict[str, Any] = {name: _read(name, value) for name, value in values.items()}
        return dataclasses.replace(self, **read)

    def for_query(self, query: str) -> Behaviour:
        """Return this behaviour as one request's query string changes it.

        Names that are no field are somebody else's and left alone.
        """
        known = {name: text for name, text in parse_qsl(query) if name in _TYPES}
        return self.changed(known) if known else self


_TYPES: dict[str, type] = {
    field.name: type(field.default) for field in dataclasses.fields(Behaviour)
}


def _read(name: str, value: Any) -> object:
    if name not in _TYPES:
        raise ValueError(f"{name}: unknown; one of {', '.join(_TYPES)}")
    try:
        return _TYPES[name](value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {value!r} does not fit") from None
