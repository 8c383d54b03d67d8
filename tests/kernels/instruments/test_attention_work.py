"""Bytes and FLOPs of attention against counts by hand, and by brute force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from taut_bench.instruments.attention_work import ATTENTION_WORK, seen_pairs
from taut_bench.instruments.counters import count
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.op_cases import from_op
from taut_bench.instruments.work import Work, arguments_of
from taut_kernels.attention.reference import seen_keys

CPU = torch.device("cpu")
HEADS = {"Hq": 2, "Hk": 1, "D": 64}


@pytest.mark.parametrize("causal", [False, True])
def test_pairs_are_those_of_the_mask(causal: bool) -> None:
    for count_q in range(6):
        for count_k in range(6):
            for window in range(5 if causal else 1):
                mask = seen_keys(count_q, count_k, causal, window)
                found = seen_pairs(count_q, count_k, causal, window)
                assert found == int(mask.sum()), (count_q, count_k, window)


# 3 tokens, 2 heads of 64 over 1; q 3·2·64·2, k and v half of that each; lse 3·2·4.
PAIRS, Q, K, LSE = 2 * 6, 768, 384, 24


def test_prefill_is_counted_by_hand() -> None:
    sizes = {"B": 1, "M": 3, **HEADS}
    expected = Work(PAIRS * (4 * 64 + 4), Q + 2 * K, Q + LSE)
    assert count(from_op("attention", sizes, CPU)).dispatched == expected
    everything = count(from_op("attention", sizes | {"full": 1}, CPU)).dispatched
    assert everything.flops == 2 * 9 * (4 * 64 + 4)
    # One key, then two, then two.
    window = count(from_op("attention", sizes | {"window": 2}, CPU)).dispatched
    assert window.flops == 2 * 5 * (4 * 64 + 4)


def test_backward_is_counted_by_hand() -> None:
    counted = count(from_op("attention", {"B": 1, "M": 3, **HEADS}, CPU, backward=True))
    found = {entry.op: entry.work for entry in counted.by_op}["taut::attention_backward"]
    # Delta: a product and a sum of each of 384 elements; reads do, q, o, k, v, lse.
    flops = PAIRS * (10 * 64 + 5) + 2 * 384
    assert found == Work(flops, 3 * Q + 2 * K + LSE, Q + 2 * K)


def _attention(arguments: Sequence[Any]) -> Work:
    return ATTENTION_WORK["attention"](
        arguments_of(torch.ops.taut.attention.default, arguments, {})
    )


def test_packed_sequences_count_each_for_itself() -> None:
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    q, k = torch.zeros(5, 2, 64).half(), torch.zeros(5, 1, 64).half()
    args = (q, k, k, bounds, bounds, 3, 3, True, 0, 1.0)
    assert _attention(args).flops == 2 * (3 + 0 + 6) * (4 * 64 + 4)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
        # Three sequences, each as long as the longest.
        assert _attention(fake).flops == 2 * 18 * (4 * 64 + 4)


DECODE: list[tuple[dict[str, int], Work]] = [
    # 2 sequences of 20 keys in 2 pages each: 40 pairs of 2 heads; 64·2 bytes a key, and a value
    ({}, Work(80 * 260, 512 + 8 + 2 * 40 * 128 + 16, 512)),
    # 64 bytes a key, two scales
    ({"fp8": 1}, Work(80 * 260, 512 + 8 + 8 + 2 * 40 * 64 + 16, 512)),
    # 19 + 20 keys seen by two queries
    ({"T": 2}, Work(2 * 78 * 260, 1024 + 8 + 2 * 40 * 128 + 16, 1024)),
    # 4 keys a query; 5 of one sequence are read, one page's number
    ({"T": 2, "window": 4}, Work(2 * 16 * 260, 1024 + 8 + 2 * 10 * 128 + 8, 1024)),
]


@pytest.mark.parametrize(("sizes", "expected"), DECODE)
def test_decode_is_counted_by_hand(sizes: dict[str, int], expected: Work) -> None:
    subject = from_op("paged_decode", {"B": 2, "M": 20, **HEADS, **sizes}, CPU)
    counted = count(subject)
    assert counted.dispatched == expected
    # The counters of splits are the only other operand: 4 bytes a head and query.
    arrivals = 4 * 2 * 2 * sizes.get("T", 1)
    assert counted.compulsory.read == expected.read + arrivals
    assert counted.compulsory.written == expected.written


def test_a_cache_write_is_counted_by_hand() -> None:
    """3 tokens of one head of 64, keys and values: 2 bytes read, 2 or 1 written; slots 24."""
    sizes = {"M": 3, "Hk": 1, "D": 64, "page": 4}
    plain = count(from_op("cache_write", sizes, CPU)).dispatched
    assert plain == Work(0, 2 * 192 * 2 + 24, 2 * 192 * 2)
    # A division an element, and two scales of 4 bytes.
    subject = from_op("cache_write", sizes | {"fp8": 1}, CPU)
    assert count(subject).dispatched == Work(2 * 192, 2 * 192 * 2 + 24 + 8, 2 * 192)
    subject.args[4][0] = -1  # not written, and its key not read
    assert count(subject).dispatched == Work(2 * 128, 2 * 128 * 2 + 24 + 8, 2 * 128)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fp8": 1, "int8": 1}, "a cache is one of them"),
        ({"Hk": 3}, "Hq=2: not a multiple of Hk=3"),
    ],
)
def test_a_case_that_cannot_be_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InstrumentError, match=message):
        from_op("paged_decode", {"B": 1, "M": 20, **HEADS, **sizes}, CPU)


def test_every_case_runs_in_a_step() -> None:
    for sizes in ({"int8": 1, "page": 32}, {"window": 3}):
        result: Any = from_op("paged_decode", {"B": 1, "M": 20, **HEADS, **sizes}, CPU).step()
        assert torch.isfinite(result).all()
