"""Reading a token stream: what counts as a token, and when it came."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taut_deploy.validate.latency.stream import StreamReader

DONE = b"data: [DONE]\n\n"


def event(tokens: int | None = None, choices: bool = True) -> bytes:
    content: dict = {"choices": [{"index": 0, "text": ""}] if choices else []}
    if tokens is not None:
        content["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def read(*pieces: tuple[float, bytes]) -> StreamReader:
    reader = StreamReader(10.0)
    for now, piece in pieces:
        reader.feed(piece, now)
    return reader


def test_one_token_per_read_gives_the_times_between_reads():
    reader = read((10.5, event()), (10.7, event()), (11.0, event()), (11.1, DONE))
    answer = reader.answer(11.2, 3)
    assert answer.failure is None
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.gaps_s == pytest.approx((0.2, 0.3))
    assert (answer.e2e_s, answer.tokens) == (pytest.approx(1.2), 3)


def test_tokens_that_come_together_share_the_time():
    reader = read((10.5, event(1)), (10.9, event(3)), (11.0, event(4)), (11.0, DONE))
    assert reader.answer(11.0, 4).gaps_s == pytest.approx((0.2, 0.2, 0.1))
    reader = read((10.5, event()), (10.9, event() + event()), (11.0, DONE))
    assert reader.answer(11.0, 3).gaps_s == pytest.approx((0.2, 0.2))


def test_the_last_usage_event_tells_the_total_and_is_no_arrival():
    reader = read((10.5, event()), (10.6, event()), (10.9, event(2, choices=False)), (10.9, DONE))
    answer = reader.answer(11.0, 2)
    assert (answer.failure, answer.tokens) == (None, 2)
    assert answer.gaps_s == pytest.approx((0.1,))


def test_events_without_a_token_are_no_arrival():
    """Such as one that only tells the reason to stop."""
    reader = read((10.2, event(0)), (10.5, event(1)), (10.7, event(2)), (10.9, event(2) + DONE))
    answer = reader.answer(11.0, 2)
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.gaps_s == pytest.approx((0.2,))


def test_all_in_one_read_has_no_gap():
    answer = read((10.5, event() * 3 + DONE)).answer(10.6, 3)
    assert (answer.failure, answer.gaps_s, answer.tokens) == (None, (), 3)


def test_a_field_for_errors_that_is_null_is_no_error():
    stream = b'data: {"error": null, "choices": [{"text": "a"}]}\n\n' + DONE
    assert read((10.5, stream)).answer(10.6, 1).failure is None


def test_comments_and_carriage_returns_are_read_as_the_format_says():
    stream = (event() + DONE).replace(b"\n", b"\r\n")
    assert read((10.5, b": ping\r\n\r\nevent: x\r\n" + stream)).answer(10.6, 1).failure is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 400), max_size=6))
def test_the_count_does_not_depend_on_how_the_bytes_are_cut(cuts):
    stream = event(1) + event(2) + event(4) + event(4, choices=False) + DONE
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    pieces = [stream[a:b] for a, b in itertools.pairwise(ends)]
    reader = read(*((11.0 + i, piece) for i, piece in enumerate(pieces)))
    answer = reader.answer(20.0, 4)
    assert (answer.failure, answer.tokens) == (None, 4)
    # From the first to the last read that brought a token, however it was spread.
    assert sum(answer.gaps_s) == pytest.approx(reader.last_s - reader.first_s)


@pytest.mark.parametrize(
    ("stream", "failure"),
    [
        (b"", "the stream ended without [DONE]"),
        (event(), "the stream ended without [DONE]"),
        (DONE, "0 tokens in place of 2"),
        (event() + DONE, "1 tokens in place of 2"),
        (event() * 3 + DONE, "3 tokens in place of 2"),
        (event() * 2 + event(3, choices=False) + DONE, "3 tokens in place of 2"),
        (b"data: {\n\n" + DONE, "an event that is not JSON"),
        (b"data: [1]\n\n" + DONE, "an error event: [1]"),
        (b'data: {"error": {"message": "out of\\nmemory"}}\n\n', "an error event: out of memory"),
        (b'data: {"error": "gone"}\n\n' + DONE, "an error event: gone"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "an event that is not JSON"),
    ],
)
def test_streams_that_do_not_count(stream, failure):
    answer = read((10.5, stream)).answer(12.0, 2)
    assert answer.failure == failure
    assert (answer.ttft_s, answer.gaps_s, answer.tokens) == (0.0, (), 0)
    assert answer.e2e_s == pytest.approx(2.0)
