"""What a request will cost in tokens, guessed before a worker has seen it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from taut_service.limits.estimate import estimate


@pytest.mark.parametrize(
    ("route", "document", "expected"),
    [
        ("completions", {"prompt": "abcdefgh"}, (2, 16)),
        ("completions", {"prompt": "abcdefghi", "max_tokens": 7}, (3, 7)),
        ("completions", {"prompt": [1, 2, 3], "max_tokens": 7, "n": 3}, (3, 21)),
        ("completions", {"prompt": ["abcd", "efgh"], "max_tokens": 7}, (2, 14)),
        ("completions", {"prompt": [[1, 2], [3]], "max_tokens": 7}, (3, 14)),
        ("completions", {"prompt": "x" * 1000, "max_tokens": 99}, (64, 64)),
        ("completions", {"prompt": "€" * 4}, (3, 16)),
        ("completions", {"prompt": "a", "n": 10**9, "max_tokens": 1}, (1, 128)),
        ("chat_completions", {"messages": [{"content": "abcd"}, {"content": None}]}, (1, 32)),
        (
            "chat_completions",
            {"messages": [{"content": [{"text": "abcdefgh"}, {"image_url": {}}]}]},
            (2, 32),
        ),
        ("chat_completions", {"messages": [], "max_completion_tokens": 3}, (1, 3)),
        ("responses", {"input": "abcd", "max_output_tokens": 3}, (1, 3)),
        ("responses", {"input": [{"content": "abcdefgh"}]}, (2, 32)),
        ("messages", {"system": "abcd", "messages": [{"content": "abcd"}]}, (2, 32)),
        ("embeddings", {"input": ["abcd", "abcd"]}, (2, 0)),
        ("tokenize", {"prompt": "abcd"}, (1, 0)),
        ("detokenize", {"tokens": [1, 2, 3]}, (3, 0)),
        ("completions", {"prompt_embeds": "x", "max_tokens": True}, (1, 16)),
        ("completions", {"prompt": "\ud800abc"}, (1, 16)),
    ],
)
def test_estimate(route: str, document: dict[str, Any], expected: tuple[int, int]) -> None:
    assert estimate(document, route, 64, 32) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=4,
)
FIELDS = ("prompt", "input", "tokens", "messages", "system", "instructions", "n", "max_tokens")
PARTS = st.dictionaries(st.sampled_from(["content", "text", "role"]), JSON | st.lists(JSON))


@hypothesis_settings(max_examples=200, deadline=None, derandomize=True)
@given(
    document=st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(JSON | PARTS)),
    route=st.sampled_from(["completions", "chat_completions", "embeddings", "detokenize"]),
)
def test_estimate_takes_any_json_and_stays_in_bounds(document: dict[str, Any], route: str) -> None:
    prompt, completion = estimate(document, route, 64, 32)
    sequences = max(1, *(len(value) for value in document.values() if isinstance(value, list)), 1)
    assert 1 <= prompt <= 64 * sequences
    assert 0 <= completion <= 64 * 128 * sequences
