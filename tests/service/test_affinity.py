"""Rendezvous hashing and what is hashed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from taut_service.config.settings import Affinity
from taut_service.route.affinity import affinity_keys, prompt_beginning
from taut_service.route.rendezvous import draw, rank_by_weight, seed_of

PREFIX = Affinity(by="prefix", block_chars=16, max_blocks=4)
KEYS = [b"key-%d" % i for i in range(20_000)]


def keys_of(document: dict[str, Any], affinity: Affinity = PREFIX) -> list[int]:
    return list(affinity_keys(affinity, prompt_beginning(document, affinity), None, None))


def test_draw_is_the_same_on_every_machine() -> None:
    assert seed_of(b"session-1") == 12558777036138866604
    assert draw(seed_of(b"session-1"), seed_of(b"w0")) == 12052176326405260521


@pytest.mark.parametrize("weights", [{"a": 90, "b": 10}, {"a": 1, "b": 1, "c": 2}, {"a": 1}])
def test_each_name_comes_first_for_its_share(weights: dict[str, float]) -> None:
    first = Counter(rank_by_weight(key, weights.items())[0] for key in KEYS)
    total = sum(weights.values())
    for name, weight in weights.items():
        share = weight / total
        # Four standard deviations of a binomial share; the keys are fixed.
        allowed = 4 * (share * (1 - share) / len(KEYS)) ** 0.5
        assert abs(first[name] / len(KEYS) - share) <= allowed


def test_weight_zero_is_never_placed() -> None:
    assert rank_by_weight(b"k", [("a", 0.0), ("b", 1.0), ("c", 0.0)]) == ["b"]


def test_change_of_weights_moves_only_the_needed_share() -> None:
    def place(a: float, b: float) -> list[str]:
        return [rank_by_weight(key, [("a", a), ("b", b)])[0] for key in KEYS]

    before, after = place(90, 10), place(80, 20)
    moved = [(x, y) for x, y in zip(before, after, strict=True) if x != y]
    assert set(moved) == {("a", "b")}, "nobody moves the other way"
    assert abs(len(moved) / len(KEYS) - 0.1) < 0.01


def test_new_name_takes_only_its_own_share() -> None:
    names = [(f"w{i}", 1.0) for i in range(5)]
    for key in KEYS[:2000]:
        before = rank_by_weight(key, names[:4])[0]
        after = rank_by_weight(key, names)[0]
        assert after in (before, "w4")


def test_draws_of_two_names_are_independent() -> None:
    seeds = [seed_of(key) for key in KEYS]
    pairs = [(draw(seed, seed_of(b"w0")), draw(seed, seed_of(b"w1"))) for seed in seeds]
    both_high = sum(a > 2**63 and b > 2**63 for a, b in pairs) / len(pairs)
    assert abs(both_high - 0.25) < 0.0125  # four standard deviations


def test_prompts_with_a_common_beginning_share_their_first_keys() -> None:
    one = keys_of({"prompt": "s" * 32 + "first question, long"})
    other = keys_of({"prompt": "s" * 32 + "another question, long"})
    assert len(one) == len(other) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_depth_is_bounded() -> None:
    assert len(keys_of({"prompt": "x" * 10_000})) == 4


def test_key_of_a_turn_stays_in_the_next_turn_of_a_conversation() -> None:
    first = [{"role": "system", "content": "a" * 20}, {"role": "user", "content": "b" * 20}]
    second = [*first, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    one, other = keys_of({"messages": first}), keys_of({"messages": second})
    assert other[: len(one)] == one


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"prompt": "abc"}, "abc"),
        ({"prompt": ["abc", "def"]}, "abc"),
        ({"prompt": [12, 3]}, "12 3"),
        ({"prompt": [[12, 3], [4]]}, "12 3"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "userhi"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "userhi"),
        ({"messages": [{"role": "user", "content": [{"image_url": {"url": "u"}}]}]}, "useru"),
        ({"system": "s", "messages": [{"role": "user", "content": "hi"}]}, "suserhi"),
        ({"instructions": "i", "input": "q"}, "iq"),
        ({"input": [{"role": "user", "content": [{"text": "q"}]}]}, "userq"),
        ({"messages": [{"role": "user", "content": None}]}, "user"),
        ({"prompt": 7, "messages": "x"}, "x"),
        ({}, ""),
    ],
)
def test_beginning_of_every_kind_of_prompt(document: dict[str, Any], text: str) -> None:
    assert prompt_beginning(document, PREFIX) == text


def test_token_ids_that_differ_have_keys_that_differ() -> None:
    assert keys_of({"prompt": [1, 2, 3]}) != keys_of({"prompt": [12, 3]})


def test_deep_nesting_ends() -> None:
    content: Any = "x"
    for _ in range(5000):
        content = [content]
    assert keys_of({"messages": [{"role": "user", "content": content}]})
    assert keys_of({"prompt": [1, content]}) == keys_of({"prompt": [1]})


def test_lone_surrogate_is_hashed() -> None:
    assert keys_of({"prompt": "\ud800"})


@pytest.mark.parametrize(("by", "expected"), [("session", b"s"), ("key", b"k")])
def test_session_and_key_are_one_key(by: Any, expected: bytes) -> None:
    assert list(affinity_keys(Affinity(by=by), "", "s", "k")) == [seed_of(expected)]


def test_request_without_a_session_has_no_key() -> None:
    assert list(affinity_keys(Affinity(by="session"), "x", None, "k")) == []
