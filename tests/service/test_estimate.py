"""What a request will cost in tokens, guessed before a worker has seen it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from taut_service.admit.lax import as_int
from taut_service.admit.limits.estimate import estimate
from taut_service.admit.limits.texts import MEDIA_BYTES

MESSAGES = {"messages": [{"role": "user", "content": "abcd"}]}
"""Seven tokens: two brackets, two names, two texts of four bytes."""


@pytest.mark.parametrize(
    ("route", "document", "expected"),
    [
        ("completions", {"prompt": "abcdefgh"}, (2, 16)),
        ("completions", {"prompt": "abcdefghi", "max_tokens": 7}, (3, 7)),
        ("completions", {"prompt": [1, 2, 3], "max_tokens": 7, "n": 3}, (3, 21)),
        ("completions", {"prompt": ["abcd", "efgh"], "max_tokens": 7}, (2, 14)),
        ("completions", {"prompt": ["abcd", "efgh"], "max_tokens": 7, "n": 3}, (2, 42)),
        ("completions", {"prompt": "a", "max_tokens": 7, "n": 2, "best_of": 5}, (1, 35)),
        ("completions", {"prompt": [[1, 2], [3]], "max_tokens": 7}, (3, 14)),
        ("completions", {"prompt": "x" * 1000, "max_tokens": 99}, (64, 64)),
        ("completions", {"prompt": "€" * 4}, (3, 16)),
        ("completions", {"prompt": "abcd", "max_tokens": None}, (1, 32)),
        ("completions", {"prompt": "abcd", "suffix": "abcd"}, (2, 16)),
        ("completions", {"prompt_embeds": ["x", "y"], "max_tokens": 9}, (2, 18)),
        ("completions", {"messages": [], "prompt": ["a", "b"], "max_tokens": 9}, (2, 18)),
        ("chat_completions", MESSAGES, (7, 32)),
        ("chat_completions", {**MESSAGES, "system": "abcd"}, (8, 32)),
        ("chat_completions", {"messages": [], "max_completion_tokens": 3}, (1, 3)),
        ("responses", {"input": "abcd", "max_output_tokens": 3}, (1, 3)),
        ("responses", {"input": "abcd", "instructions": "abcd"}, (2, 32)),
        ("embeddings", {"input": ["abcd", "abcd"]}, (2, 0)),
        ("tokenize", {"prompt": "abcd"}, (1, 0)),
        ("detokenize", {"tokens": [1, 2, 3]}, (3, 0)),
        ("completions", {"prompt_embeds": "x", "max_tokens": True}, (1, 32)),
        ("completions", {"prompt": "\ud800abc"}, (1, 16)),
    ],
)
def test_estimate(route: str, document: dict[str, Any], expected: tuple[int, int]) -> None:
    assert estimate(document, route, 64, 32) == expected


ALL_BOUNDS = {"max_tokens": 5, "max_completion_tokens": 6, "max_output_tokens": 7}


@pytest.mark.parametrize(
    ("route", "honoured"),
    [("completions", 5), ("chat_completions", 6), ("responses", 7), ("messages", 5)],
)
def test_completion_counts_what_the_worker_of_the_route_follows(route: str, honoured: int) -> None:
    assert estimate({**MESSAGES, **ALL_BOUNDS}, route, 64, 32).completion == honoured
    others = {name: 1 for name, value in ALL_BOUNDS.items() if value != honoured}
    if route == "chat_completions":
        assert estimate({**MESSAGES, "max_tokens": 5}, route, 64, 32).completion == 5
    else:
        default = 16 if route == "completions" else 32
        assert estimate({**MESSAGES, **others}, route, 64, 32).completion == default


@pytest.mark.parametrize("route", ["responses", "messages", "chat_completions", "completions"])
def test_choices_count_where_a_worker_gives_them(route: str) -> None:
    single = estimate({**MESSAGES, **ALL_BOUNDS}, route, 64, 32).completion
    several = estimate({**MESSAGES, **ALL_BOUNDS, "n": 100}, route, 64, 32).completion
    assert several == (100 * single if "completions" in route else single)


def test_numbers_and_names_of_a_tool_count() -> None:
    plain = {"name": "f", "parameters": {"enum": []}}
    numbers = {"name": "f", "parameters": {"enum": [1] * 1000}}
    names = {"name": "f", "parameters": {"properties": {f"p{i:03}": {} for i in range(1000)}}}
    sizes = [
        estimate({**MESSAGES, "tools": [tool]}, "chat_completions", 10**9, 1).prompt
        for tool in (plain, numbers, names)
    ]
    assert sizes[1] >= sizes[0] + 1000
    assert sizes[2] >= sizes[0] + 1000


def test_sampling_numbers_are_no_prompt() -> None:
    bias = {str(i): 1 for i in range(300)}
    document = {**MESSAGES, "logit_bias": bias, "stop_token_ids": list(range(300)), "seed": 1}
    assert estimate(document, "chat_completions", 10**9, 1).prompt == 7


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("messages", {"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}}),
        ("messages", {"type": "input_audio", "input_audio": {"data": "%s", "format": "wav"}}),
        ("messages", {"type": "image", "source": {"type": "base64", "data": "%s"}}),
        ("input", {"type": "input_image", "image_url": "data:image/png;base64,%s"}),
    ],
)
def test_pictures_and_sound_count_less_than_text(field: str, part: dict[str, Any]) -> None:
    def cost(payload: str) -> int:
        filled = copy.deepcopy(part)
        for holder in (filled, *(v for v in filled.values() if isinstance(v, dict))):
            for name, value in holder.items():
                if isinstance(value, str) and "%s" in value:
                    holder[name] = value % payload
        message = {"role": "user", "content": [filled]}
        return estimate({field: [message]}, "chat_completions", 10**9, 1).prompt

    assert 900 <= cost("A" * 512_000) <= 1100
    # The same bytes where no picture can be are text.
    tool = {"tools": [{"source": {"data": "A" * 512_000}}]}
    assert estimate({**MESSAGES, **tool}, "chat_completions", 10**9, 1).prompt >= 128_000


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
    choices = document.get("n")
    assert 1 <= prompt <= 64 * sequences
    most = max(1, as_int(choices) or 1)
    assert 0 <= completion <= 64 * sequences * most


TEXT = st.text(max_size=40)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["a", "b"]}}}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "p", "suffix": "s", "stop": ["x"], "guided_json": SCHEMA},
    "chat_completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "n"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "functions": [{"name": "f", "parameters": SCHEMA}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "structured_outputs": {"regex": "a+"},
        "documents": [{"title": "t", "text": "x"}],
        "chat_template": "{{ x }}",
        "chat_template_kwargs": {"deep": {"er": "x"}},
        "bad_words": ["w"],
        "user": "u",
    },
    "responses": {
        "input": [{"type": "message", "content": [{"type": "input_text", "text": "t"}]}],
        "instructions": "i",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "text": {"format": {"schema": SCHEMA}},
        "prompt": {"id": "p", "variables": {"v": "x"}},
    },
    "messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "input": {"q": "x"}}]},
            {"role": "user", "content": [{"type": "tool_result", "content": [{"text": "r"}]}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "stop_sequences": ["x"],
    },
    "embeddings": {"input": ["a", "b"]},
}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield holder and key of every string value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, str):
            yield value, key
        elif isinstance(item, (dict, list)):
            yield from places(item)


def text_size(document: dict[str, Any]) -> int:
    return sum(len(holder[key].encode()) for holder, key in places(document))


@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), route=st.sampled_from(sorted(BODIES)))
def test_no_text_goes_uncounted_wherever_it_stands(data: st.DataObject, route: str) -> None:
    document = copy.deepcopy(BODIES[route])
    for holder, key in list(places(document)):
        if data.draw(st.booleans()):
            holder[key] = data.draw(TEXT)
    before = estimate(document, route, 10**9, 32).prompt
    assert before >= text_size(document) / 8
    holder, key = data.draw(st.sampled_from(list(places(document))))
    added = data.draw(st.text(min_size=4, max_size=3 * MEDIA_BYTES))
    holder[key] += added
    after = estimate(document, route, 10**9, 32).prompt
    assert after >= before + len(added.encode()) // 8
    assert after > before


@pytest.mark.parametrize("route", sorted(BODIES))
def test_a_long_text_counts_in_every_place(route: str) -> None:
    for number in range(len(list(places(BODIES[route])))):
        document = copy.deepcopy(BODIES[route])
        before = estimate(document, route, 10**9, 32).prompt
        holder, key = list(places(document))[number]
        holder[key] += "x" * 200_000
        assert estimate(document, route, 10**9, 32).prompt >= before + 25_000, key
