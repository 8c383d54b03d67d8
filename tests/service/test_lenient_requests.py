"""What vLLM accepts is accepted, and reaches the worker as the client wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_harness import CHAT, COMPLETION, MODEL, gateway, settings_for
from mock_engine import MockEngine

from taut_service.admit.lax import as_bool, as_float, as_int
from taut_service.admit.limits.estimate import estimate
from taut_service.config.settings import Settings


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0, "echo": True},
        {"max_tokens": 0.0, "echo": "true"},
        {"max_tokens": "3"},
        {"max_tokens": 3.0, "n": "2", "stream": "no"},
        {"temperature": "0.5", "top_p": "1"},
    ],
)
async def test_numbers_and_switches_may_be_written_otherwise(fields: dict[str, Any]) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        body = json.dumps({**COMPLETION, **fields}).encode()
        assert (await harness.post(body)).status == 200
        assert engine.seen[-1].body == body


async def test_no_tokens_without_echo_are_refused() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post({**COMPLETION, "max_tokens": 0})
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")
        chat = {**CHAT, "max_tokens": 0, "echo": True}
        assert (await harness.post(chat, "/v1/chat/completions")).status == 400


async def test_byte_order_mark_is_taken_off() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        body = json.dumps(COMPLETION).encode()
        assert (await harness.post(b"\xef\xbb\xbf" + body)).status == 200
        assert engine.seen[-1].body == body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b' {"prompt":"x"}', b' {"model":"m","prompt":"x"}'),
        (b'{"prompt":"x","model":null}', b'{"prompt":"x","model":"m"}'),
        (
            b'{"prompt":"x","metadata":{"model":"y"},"stream":true}',
            b'{"stream_options":{"include_usage":true},"model":"m","prompt":"x",'
            b'"metadata":{"model":"y"},"stream":true}',
        ),
    ],
)
async def test_only_model_needs_no_name(body: bytes, expected: bytes) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post(body)
        assert answer.status == 200
        assert json.loads(engine.seen[-1].body) == json.loads(expected)
        assert b'"model": "m"' in answer.body or b'"model":"m"' in answer.body


async def test_one_of_several_models_must_be_named() -> None:
    async with MockEngine() as engine:
        one = settings_for(engine.url, golden=False).model_dump(exclude_none=True)["models"][0]
        del one["variants"]
        other = {**one, "name": "other", "workers": [{"name": "w9", "url": engine.url}]}
        settings = Settings.model_validate({"models": [one, other]})
        async with gateway(settings) as harness:
            answer = await harness.post({"prompt": "x"})
            assert (answer.status, answer.error["param"]) == (400, "model")


def test_values_are_read_as_pydantic_reads_them() -> None:
    ints: list[tuple[Any, int | None]] = [
        (3, 3), (3.0, 3), ("3", 3), (" 3 ", 3), ("+3.00", 3), ("1_000", 1000), ("-0", 0),
        (True, None), (3.5, None), ("3.5", None), ("3.", None), ("1e3", None), ("", None),
        ("\u0663", None), (None, None), ([3], None), ("9" * 5000, None), (float("inf"), None),
    ]  # fmt: skip
    assert [as_int(value) for value, _ in ints] == [expected for _, expected in ints]
    bools: list[tuple[Any, bool | None]] = [
        (True, True), (1, True), (0.0, False), ("On", True), ("F", False), (2, None),
        (" true", None), (None, None), ([], None), (float("nan"), None),
    ]  # fmt: skip
    assert [as_bool(value) for value, _ in bools] == [expected for _, expected in bools]
    assert [as_float(v) for v in (1, "1e3", "x", None, True, 10**400)] == [
        1.0, 1000.0, None, None, None, None,
    ]  # fmt: skip


def test_other_spelling_costs_the_same() -> None:
    plain = estimate({"prompt": "x", "max_tokens": 40, "n": 3}, "completions", 64, 16)
    assert estimate({"prompt": "x", "max_tokens": "40", "n": 3.0}, "completions", 64, 16) == plain
    assert estimate({"prompt": "x", "max_tokens": 0}, "completions", 64, 16).completion == 0


@pytest.mark.parametrize("path", ["/health", "/health/", "/ping", "/version", "/v1/models/"])
async def test_paths_that_clients_of_vllm_ask_are_answered(path: str) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        assert (await harness.request("GET", path)).status == 200


async def test_health_needs_no_key_and_says_no_while_no_worker_is_ready() -> None:
    keys = [{"name": "a", "sha256": "0" * 64}]
    async with MockEngine() as engine:
        engine.faults.health = 503
        settings = settings_for(engine.url, golden=False, api_keys=keys)
        async with gateway(settings, ready=False) as harness:
            assert (await harness.request("GET", "/health")).status == 503
            assert (await harness.request("POST", "/ping")).status == 503
            assert (await harness.request("GET", "/version")).status == 200
            assert (await harness.request("GET", "/v1/models/")).status == 401


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/chat/completions/"])
async def test_slash_at_the_end_is_no_other_path(path: str) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        assert (await harness.post({**COMPLETION, **CHAT}, path)).status == 200
        assert engine.seen[-1].path == path[:-1]


@pytest.mark.parametrize(
    ("path", "status"), [("/health/live", 200), ("/v1/models", 200), ("/v1/completions", 405)]
)
async def test_head_gets_the_head_of_the_answer_and_the_connection_goes_on(
    path: str, status: int
) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        await client.send("HEAD", path)
        head = await client.head()
        assert head.status == status
        await client.send("GET", f"/v1/models/{MODEL}")
        answer = await client.answer()
        assert answer.json["id"] == MODEL
        client.close()
