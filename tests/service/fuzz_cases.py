"""What the fuzz tests send: documents and bytes near valid requests, and how many."""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import strategies as st

_MESSAGES = [{"role": "user", "content": "hi"}]
BASES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "m", "prompt": "hello", "max_tokens": 8},
        {"model": "m", "prompt": [1, 2, 3], "stream": True},
    ],
    "/v1/chat/completions": [
        {"model": "m", "messages": _MESSAGES, "temperature": 0.5},
        {"model": "m", "messages": _MESSAGES, "stream": True},
    ],
    "/v1/embeddings": [{"model": "m", "input": "hi"}],
    "/tokenize": [{"model": "m", "prompt": "hi"}],
    "/detokenize": [{"model": "m", "tokens": [1, 2]}],
    "/v1/responses": [{"model": "m", "input": "hi"}],
    "/v1/messages": [{"model": "m", "messages": _MESSAGES, "max_tokens": 8}],
}
ROUTES = tuple(BASES)
_FIELDS = (
    "best_of",
    "echo",
    "frequency_penalty",
    "guided_json",
    "input",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "min_p",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt",
    "response_format",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "system",
    "temperature",
    "tokens",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
)
_WORDS = (
    b"\r\n",
    b"\n",
    b"\r\n\r\n",
    b"\x00",
    b"\xff",
    b"\x7f",
    b":",
    b" ",
    b"\t",
    b"{",
    b"[",
    b'"',
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"transfer-encoding: chunked\r\n",
    b"content-length: 5\r\n",
    b"content-length: -1\r\n",
    b"connection: close\r\n",
    b"expect: 100-continue\r\n",
    b"host: x\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"GET / HTTP/1.1\r\nhost: t\r\n\r\n",
    b"%00%0d%0a",
    b"../",
)


def fuzz_cases() -> int:
    """Return how many cases all fuzz tests together are to have (``TAUT_FUZZ_CASES``)."""
    return int(os.environ.get("TAUT_FUZZ_CASES", "1000"))


def values() -> st.SearchStrategy[Any]:
    """Any JSON value, small; numbers out of every range, text of every character."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=20)
        | st.sampled_from([0, -1, 1, 4096, 10**30, "m", "user", "", True])
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
        ),
        max_leaves=8,
    )


@st.composite
def posts(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body near a valid one: some fields set to anything, some taken away."""
    path = draw(st.sampled_from(ROUTES))
    origin = path if draw(st.integers(0, 4)) else draw(st.sampled_from(ROUTES))
    document: Any = dict(draw(st.sampled_from(BASES[origin])))
    names = st.sampled_from(_FIELDS) | st.text(max_size=12)
    document.update(draw(st.dictionaries(names, values(), max_size=2)))
    if draw(st.integers(0, 4)) == 0:
        document.pop(draw(st.sampled_from(sorted(document))))
    if draw(st.integers(0, 19)) == 0:
        document = draw(values())
    text = json.dumps(document, ensure_ascii=draw(st.booleans()))
    return path, text.encode("utf-8", "surrogatepass")


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """The bytes of a whole request with up to four places changed."""
    path = draw(st.sampled_from(ROUTES))
    body = json.dumps(draw(st.sampled_from(BASES[path]))).encode()
    head = b"POST %b HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n" % path.encode()
    if draw(st.booleans()):
        data = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    else:
        cut = draw(st.integers(0, len(body)))
        pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        data = head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(data)))
        end = begin + draw(st.integers(0, 12))
        put = draw(st.sampled_from(_WORDS) | st.binary(max_size=6) | st.just(data[begin:end] * 2))
        data = data[:begin] + put + data[end:]
    return data
