"""Rate limits in a real Redis: shared by gateways, and what happens when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import eventually, settings_for
from redis_process import RedisServer, redis_client, redis_server

from taut_service.admit.limits.bucket import RateLimit, Standing
from taut_service.admit.limits.memory import MemoryLimitStore
from taut_service.admit.limits.redis_script import KEEP_S
from taut_service.admit.limits.redis_store import BATCH, RedisLimitStore
from taut_service.admit.limits.store import build_store
from taut_service.config.settings import RateLimits, RedisStore, SettingsError
from taut_service.errors import UnavailableError

LIMIT_S = 0.05
"""The longest time limit that a configuration may give."""
STALL_S = 0.5
"""A longer one, whose second chance of a tenth is enough where the whole machine stood still."""


@asynccontextmanager
async def opened(settings: RedisStore) -> AsyncIterator[RedisLimitStore]:
    store = RedisLimitStore(settings)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def up(store: RedisLimitStore) -> None:
    await eventually(lambda: store.up)


async def take(store: RedisLimitStore, name: str, limit: RateLimit, tokens: int) -> Standing:
    """Take, and insist that Redis answered."""
    standing = await store.take(name, limit, tokens)
    assert standing is not None
    return standing


def observed(store: RedisLimitStore, pause_s: float = 0.0) -> list[Any]:
    """Return a list that gets every batch before it is sent, ``pause_s`` later."""
    batches: list[Any] = []
    execute = store._execute

    async def counted(batch: Any) -> Any:
        batches.append(batch)
        await asyncio.sleep(pause_s)
        return await execute(batch)

    store._execute = counted  # type: ignore[method-assign]
    return batches


async def test_scripts_agree_with_the_memory_store(tmp_path: Path) -> None:
    randomness = random.Random(5)
    async with redis_server(tmp_path) as server, opened(server.settings()) as store:
        await up(store)
        memory = MemoryLimitStore()
        limits = [RateLimit(40, 900), RateLimit(None, 900), RateLimit(40, None)]
        refused = 0
        for _ in range(400):
            number = randomness.randrange(3)
            name, limit = f"caller-{number}", limits[number]
            if randomness.random() < 0.7:
                tokens = randomness.randrange(1, 120)
                ours = await memory.take(name, limit, tokens)
                theirs = await take(store, name, limit, tokens)
                if ours.granted != theirs.granted:
                    # Only where the milliseconds between the two questions decided it.
                    assert min(abs(ours.requests - 1), abs(ours.tokens - tokens)) < 20
                    memory = MemoryLimitStore()
                    async with redis_client(server) as client:
                        await client.flushdb()
                    continue
                refused += not ours.granted
                for size, mine, other in zip(limit, ours[1:], theirs[1:], strict=True):
                    if size is not None:
                        assert mine == pytest.approx(other, abs=size / 60)
            else:
                back = randomness.randrange(2), randomness.randrange(-60, 60)
                memory.settle(name, limit, *back)
                store.settle(name, limit, *back)
        assert refused > 20


async def test_buckets_in_redis_fill_with_time_and_owe_a_minute_at_most(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        opened(server.settings()) as store,
        redis_client(server) as client,
    ):
        await up(store)
        limit = RateLimit(60, 6000)
        await take(store, "a", limit, 6000)
        store.settle("a", limit, -200, -(10**9))
        standing = await take(store, "a", limit, 1)
        assert not standing.granted
        assert standing.requests == pytest.approx(-60, abs=2)
        assert standing.tokens == pytest.approx(-6000, abs=200)
        seconds, microseconds = await client.time()
        # A minute and a half ago, by Redis's clock.
        await client.hset("taut:limit:a", "at", seconds + microseconds / 1e6 - 90)
        standing = await take(store, "a", limit, 0)
        assert standing.granted
        assert standing.requests == pytest.approx(-60 + 90 - 1, abs=2)
        assert standing.tokens == pytest.approx(-6000 + 9000, abs=200)
        # A clock that went back is no time at all.
        await client.hset("taut:limit:a", "at", seconds + 1000)
        standing = await take(store, "a", limit, 0)
        assert standing.requests == pytest.approx(28, abs=2)


async def test_gateways_share_one_limit(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        opened(server.settings()) as first,
        opened(server.settings()) as second,
    ):
        await up(first)
        await up(second)
        limit = RateLimit(50, None)
        taken = await asyncio.gather(
            *(take(store, "a", limit, 1) for store in (first, second) for _ in range(60))
        )
        assert sum(standing.granted for standing in taken) in (50, 51)
        # Neither a different prefix nor a different caller is touched by it.
        async with opened(server.settings(key_prefix="other:")) as other:
            assert (await take(other, "a", limit, 1)).requests == 49
        assert (await take(first, "b", limit, 1)).requests == 49


async def test_callers_at_a_time_share_round_trips(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.settings()) as store:
        await up(store)
        batches = observed(store)
        per_second = 10
        limit = RateLimit(60 * per_second, None)
        began = time.perf_counter()
        await asyncio.gather(*(take(store, "a", limit, 1) for _ in range(300)))
        sizes = [len(batch) for batch in batches]
        assert sum(sizes) == 300
        # All waited before the first went out, so only the last may be smaller.
        assert len(sizes) == math.ceil(300 / BATCH)
        # Each was taken once; the bucket has filled meanwhile, on a busy machine by many.
        left = (await take(store, "a", limit, 1)).requests
        assert 299 <= left <= 299.5 + per_second * (time.perf_counter() - began)


async def test_burst_is_taken_batch_by_batch(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.settings()) as store:
        await up(store)
        # What this is about is the number, not how soon this machine has done it.
        store._timeout_s = 60.0
        batches = observed(store)
        per_second = 10
        limit = RateLimit(60 * per_second, None)
        began = time.perf_counter()
        taken = await asyncio.gather(*(take(store, "a", limit, 1) for _ in range(3000)))
        granted = sum(standing.granted for standing in taken)
        assert 600 <= granted <= 601 + per_second * (time.perf_counter() - began)
        assert sum(len(batch) for batch in batches) == 3000
        assert max(len(batch) for batch in batches) <= BATCH
        assert (store.up, store.losses, store.late) == (True, 0, 0)


@pytest.mark.parametrize("on_failure", ["open", "closed"])
async def test_late_takes_of_a_burst_are_no_loss_of_redis(
    tmp_path: Path, on_failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    pause_s, number = 0.1, 20 * BATCH
    async with (
        redis_server(tmp_path) as server,
        opened(server.settings(on_failure=on_failure)) as store,
    ):
        await up(store)
        store._timeout_s = 2.0
        batches = observed(store, pause_s)
        limit = RateLimit(60_000, None)
        takes = [asyncio.create_task(store.take("a", limit, 1)) for _ in range(number)]
        # All takes must be waiting before the settlements behind them.
        await asyncio.sleep(0)
        for _ in range(3 * BATCH):
            store.settle("b", limit, -1, 0)
        answers = await asyncio.gather(*takes, return_exceptions=True)
        await eventually(lambda: store._exchange is None)
        answered = sum(isinstance(answer, Standing) for answer in answers)
        if on_failure == "open":
            assert answers.count(None) == number - answered
        else:
            refused = sum(isinstance(answer, UnavailableError) for answer in answers)
            assert refused == number - answered
        # A batch takes 0.1 s at least, and none goes out that has waited a second.
        assert BATCH <= answered <= 12 * BATCH
        assert store.late == number - answered
        assert (store.up, store.losses) == (True, 0)
        assert max(len(batch) for batch in batches) <= BATCH
        sent = [operation.key for batch in batches for operation in batch]
        assert sent.count("taut:limit:b") == 3 * BATCH
    texts = [record.message for record in caplog.records if record.name.startswith("taut")]
    assert len(texts) == 1, "the first late ones are logged, the others counted"
    assert "too many at once" in texts[0]


async def test_request_that_is_abandoned_before_it_asks_is_not_sent(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.settings()) as store:
        await up(store)
        batches = observed(store)
        limit = RateLimit(1000, None)
        takes = [asyncio.create_task(store.take("a", limit, 1)) for _ in range(3 * BATCH)]
        # All wait then, and the first exchange begins a turn later.
        await asyncio.sleep(0)
        for asked in takes[:-BATCH]:
            asked.cancel()
        await asyncio.wait(takes)
        await take(store, "b", limit, 1)
        assert [len(batch) for batch in batches] == [BATCH, 1]


async def test_stall_of_the_event_loop_is_not_a_loss_of_redis(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        opened(server.settings().model_copy(update={"timeout_s": STALL_S})) as store,
    ):
        await eventually(lambda: store.up)
        lost_before = store.losses  # at its start, on a machine that stands still as a whole
        for _ in range(3):
            asked = asyncio.create_task(store.take("a", RateLimit(1000, None), 1))
            # It must be on its way when the stall begins.
            for _ in range(3):
                await asyncio.sleep(0)
            time.sleep(STALL_S)  # noqa: ASYNC251 - twice what an exchange has
            assert await asked is not None
        assert store.losses == lost_before


async def test_request_that_is_abandoned_while_it_asks_leaves_no_trace(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.settings()) as store:
        await up(store)
        limit = RateLimit(10, 100)
        batches = observed(store)
        asked = asyncio.create_task(store.take("a", limit, 50))
        # Not a turn longer: Redis would have answered.
        while not batches:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        standing = await take(store, "a", limit, 0)
        standing = await take(store, "a", limit, 0)
        assert standing.requests == pytest.approx(8, abs=0.2)
        assert standing.tokens == pytest.approx(100, abs=1)


async def test_settlement_reaches_redis(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server:
        limit = RateLimit(6, 600)
        async with opened(server.settings()) as store:
            await up(store)
            await take(store, "a", limit, 500)
            store.settle("a", limit, 1, 450)
            # Sent although the store is closed at once.
        async with opened(server.settings()) as store, redis_client(server) as client:
            await up(store)
            standing = await take(store, "a", limit, 0)
            assert standing.requests == pytest.approx(5, abs=0.3)
            assert standing.tokens == pytest.approx(550, abs=30)
            assert KEEP_S - 5 <= await client.ttl("taut:limit:a") <= KEEP_S


async def test_flushed_scripts_are_loaded_again(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        opened(server.settings()) as store,
        redis_client(server) as client,
    ):
        await up(store)
        limit = RateLimit(10, None)
        await take(store, "a", limit, 1)
        await client.script_flush()
        assert (await take(store, "a", limit, 1)).requests == pytest.approx(8, abs=0.2)
        assert (store.up, store.losses) == (True, 0)


@pytest.mark.parametrize("on_failure", ["open", "closed"])
async def test_killed_redis_is_left_alone_and_found_again(
    tmp_path: Path, on_failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        redis_server(tmp_path) as server,
        opened(server.settings(on_failure=on_failure)) as store,
    ):
        await up(store)
        limit = RateLimit(5, None)
        await take(store, "a", limit, 1)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            server.kill()
            began = time.perf_counter()
            for _ in range(200):
                if on_failure == "open":
                    assert await store.take("a", limit, 1) is None
                else:
                    with pytest.raises(UnavailableError) as refused:
                        await store.take("a", limit, 1)
                    assert refused.value.code == "rate_limits_unavailable"
            # One wait for the failure at most, none after it.
            assert time.perf_counter() - began < 0.4
            assert (store.up, store.losses) == (False, 1)
            await server.start()
            await up(store)
            assert (await take(store, "a", limit, 1)).granted
            # Another loss so soon is counted, not logged.
            server.kill()
            with contextlib.suppress(UnavailableError):
                await store.take("a", limit, 1)
            await eventually(lambda: store.losses == 2)
        texts = [record.message for record in caplog.records if record.name.startswith("taut")]
        assert len(texts) == 2
        assert "Redis is lost" in texts[0]
        assert texts[1] == "rate limits: Redis is back"


async def test_redis_that_hangs_costs_one_time_limit(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        opened(server.settings(timeout_s=LIMIT_S)) as store,
    ):
        await up(store)
        limit = RateLimit(5, None)
        server.freeze()
        began = time.perf_counter()
        answers = await asyncio.gather(*(store.take("a", limit, 1) for _ in range(50)))
        assert answers == [None] * 50
        assert 0.4 * LIMIT_S <= time.perf_counter() - began < 0.5
        began = time.perf_counter()
        for _ in range(100):
            assert await store.take("a", limit, 1) is None
        assert time.perf_counter() - began < 100 * LIMIT_S / 10
        server.thaw()
        store._timeout_s = 5.0
        await up(store)
        # No answer to an old question is taken for the answer to a new one.
        for left in (3, 2, 1):
            standing = await take(store, "b", RateLimit(4, None), 1)
            assert standing.requests == pytest.approx(left, abs=0.2)


async def test_gateway_starts_without_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    async with opened(server.settings()) as store:
        assert not store.up
        assert await store.take("a", RateLimit(1, 1), 1) is None


async def test_password_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    (tmp_path / "wrong").write_text("guess\n")
    async with redis_server(tmp_path, "--requirepass", "s3cret") as server:
        async with opened(server.settings(password_file=str(tmp_path / "password"))) as store:
            await up(store)
            await take(store, "a", RateLimit(1, None), 1)
        async with opened(server.settings(password_file=str(tmp_path / "wrong"))) as store:
            assert not store.up
    with pytest.raises(SettingsError, match="absent"):
        RedisLimitStore(server.settings(password_file=str(tmp_path / "absent")))


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "taut_service.admit.limits.redis_store")
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    settings = RateLimits(store="redis", redis=RedisStore(url="redis://h"))
    with pytest.raises(SettingsError, match=r"pip install 'taut\[redis\]'"):
        build_store(settings)


@pytest.mark.parametrize("url", ["redis://h?db=x", "redis://h:port"])
def test_an_address_that_redis_refuses_is_named_by_its_key(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^rate_limits\.redis\.url: "):
        RedisLimitStore(RedisStore(url=url))


def test_check_reads_the_password_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        'models: [{name: m, max_model_len: 8, workers: [{name: w, url: "http://h:1"}]}]\n'
        'rate_limits: {store: redis, redis: {url: "redis://h", password_file: /absent}}\n'
    )
    command = [sys.executable, "-m", "taut_service", "--config", str(file), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr == "taut-gateway: /absent: No such file or directory\n"


def test_gateway_of_its_own_does_not_import_redis() -> None:
    code = "import sys, taut_service.app; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"store": "redis"}, "'redis' is needed"),
        ({"redis": {"url": "redis://h"}}, "'redis' is needed"),
        ({"store": "redis", "redis": {"url": "http://h"}}, "must begin with redis://"),
        ({"store": "redis", "redis": {"url": "redis://u:pw@h"}}, "password_file"),
        ({"store": "redis", "redis": {"url": "redis://h", "timeout_s": 0.06}}, "timeout_s"),
        ({"store": "redis", "redis": {"url": "redis://h", "on_failure": "x"}}, "on_failure"),
    ],
)
def test_settings_are_checked(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        settings_for("http://h:1", rate_limits=limits)
    assert "u:pw" not in "\n".join(
        line for line in str(refused.value).splitlines() if "input_value" not in line
    )
