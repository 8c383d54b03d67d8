"""What each key has used, as ``GET /admin/usage`` tells it: JSON or CSV."""

from __future__ import annotations

import csv
import io
from datetime import datetime

from pydantic import BaseModel

_COLUMNS = (
    "key",
    "model",
    "requests",
    "requests_without_usage",
    "prompt_tokens",
    "completion_tokens",
    "cost",
)


class UsageRow(BaseModel):
    """One key at one model; ``key`` is null for callers without one.

    ``cost`` is in the unit of the configured prices.
    """

    key: str | None
    model: str
    requests: int = 0
    requests_without_usage: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


class UsageReport(BaseModel):
    """Everything counted in this process since ``since``."""

    since: datetime
    usage: list[UsageRow]

    def csv(self) -> str:
        """Return the rows as CSV (RFC 4180), the names of the columns first."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(_COLUMNS)
        for row in self.usage:
            writer.writerow([getattr(row, column) for column in _COLUMNS])
        return text.getvalue()
