"""What each key has used of each model since the start: for the bill, and as metrics.

Only what workers report counts; a request whose worker told nothing (its client left a stream, the
worker broke off) is counted as such. Label values of metrics are bounded: the first ``max_keys``
keys that are used have their own, all further ones and callers without a key share ``other``.
"""

from __future__ import annotations

from datetime import UTC, datetime

from taut_service.config.settings import Settings
from taut_service.http.sse import Usage
from taut_service.watch.families import Families
from taut_service.watch.usage_report import UsageReport, UsageRow

OTHER = "other"


class _Counted:
    """What a row will say; a pydantic model checks every assignment."""

    __slots__ = ("completion_tokens", "cost", "prompt_tokens", "requests", "without_usage")

    def __init__(self) -> None:
        self.requests = self.without_usage = self.prompt_tokens = self.completion_tokens = 0
        self.cost = 0.0

    def row(self, key: str | None, model: str) -> UsageRow:
        return UsageRow(
            key=key,
            model=model,
            requests=self.requests,
            requests_without_usage=self.without_usage,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cost=self.cost,
        )


class _Series:
    """The metric children of one key at one model."""

    def __init__(self, families: Families, labels: tuple[str, str]) -> None:
        self.labels = labels
        self._tallies = families.tallies.group()
        counter = self._tallies.counter
        self.requests = counter(families.key_requests.labels(*labels))
        self.prompt_tokens = counter(families.key_prompt_tokens.labels(*labels))
        self.generated_tokens = counter(families.key_generated_tokens.labels(*labels))
        self.cost = counter(families.key_cost.labels(*labels))


class KeyUsage:
    """Counts by key and model. Belongs to one event loop.

    Args:
        families: where the metrics belong.
        max_keys: that have a label of their own.
    """

    def __init__(self, families: Families, max_keys: int) -> None:
        self.max_keys = max_keys
        self._families = families
        self._since = datetime.now(UTC)
        self._named: set[str] = set()
        self._dropped: set[tuple[str, str]] = set()
        self._rows: dict[tuple[str | None, str], tuple[_Counted, _Series]] = {}

    def count(self, key: str | None, model: str, usage: Usage | None, cost: float) -> None:
        """Count one request that a worker took.

        Args:
            key: the caller's name, None without one.
            model: public name of a configured model.
            usage: tokens, where the worker told.
            cost: of them.
        """
        found = self._rows.get((key, model))
        if found is None:
            found = _Counted(), _Series(self._families, (self._label(key), model))
            self._rows[key, model] = found
        row, series = found
        row.requests += 1
        series.requests.inc()
        if usage is None:
            row.without_usage += 1
            return
        row.prompt_tokens += usage.prompt_tokens
        row.completion_tokens += usage.completion_tokens
        row.cost += cost
        series.prompt_tokens.inc(usage.prompt_tokens)
        series.generated_tokens.inc(usage.completion_tokens)
        series.cost.inc(cost)

    def report(self) -> UsageReport:
        """Return what was counted, by key and model."""
        rows = (row.row(*place) for place, (row, _) in self._rows.items())
        ordered = sorted(rows, key=lambda row: (row.key or "", row.model))
        return UsageReport(since=self._since, usage=ordered)

    def follow(self, settings: Settings) -> None:
        """Drop the series of models that are served no longer; the report keeps its rows.

        Args:
            settings: in force from now on.
        """
        self.max_keys = settings.metrics.max_keys
        models = {model.name for model in settings.models}
        gone = {
            series.labels for _, series in self._rows.values() if series.labels[1] not in models
        }
        for labels in gone - self._dropped:
            self._families.key_requests.remove(*labels)
            self._families.key_prompt_tokens.remove(*labels)
            self._families.key_generated_tokens.remove(*labels)
            self._families.key_cost.remove(*labels)
        # Requests under way still count into series that nobody sees; those of models that are
        # served again into new ones.
        for place, (row, series) in self._rows.items():
            if series.labels in self._dropped - gone:
                self._rows[place] = row, _Series(self._families, series.labels)
        self._dropped = gone

    def _label(self, key: str | None) -> str:
        if key is None or key == OTHER:
            return OTHER
        if key not in self._named:
            if len(self._named) >= self.max_keys:
                return OTHER
            self._named.add(key)
        return key
