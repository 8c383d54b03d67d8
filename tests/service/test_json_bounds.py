"""Bodies that become too much when they are parsed: bounds, memory, and the turns of the loop."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
import tracemalloc
from typing import Any

import pytest
from gateway_harness import COMPLETION, Harness, eventually, gateway, settings_for
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mock_engine import Faults, MockEngine

from taut_service.admit.byte_budget import FREE_BYTES, ByteBudget
from taut_service.config.settings import Settings, SettingsError
from taut_service.config.settings.limits import Limits
from taut_service.errors import OverloadedError, RequestError
from taut_service.http.json_bounds import Shape, check_shape, exact

MEGABYTE = 1024 * 1024
HEAD = b'{"model":"m","prompt":"a","max_tokens":1,"x":['


def shape_of(value: Any) -> Shape:
    """Count slowly: commas and opening brackets of what json.dumps writes, and depth."""
    if isinstance(value, dict):
        inner = [shape_of(item) for item in value.values()]
    elif isinstance(value, list):
        inner = [shape_of(item) for item in value]
    else:
        return Shape(0, 0)
    commas = max(0, len(inner) - 1)
    return Shape(
        1 + commas + sum(shape.nodes for shape in inner),
        1 + max((shape.depth for shape in inner), default=0),
    )


NASTY = st.text(alphabet='\\"[]{},:a\n€', max_size=12)


@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
@given(
    value=st.recursive(
        NASTY | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(NASTY, inner),
        max_leaves=12,
    ),
    ascii_only=st.booleans(),
    piece=st.integers(1, 40),
)
def test_shape_is_that_of_the_document_wherever_it_is_cut(
    value: Any, ascii_only: bool, piece: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("taut_service.http.json_bounds._PIECE", piece)
        assert exact(text, 10**9) == shape_of(value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" + b"{}," * 100_000 + b"0]", "max_json_nodes"),
        (b"[" + b"1," * 100_001 + b"0]", "max_json_nodes"),
        (b"[" * 65 + b"]" * 65, "max_json_depth"),
        (b'{"a":' * 65 + b"0" + b"}" * 65, "max_json_depth"),
    ],
)
def test_refusal_names_the_bound(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_shape(body, 100_000, 64)


def test_brackets_and_commas_of_text_are_no_nodes() -> None:
    check_shape(json.dumps({"prompt": '[{,"\\' * 100_000}).encode(), 10, 8)


def test_budget_is_taken_and_given_back_and_spares_small_bodies() -> None:
    budget = ByteBudget()
    first, second, small = budget.hold(), budget.hold(), budget.hold()
    first.add(FREE_BYTES + 1, 2 * FREE_BYTES)
    with pytest.raises(OverloadedError) as refused:
        second.check_room(FREE_BYTES + 1, 2 * FREE_BYTES)
    assert (refused.value.status, refused.value.code) == (429, "too_many_bytes")
    second.add(FREE_BYTES, 2 * FREE_BYTES)
    with pytest.raises(OverloadedError):
        second.add(1, 2 * FREE_BYTES)
    small.add(FREE_BYTES, 2 * FREE_BYTES)
    for held in (first, second, small, first):
        held.release()
    assert budget.held == 0


def test_budget_must_hold_one_body() -> None:
    with pytest.raises((ValueError, SettingsError), match="max_inflight_bytes"):
        Limits.model_validate({"max_body_bytes": 11, "max_inflight_bytes": 10})


def settings_of(engine: MockEngine, **limits: int) -> Settings:
    return settings_for(engine.url, limits=limits, admission={"max_inflight": 2})


async def test_large_bodies_beyond_the_budget_are_told_to_come_back() -> None:
    body = json.dumps({**COMPLETION, "user": "u" * 400_000}).encode()
    limits = {"max_body_bytes": 500_000, "max_inflight_bytes": 1_000_000}
    async with (
        MockEngine(Faults(latency_s=0.5)) as engine,
        gateway(settings_of(engine, **limits)) as harness,
    ):
        answers = await asyncio.gather(*(harness.post(body) for _ in range(6)))
        statuses = sorted(answer.status for answer in answers)
        assert statuses == [200, 200, 429, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.error["code"] == "too_many_bytes"
        assert int(refused.headers["retry-after"]) >= 1
        assert await harness.metric('taut_rejected_total{reason="too_many_bytes"}') == 4
        # All of it was given back.
        assert (await harness.post(body)).status == 200
        assert (await harness.post(COMPLETION)).status == 200


def wide(seed: int) -> dict[str, bytes]:
    """Bodies of up to four megabytes that are slow or large when parsed."""
    draw = random.Random(seed)
    size = 4 * MEGABYTE - 1000
    digits = str(draw.getrandbits(14_000))[:4000].encode()
    return {
        "objects": b"{}," * (size // 3),
        "lists": b"[]," * (size // 3),
        "fitting lists": b"[]," * 120_000,
        "fitting objects": b"{}," * 120_000,
        "keys": b",".join(b'{"k%d":0}' % i for i in range(120_000)) + b",",
        "one wide object": b"{" + b",".join(b'"k%d":0' % i for i in range(240_000)) + b"},",
        "token ids": b",".join(b"%d" % draw.getrandbits(17) for _ in range(240_000)) + b",",
        "long integers": (digits + b",") * (size // 4001),
        "too long integers": (b"9" * 4301 + b",") * 900,
        "floats": b"0.12345678901234567890e-300," * (size // 28),
        "one float": b"0." + b"1" * size + b",",
        "escapes": b'"' + b"\\u00e9" * (size // 6) + b'",',
        "quotes": b'"' + b'\\"' * (size // 2) + b'",',
        "backslashes": b'"' + b"\\\\" * (size // 2) + b'",',
        "deep": b"[" * (size // 2) + b"]" * (size // 2) + b",",
        "never closed": b"[" * size,
        "an unclosed text": b'"' + b"a" * size,
    }


async def worst_turn_s(harness: Harness, body: bytes) -> tuple[int, float]:
    """Return the answer's status and the longest turn of the loop while it was made.

    A turn counts as what this process computed in it, in all its threads: they hold up the loop by
    the interpreter's lock, and a machine that stands still does not compute.
    """
    worst = 0.0
    running = True

    async def look() -> None:
        nonlocal worst
        while running:
            before, computed = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            computed = time.process_time() - computed
            worst = max(worst, min(time.perf_counter() - before, computed))

    looking = asyncio.create_task(look())
    answer = await harness.post(body)
    running = False
    await looking
    return answer.status, worst


@pytest.mark.parametrize("name", sorted(wide(0)))
async def test_no_body_takes_the_memory_or_the_loop(name: str) -> None:
    body = HEAD + wide(0)[name][:-1] + b"]}"
    async with MockEngine() as engine, gateway(settings_of(engine)) as harness:
        await harness.post(COMPLETION)
        status, stall_s = await worst_turn_s(harness, body)
        assert status in (200, 400), status
        # The engine parses what it gets in the same loop, in one go, on a machine that may be busy.
        assert stall_s < (0.25 if status == 400 else 1.0), f"{stall_s * 1000:.0f} ms"
        tracemalloc.start()
        try:
            await harness.post(body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 80 * MEGABYTE, f"{peak / MEGABYTE:.0f} MB"


async def test_nothing_parsed_is_kept_while_a_request_waits() -> None:
    body = HEAD + b",".join(b'{"k":[%d]}' % i for i in range(20_000)) + b"]}"
    async with MockEngine(Faults(latency_s=2)) as engine, gateway(settings_of(engine)) as harness:
        await harness.post(COMPLETION)
        gc.collect()
        before = len(gc.get_objects())
        waiting = [asyncio.create_task(harness.post(body)) for _ in range(4)]
        await eventually(lambda: engine.running == 2)

        async def queued() -> bool:
            return await harness.metric("taut_queued_requests") == 2

        await eventually(queued)
        # Each is 40,000 lists and dicts when parsed; the engine keeps those of the two it has.
        assert len(gc.get_objects()) - before - 2 * 40_000 < 20_000
        assert {(await task).status for task in waiting} == {200}
