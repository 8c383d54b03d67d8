"""Event re-framing: the same events whatever the cuts, never half an event."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from taut_service.http.sse import SseReframer, Usage, read_usage

EVENTS = [
    b'data: {"choices":[{"text":"a"}]}',
    b'data: {"choices":[{"text":"\\"usage\\": {\\"prompt_tokens\\": 9}"}]}',
    b": keep-alive",
    b"data: two\ndata: lines",
    b"event: x\nid: 3\ndata: y",
    'data: {"text":"é\U0001f600"}'.encode(),
    b"data:",
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4}}',
    b"data: [DONE]",
]


def events_of(stream: bytes) -> list[bytes]:
    """An independent reading: normalise line ends, cut at blank lines."""
    text = re.sub(rb"\r\n|\r", b"\n", stream)
    return [event for event in re.split(rb"\n{2,}", text) if event]


@st.composite
def cut_streams(draw: st.DrawFn) -> list[bytes]:
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    events = draw(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=8))
    stream = b"".join(event.replace(b"\n", end) + end + end for event in events)
    places = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    return [stream[i:j] for i, j in zip([0, *places], [*places, len(stream)], strict=True)]


@given(cut_streams())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_cut_gives_the_same_events_and_only_whole_ones(pieces: list[bytes]) -> None:
    stream = b"".join(pieces)
    reframer = SseReframer()
    passed = b""
    for piece in pieces:
        passed += reframer.feed(piece)
        # What has been passed on so far is a sequence of whole events.
        assert events_of(passed) == events_of(stream)[: len(events_of(passed))]
        assert passed == b"" or re.search(rb"(\r\n|\n|\r)(\r\n|\n|\r)\n?\Z", passed)
    passed += reframer.flush()
    assert passed == stream
    assert reframer.events == sum(b"data:" in event for event in events_of(stream))
    assert (reframer.usage is not None) == (EVENTS[7] in stream)


def test_every_single_cut_of_one_stream() -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        stream = b"".join(event.replace(b"\n", end) + end * 2 for event in EVENTS)
        for i in range(len(stream) + 1):
            reframer = SseReframer()
            passed = reframer.feed(stream[:i]) + reframer.feed(stream[i:])
            assert passed + reframer.flush() == stream
            assert (reframer.events, reframer.usage) == (8, Usage(5, 4))


def test_whole_events_pass_without_a_copy() -> None:
    data = b"data: x\n\ndata: y\n\n"
    assert SseReframer().feed(data) is data


def test_half_an_event_is_held_back() -> None:
    reframer = SseReframer()
    assert reframer.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert reframer.feed(b"c\n") == b""
    assert reframer.feed(b"\n") == b"data: bc\n\n"


def test_event_without_an_end_costs_bounded_memory() -> None:
    reframer = SseReframer()
    passed = sum(len(reframer.feed(b"x" * 65_536)) for _ in range(200))
    assert passed >= 200 * 65_536 - 4 * 1024 * 1024 - 65_536


def test_usage_is_read_from_documents() -> None:
    assert read_usage(b'{"usage":{"prompt_tokens":5,"completion_tokens":7}}') == Usage(5, 7)
    assert read_usage(b'{"usage": {"total_tokens": 9, "prompt_tokens": 5}}') == Usage(5, 0)
    nested = b'{"usage":{"prompt_tokens":5,"completion_tokens":7,"prompt_tokens_details":null}}'
    assert read_usage(nested) == Usage(5, 7)


def test_absent_usage_is_none() -> None:
    assert read_usage(b"{}") is None
    assert read_usage(b'{"usage":null}') is None
    assert read_usage(b'{"usage":{}}') is None
    assert read_usage(b'{"text":"\\"usage\\":{\\"prompt_tokens\\":5}"}') is None
    assert read_usage(b'{"usage":[{"prompt_tokens":5}]}') is None


@given(
    st.lists(st.sampled_from([b"data:", b"\n", b"\n\n", b"x", b"event: a\n", b": c"]), max_size=9)
)
@settings(max_examples=600, deadline=None, derandomize=True)
def test_events_with_data_are_counted_however_blank_lines_lie(parts: list[bytes]) -> None:
    stream = b"".join(parts) + b"\n\n"
    reframer = SseReframer()
    reframer.feed(stream)
    assert reframer.events == sum(
        any(line.startswith(b"data:") for line in event.split(b"\n"))
        for event in stream.split(b"\n\n")
    )
