"""Which tallies are in use, so that all of them can be brought in before metrics are read.

Those of one owner, a model or a route of it, are a group, and end with it. Never compiled: what
mypyc makes of a class must not be referenced weakly (mypy 2.4.1: its end is not told, and the next
look at the reference crashes).
"""

from __future__ import annotations

from weakref import WeakSet

from prometheus_client import Counter, Histogram

from taut_service.watch.tally import CounterTally, HistogramTally


class TallyGroup:
    """Makes the tallies of one owner, who keeps the group for as long as it counts."""

    def __init__(self) -> None:
        self._tallies: list[CounterTally | HistogramTally] = []

    def counter(self, child: Counter) -> CounterTally:
        """Return what counts for a child of a counter."""
        tally = CounterTally(child)
        self._tallies.append(tally)
        return tally

    def histogram(self, child: Histogram) -> HistogramTally:
        """Return what records for a child of a histogram."""
        tally = HistogramTally(child)
        self._tallies.append(tally)
        return tally

    def bring_in(self) -> None:
        """Hand over everything."""
        for tally in self._tallies:
            tally.bring_in()


class Tallies:
    """Knows the groups that are in use. Belongs to one event loop."""

    def __init__(self) -> None:
        self._groups: WeakSet[TallyGroup] = WeakSet()

    def group(self) -> TallyGroup:
        """Return a new group, known for as long as somebody else keeps it."""
        group = TallyGroup()
        self._groups.add(group)
        return group

    def bring_in(self) -> None:
        """Hand over everything; call before metrics are read."""
        for group in self._groups:
            group.bring_in()
