"""Agreement over time: bounded, right, and anew where the evidence is."""

from __future__ import annotations

from itertools import pairwise

import pytest

from taut_service.guard.betting import interval
from taut_service.guard.course import MOST_POINTS, SPACING_S, Course
from taut_service.guard.tally import Tally


class Watched:
    """A course that is told of an answer a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.course = Course(lambda: self.now, lambda: 1e9 + self.now)
        self.tally = Tally()

    def watch(self, seconds: int, disagreement: float) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.tally.add(disagreement)
            self.course.note(self.tally)


def test_points_are_what_the_tally_was_then() -> None:
    watched = Watched()
    watched.watch(1, 0.25)
    first = interval(watched.tally, 0.05)
    watched.watch(40, 0.0)
    points = watched.course.agreed(0.05)()
    assert len(points) == 1 + 40 // SPACING_S
    assert points[0].mean == pytest.approx(0.75)
    assert (points[0].low, points[0].high) == (max(0, 1 - first[1]), min(1, 1 - first[0]))
    assert points[-1].mean == pytest.approx(1 - 0.25 / 41)
    assert all(0 <= p.low <= p.mean <= p.high <= 1 for p in points)
    assert [p.at for p in points] == sorted(p.at for p in points)


def test_a_month_takes_no_more_room_than_four_minutes_and_reaches_from_end_to_end() -> None:
    watched = Watched()
    watched.watch(20_000, 0.01)
    points = watched.course.agreed(0.05)()
    assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS
    passed = [p.at - 1e9 for p in points]
    spacings = {later - before for before, later in pairwise(passed)}
    assert passed[0] < 300 and passed[-1] > 19_500
    assert max(spacings) <= 2 * min(spacings)


def test_where_evidence_begins_anew_so_does_its_course() -> None:
    watched = Watched()
    watched.watch(600, 1.0)
    watched.tally = Tally()
    watched.watch(10, 0.0)
    points = watched.course.agreed(0.05)()
    assert {p.mean for p in points} == {1.0} and len(points) == 10 // SPACING_S


def test_an_interval_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.watch(20, 0.1)
    once = watched.course.agreed(0.05)()
    monkeypatch.delattr("taut_service.guard.course.interval")
    assert watched.course.agreed(0.05)() == once
