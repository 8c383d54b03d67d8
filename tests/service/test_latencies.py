"""What the operator's page says of the newest latencies."""

from __future__ import annotations

from taut_service.watch.latencies import NEWEST, Latencies
from taut_service.watch.metrics import Metrics


def test_medians_and_the_slowest_of_the_newest_alone() -> None:
    latencies = Latencies()
    for seconds in [99.0] * 50 + [float(n) for n in range(NEWEST)]:
        latencies.answered(seconds)
        latencies.streamed(seconds / 10, None)
    report = latencies.report()
    assert report.answers == NEWEST
    assert report.whole is not None and report.first_token is not None
    assert (report.whole.p50, report.whole.p95) == (128.0, 242.0)
    assert (report.first_token.p50, report.per_token) == (12.8, None)


def test_errors_and_clients_that_left_are_no_answers() -> None:
    variant = Metrics().variant("m", "v")
    for status in (0, 400, 429, 503, 200):
        variant.finished(status, 1.0, None)
    variant.streamed(0.5, 2.0, 5)
    report = variant.latencies.report()
    assert report.answers == 1
    assert report.per_token is not None and report.per_token.p50 == 0.5
