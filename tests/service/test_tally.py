"""What is counted beside the library's metrics is in them whenever they are read."""

from __future__ import annotations

import gc

from prometheus_client import CollectorRegistry, Counter, Histogram

from taut_service.watch import tally
from taut_service.watch.metrics import Metrics
from taut_service.watch.tally import Tallies


def test_counts_and_observations_arrive_when_they_are_brought_in() -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "c", ["a"], registry=registry)
    histogram = Histogram("h", "h", ["a"], registry=registry, buckets=(1, 2))
    tallies = Tallies()
    counted, observed = (
        tallies.counter(counter.labels("x")),
        tallies.histogram(histogram.labels("x")),
    )
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


def test_observations_are_kept_within_a_bound() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "h", ["a"], registry=registry)
    observed = Tallies().histogram(histogram.labels("x"))
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
    counted = tallies.counter(counter.labels("x"))
    counted.inc()
    del counted
    gc.collect()
    tallies.bring_in()
    assert registry.get_sample_value("c_total", {"a": "x"}) == 0
