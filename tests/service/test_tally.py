"""What is counted beside the library's metrics is in them whenever they are read."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from taut_service.watch import tally
from taut_service.watch.metrics import Metrics
from taut_service.watch.tallies import Tallies, TallyGroup


def test_counts_and_observations_arrive_when_they_are_brought_in() -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "c", ["a"], registry=registry)
    histogram = Histogram("h", "h", ["a"], registry=registry, buckets=(1, 2))
    tallies = Tallies()
    group = tallies.group()
    counted, observed = group.counter(counter.labels("x")), group.histogram(histogram.labels("x"))
    for amount in (0.5, 1.5, 1.5, 9):
        observed.observe(amount)
        counted.inc(amount)
    counted.inc()
    assert registry.get_sample_value("c_total", {"a": "x"}) == 0
    for _ in range(2):  # again changes nothing
        tallies.bring_in()
        assert registry.get_sample_value("c_total", {"a": "x"}) == 13.5
        assert registry.get_sample_value("h_sum", {"a": "x"}) == 12.5
        buckets = [
            registry.get_sample_value("h_bucket", {"a": "x", "le": le})
            for le in ("1.0", "2.0", "+Inf")
        ]
        assert buckets == [1, 3, 4]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.0000001, 2.0, 3.5, 1e9]), max_size=50))
def test_observations_fall_where_the_library_puts_them(amounts: list[float]) -> None:
    registry = CollectorRegistry()
    ours, theirs = (
        Histogram(name, name, ["a"], registry=registry, buckets=(0, 1, 2)).labels("x")
        for name in ("ours", "theirs")
    )
    observed = TallyGroup().histogram(ours)
    for amount in amounts:
        observed.observe(amount)
        theirs.observe(amount)
    observed.bring_in()
    for name in ("count", "sum"):
        told = [
            registry.get_sample_value(f"{who}_{name}", {"a": "x"}) for who in ("ours", "theirs")
        ]
        assert told[0] == pytest.approx(told[1])
    for le in ("0.0", "1.0", "2.0", "+Inf"):
        labels = {"a": "x", "le": le}
        ours_le, theirs_le = (
            registry.get_sample_value(f"{who}_bucket", labels) for who in ("ours", "theirs")
        )
        assert ours_le == theirs_le


def test_observations_are_kept_within_a_bound() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "h", ["a"], registry=registry)
    observed = TallyGroup().histogram(histogram.labels("x"))
    for _ in range(tally.MAX_PENDING):
        observed.observe(1)
    assert registry.get_sample_value("h_count", {"a": "x"}) == tally.MAX_PENDING


async def test_both_ways_to_read_metrics_bring_in() -> None:
    metrics = Metrics()
    route = metrics.route("m", "chat")
    wanted = b'taut_inter_token_latency_seconds_count{model="m",route="chat"} %d.0'
    route.next_tokens(0.01, 1)
    assert wanted % 1 in metrics.exposition()
    route.next_tokens(0.01, 1)
    assert wanted % 2 in await metrics.text()


def test_what_is_dropped_is_forgotten() -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "c", ["a"], registry=registry)
    tallies = Tallies()
    group = tallies.group()
    counted = group.counter(counter.labels("x"))
    counted.inc()
    del group
    gc.collect()
    tallies.bring_in()
    assert registry.get_sample_value("c_total", {"a": "x"}) == 0
