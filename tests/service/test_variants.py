"""Variants of a model: who gets which, what the worker sees, and when another one helps out."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from gateway_harness import COMPLETION, Harness, eventually, gateway, variants_for
from mock_engine import Faults, MockEngine

from taut_service.config.settings import Settings
from taut_service.route.variants import UnknownVariantError


def settings(model: dict[str, Any], **sections: Any) -> Settings:
    return Settings.model_validate({"models": [model], **sections})


async def all_ready(harness: Harness) -> bool:
    return set((await harness.states()).values()) == {"ready"}


class House:
    """Two variants, ``big`` and ``small``, and a gateway before them."""

    def __init__(self, big: int = 1, small: int = 1, **model: Any) -> None:
        self.engines = {
            "big": [MockEngine() for _ in range(big)],
            "small": [MockEngine() for _ in range(small)],
        }
        self._model = model
        self._sections = model.pop("sections", {})
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> House:
        for engine in [e for engines in self.engines.values() for e in engines]:
            await self._stack.enter_async_context(engine)
        made = settings(variants_for(self.engines, **self._model), **self._sections)
        self.harness = await self._stack.enter_async_context(gateway(made))
        await eventually(lambda: all_ready(self.harness))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def counts(self, requests: int, **headers: str) -> Counter[str]:
        answers = [await self.harness.post(COMPLETION, **headers) for _ in range(requests)]
        assert {answer.status for answer in answers} == {200}
        return Counter(answer.headers["x-taut-variant"] for answer in answers)


async def test_weights_share_the_traffic_and_can_be_changed_while_it_runs() -> None:
    each = {"big": {"weight": 3}, "small": {"weight": 1}}
    async with House(each=each) as house:
        counts = await house.counts(200)
        assert 120 <= counts["big"] <= 175
        model = house.harness.app.reloader.current.models["m"]
        model.set_weights({"big": 0})
        assert model.weights == {"big": 0, "small": 1}
        assert await house.counts(20) == {"small": 20}
        with pytest.raises(ValueError, match="would all be 0"):
            model.set_weights({"small": 0})
        with pytest.raises(ValueError, match="finite number"):
            model.set_weights({"small": float("nan")})
        with pytest.raises(UnknownVariantError, match="only big, small"):
            model.set_weights({"small": 5, "tiny": 1})
        assert model.weights == {"big": 0, "small": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_names_variant_and_worker(stream: bool) -> None:
    async with House(each={"small": {"weight": 0}}) as house:
        answer = await house.harness.post({**COMPLETION, "stream": stream})
        assert answer.headers["x-taut-variant"] == "big"
        assert answer.headers["x-taut-worker"] == "big-0"
        await eventually(lambda: '"variant":"big"' in house.harness.log.getvalue())


async def test_worker_cannot_forge_the_headers_nor_see_the_clients() -> None:
    raw = b"HTTP/1.1 200 OK\r\nx-taut-variant: x\r\nx-taut-worker: y\r\ncontent-length: 2\r\n\r\n{}"
    async with House() as house:
        for engine in (*house.engines["big"], *house.engines["small"]):
            engine.faults.raw = raw
        answer = await house.harness.post(COMPLETION, x_taut_variant="small")
        assert answer.headers["x-taut-variant"] == "small"
        assert answer.headers["x-taut-worker"] == "small-0"
        assert "x-taut-variant" not in house.engines["small"][0].seen[0].headers


async def test_client_can_pin_a_variant_even_with_weight_zero() -> None:
    async with House(each={"small": {"weight": 0}}) as house:
        assert await house.counts(5, x_taut_variant="small") == {"small": 5}
        unknown = await house.harness.post(COMPLETION, x_taut_variant="tiny")
        assert (unknown.status, unknown.error["code"]) == (400, "variant_not_found")
        assert "big, small" in unknown.error["message"]


async def test_pinned_request_is_not_given_to_another_variant() -> None:
    async with House() as house:
        await house.engines["small"][0].stop()
        answer = await house.harness.post(COMPLETION, x_taut_variant="small")
        assert answer.status == 503
        again = await house.harness.post(COMPLETION, x_taut_variant="small")
        assert (again.status, again.error["code"]) == (503, "no_ready_worker")


async def test_pinning_needs_its_scope_where_there_are_keys() -> None:
    def key(name: str, *scopes: str) -> dict[str, Any]:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return {"name": name, "sha256": digest, "scopes": ["inference", *scopes]}

    keys = [key("plain"), key("tester", "variant:pin")]
    async with House(sections={"api_keys": keys}) as house:
        for name, status in (("plain", 403), ("tester", 200)):
            answer = await house.harness.post(
                COMPLETION, authorization=f"Bearer {name}", x_taut_variant="small"
            )
            assert answer.status == status


async def test_alias_is_accepted_and_the_worker_gets_the_name_it_serves() -> None:
    each = {"big": {"served_name": "org/big-model"}, "small": {"weight": 0}}
    async with House(aliases=["chat"], each=each) as house:
        body = b'{ "prompt": "hello", "model" : "chat", "max_tokens": 8 }'
        assert (await house.harness.post(body)).status == 200
        sent = house.engines["big"][0].seen[0].body
        assert sent == body.replace(b'"chat"', b'"org/big-model"')
        answer = await house.harness.post(body, x_taut_variant="small")
        assert answer.status == 200
        assert house.engines["small"][0].seen[0].json["model"] == "m"
        served = 'taut_requests_total{model="m",route="completions",status="2xx"}'
        assert await house.harness.metric(served) == 2
        assert (await house.harness.post({**COMPLETION, "model": "org/big-model"})).status == 404


@pytest.mark.parametrize("by", ["header", "user", "prompt_cache_key"])
async def test_session_stays_at_its_variant_and_replicas_agree(by: str) -> None:
    async with House(sticky="session") as house:
        made = settings(variants_for(house.engines, sticky="session"))
        async with gateway(made) as other:
            await eventually(lambda: all_ready(other))
            seen: Counter[str] = Counter()
            for i in range(24):
                headers = {"x_session_id": f"s{i}"} if by == "header" else {}
                body = COMPLETION if by == "header" else {**COMPLETION, by: f"s{i}"}
                answers = [await h.post(body, **headers) for h in (house.harness, other) * 2]
                variants = {answer.headers["x-taut-variant"] for answer in answers}
                assert len(variants) == 1
                seen.update(variants)
            assert min(seen["big"], seen["small"]) >= 4


async def test_key_stays_at_its_variant() -> None:
    def digest(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()

    keys = [{"name": f"k{i}", "sha256": digest(f"k{i}")} for i in range(12)]
    async with House(sticky="key", sections={"api_keys": keys}) as house:
        counts = [await house.counts(3, authorization=f"Bearer k{i}") for i in range(12)]
        assert all(len(count) == 1 for count in counts)
        assert {name for count in counts for name in count} == {"big", "small"}


async def test_variant_without_a_ready_worker_falls_to_the_next_and_is_counted() -> None:
    async with House(each={"big": {"weight": 1000}, "small": {"weight": 0.001}}) as house:
        await house.engines["big"][0].stop()
        # The first finds out by a failed connection, the others know.
        assert await house.counts(5) == {"small": 5}
        series = 'taut_variant_fallbacks_total{model="m",variant="small"}'
        assert await house.harness.metric(series) == 5


async def test_variant_with_weight_zero_helps_nobody_out() -> None:
    async with House(each={"small": {"weight": 0}}) as house:
        await house.engines["big"][0].stop()
        for _ in range(2):
            assert (await house.harness.post(COMPLETION)).status == 503
        assert house.engines["small"][0].seen == []


@pytest.mark.parametrize("stream", [False, True])
async def test_retry_stays_in_the_variant_while_that_has_another_worker(stream: bool) -> None:
    async with House(big=2, small=2, each={"small": {"weight": 0.0001}}) as house:
        house.engines["big"][0].faults = Faults(reset=True)
        for _ in range(6):
            answer = await house.harness.post({**COMPLETION, "stream": stream})
            assert answer.headers["x-taut-worker"] == "big-1"
        house.engines["big"][1].faults = Faults(status=503)
        answer = await house.harness.post({**COMPLETION, "stream": stream})
        assert answer.headers["x-taut-variant"] == "small"


async def test_variant_never_changes_within_a_stream() -> None:
    async with House(each={"small": {"weight": 0.0001}}) as house:
        house.engines["big"][0].faults = Faults(tokens=50, interval_s=0.002, kill_at_byte=500)
        answer = await house.harness.post({**COMPLETION, "stream": True})
        assert answer.headers["x-taut-variant"] == "big"
        assert b"worker_lost" in answer.body
        assert house.engines["small"][0].seen == []


async def test_affinity_keeps_a_session_at_its_worker() -> None:
    model = {"affinity": {"by": "session"}, "each": {"small": {"weight": 0}}}
    async with House(big=3, **model) as house:
        places = set()
        for i in range(12):
            answers = [await house.harness.post(COMPLETION, x_session_id=f"s{i}") for _ in range(3)]
            workers = {answer.headers["x-taut-worker"] for answer in answers}
            assert len(workers) == 1
            places |= workers
        assert places == {"big-0", "big-1", "big-2"}


async def test_affinity_keeps_a_prefix_together_and_spreads_a_hot_one() -> None:
    affinity = {"by": "prefix", "block_chars": 16, "min_requests": 2}
    async with House(big=4, affinity=affinity, each={"small": {"weight": 0}}) as house:
        body = {**COMPLETION, "prompt": "x" * 40}
        workers = {(await house.harness.post(body)).headers["x-taut-worker"] for _ in range(6)}
        assert len(workers) == 1
        for engine in house.engines["big"]:
            engine.faults.latency_s = 0.3
        answers = await asyncio.gather(*(house.harness.post(body) for _ in range(40)))
        counts = Counter(answer.headers["x-taut-worker"] for answer in answers)
        assert len(counts) == 4
        assert max(counts.values()) <= 1.5 * 10 + 2
