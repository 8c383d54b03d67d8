"""Buckets in a Redis that several gateways share.

What arrives while one exchange with Redis is under way goes out together in the next, as one
pipeline of at most ``BATCH`` operations: a busy gateway needs few round trips, an idle one waits
for nothing. An exchange has half of ``timeout_s``, so nothing waits longer than that for Redis. The
first failure closes the way to it: until it answers again, tried after ``FIRST_RETRY_S`` and then
ever more rarely, callers pass or are refused at once, as ``on_failure`` says. Settlements that fall
into that time are lost; the buckets fill within a minute anyway.

More takes at once than this process can ask for in time are not Redis's failure. Those that found
no place in a batch for half of ``timeout_s`` are answered as ``on_failure`` says, Redis stays in
use, and no settlement is left out.

Invariant: every take ends within ``timeout_s``; at most one exchange is under way.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from taut_service.admit.limits.bucket import RateLimit, Standing
from taut_service.admit.limits.redis_script import SETTLE, TAKE
from taut_service.config.settings import RedisServer, RedisStore, SettingsError
from taut_service.config.settings.load import read_text
from taut_service.errors import UnavailableError

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
"""Pause before the first attempt to reach Redis again: most often it was busy for a moment."""
RETRY_S = 0.5
"""Longest pause between attempts."""
QUIET_S = 10.0
"""A loss so soon after another is counted and not logged; the same for late takes."""
BATCH = 64
"""Most operations of one exchange.

Packing and reading 64 takes costs this process 3 to 5 ms (CPython 3.11.7, redis-py 8.1.0 without
hiredis, 2 shared cores, 2026-11-24): a sixth of what an exchange has, so that work of our own is
not taken for Redis's silence, and the event loop is held up for no longer. 128 did a burst of 1,000
in 0.8 of the time, but beside four processes that took the processor Redis was lost once in 15.
"""
LAST_LOOK = 0.2
"""Part of its time that an exchange gets as a second chance.

After a stall of the event loop its timers run before its sockets are read: an answer that had
arrived in time must not count as late.
"""
_SCRIPTS = (TAKE, SETTLE)


class _Operation(NamedTuple):
    """One script call.

    Where nobody waits for it, ``answer`` is None; else the wait began at ``since``, by the loop's
    clock.
    """

    script: str
    key: str
    arguments: tuple[int, ...]
    answer: asyncio.Future[Standing | None] | None = None
    since: float = 0.0


class RedisLimitStore:
    """Keeps the buckets of all callers in Redis. Belongs to one event loop.

    Args:
        settings: where, and what to do without it.

    Raises:
        SettingsError: the password file cannot be read.
    """

    def __init__(self, settings: RedisStore) -> None:
        self._prefix = settings.key_prefix
        self._timeout_s = settings.timeout_s
        self._open = settings.on_failure == "open"
        self.losses = 0
        self.late = 0
        """Takes that Redis was not asked for because this process was behind."""
        self._client = connect(settings, "rate_limits.redis")
        self._hashes: dict[str, str] = {}
        self._waiting: deque[_Operation] = deque()
        self._quiet_until = 0.0
        self._late_quiet_until = 0.0
        self._timer: asyncio.TimerHandle
        self._exchange: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether Redis is being asked."""
        return self._recovery is None

    async def open(self) -> None:
        """Connect now, so that the first caller need not wait for it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._load_scripts()
        except (RedisError, OSError, TimeoutError) as error:
            self._lose(str(error) or "no answer")

    async def take(self, name: str, limit: RateLimit, tokens: int) -> Standing | None:
        """Take from a caller's buckets, as :class:`.bucket.LimitStore` says."""
        if self._recovery is not None:
            self._check_open()
            return None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Standing | None] = loop.create_future()
        arguments = (*_sizes(limit), tokens)
        self._enqueue(_Operation(TAKE, self._prefix + name, arguments, answer, loop.time()))
        standing = await answer
        if standing is None:
            self._check_open()
        return standing

    def settle(self, name: str, limit: RateLimit, requests: int, tokens: int) -> None:
        """Correct a caller's buckets; see :class:`~taut_service.admit.limits.bucket.LimitStore`."""
        if self._recovery is None:
            arguments = (*_sizes(limit), requests, tokens)
            self._enqueue(_Operation(SETTLE, self._prefix + name, arguments))

    async def close(self) -> None:
        """Send what waits to be sent, for ``timeout_s`` at most, and hang up."""
        if self._exchange is not None:
            await asyncio.wait([self._exchange], timeout=self._timeout_s)
        for task in (self._exchange, self._recovery):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._client.aclose()

    def _check_open(self) -> None:
        if not self._open:
            raise UnavailableError(
                "rate limits cannot be checked at the moment",
                code="rate_limits_unavailable",
                retry_after_s=1.0,
            )

    def _enqueue(self, operation: _Operation) -> None:
        self._waiting.append(operation)
        if self._exchange is None or self._exchange.done():
            self._exchange = asyncio.get_running_loop().create_task(self._exchange_all())
            self._exchange.add_done_callback(self._exchanged)

    def _exchanged(self, task: asyncio.Task[None]) -> None:
        if self._exchange is task:
            self._exchange = None
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, (RedisError, OSError, TimeoutError)):
                raise error
            self._lose(str(error) or type(error).__name__)

    async def _exchange_all(self) -> None:
        loop = asyncio.get_running_loop()
        passed_over_at = -math.inf
        while batch := self._next_batch(passed_over_at):
            passed_over_at = loop.time()
            self._give(self._timeout_s / 2)
            try:
                await self._send(batch)
            finally:
                self._timer.cancel()
                # After a failure nobody may be left waiting; an answered one is not touched.
                for operation in batch:
                    self._answer(operation, None)

    def _next_batch(self, passed_over_at: float) -> list[_Operation]:
        """Take the next operations off the queue, without what need not be sent.

        Args:
            passed_over_at: when the batch before this one was taken off.

        Returns:
            At most ``BATCH``, none if nothing waits.
        """
        # Who waited for one exchange only is in time, also after a stall of the event loop.
        due = min(passed_over_at, asyncio.get_running_loop().time() - self._timeout_s / 2)
        batch: list[_Operation] = []
        late = 0
        while self._waiting and len(batch) < BATCH:
            operation = self._waiting.popleft()
            if operation.answer is None or (not operation.answer.done() and operation.since >= due):
                batch.append(operation)
            elif not operation.answer.done():
                self._answer(operation, None)
                late += 1
            # Else its client left before anything was taken.
        if late:
            self._tell_late(late)
        return batch

    def _tell_late(self, count: int) -> None:
        self.late += count
        now = asyncio.get_running_loop().time()
        if now >= self._late_quiet_until:
            self._late_quiet_until = now + QUIET_S
            effect = "pass unlimited" if self._open else "are refused"
            text = "rate limits: too many at once to ask Redis in time; late ones %s (%d so far)"
            logger.warning(text, effect, self.late)

    def _give(self, seconds: float) -> None:
        """Lose Redis after that time, unless the timer is cancelled."""
        loop = asyncio.get_running_loop()

        def expire() -> None:
            self._lose(f"no answer within {seconds * 1000:g} ms")

        def look_again() -> None:
            self._timer = loop.call_later(seconds * LAST_LOOK, expire)

        self._timer = loop.call_later(seconds * (1 - LAST_LOOK), look_again)

    async def _send(self, batch: list[_Operation]) -> None:
        results = await self._execute(batch)
        unknown = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
        if unknown:
            # Redis was restarted or its scripts were flushed.
            await self._load_scripts()
            again = await self._execute([batch[i] for i in unknown])
            for i, result in zip(unknown, again, strict=True):
                results[i] = result
        for operation, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                raise result
            self._answer(operation, result)

    def _answer(self, operation: _Operation, result: list[Any] | None) -> None:
        future = operation.answer
        if future is None:
            return
        if future.cancelled():
            # Its client left meanwhile: nobody will settle what was taken.
            if result is not None and result[0]:
                rpm, tpm, tokens = operation.arguments
                self._waiting.append(_Operation(SETTLE, operation.key, (rpm, tpm, 1, tokens)))
        elif not future.done():
            future.set_result(None if result is None else _standing(result))

    async def _execute(self, batch: list[_Operation]) -> list[Any]:
        if not self._hashes:
            await self._load_scripts()
        pipeline = self._client.pipeline(transaction=False)
        for operation in batch:
            pipeline.evalsha(
                self._hashes[operation.script], 1, operation.key, *map(str, operation.arguments)
            )
        return await pipeline.execute(raise_on_error=False)

    async def _load_scripts(self) -> None:
        self._hashes = {text: await self._client.script_load(text) for text in _SCRIPTS}

    def _lose(self, reason: str) -> None:
        """Stop asking Redis; begin to look for it."""
        if self._recovery is not None:
            return
        loop = asyncio.get_running_loop()
        self.losses += 1
        loud = loop.time() >= self._quiet_until
        if loud:
            self._quiet_until = loop.time() + QUIET_S
            effect = "pass unlimited" if self._open else "are refused"
            text = "rate limits: Redis is lost (%s); callers with limits %s until it is back"
            logger.error(text, reason, effect)
        self._recovery = loop.create_task(self._recover(loud=loud))
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
        waiting, self._waiting = self._waiting, deque()
        for operation in waiting:
            self._answer(operation, None)

    async def _recover(self, *, loud: bool) -> None:
        pause_s = FIRST_RETRY_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_S, 2 * pause_s)
            try:
                # Neither what is half read nor what leads to a server that is gone is used again.
                await self._client.connection_pool.disconnect()
                async with asyncio.timeout(self._timeout_s):
                    await self._load_scripts()
            except (RedisError, OSError, TimeoutError):
                continue
            break
        self._recovery = None
        if loud:
            logger.info("rate limits: Redis is back")


def connect(settings: RedisServer, section: str) -> Redis:
    """Return a client; it connects when it is first used.

    Args:
        settings: where.
        section: of the configuration, for the error.

    Raises:
        SettingsError: the password file cannot be read, or the address is none.
    """
    path = settings.password_file
    password = None if path is None else read_text(path).strip()
    try:
        return Redis.from_url(
            settings.url,
            password=password,
            # How long an answer may take is the caller's business.
            socket_timeout=None,
            socket_connect_timeout=settings.timeout_s,
            # And so is trying again.
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise SettingsError(f"{section}.url: {error}") from error


def _sizes(limit: RateLimit) -> tuple[int, int]:
    return limit.requests_per_minute or 0, limit.tokens_per_minute or 0


def _standing(result: list[Any]) -> Standing:
    granted, requests, tokens = result
    return Standing(bool(granted), float(requests), float(tokens))
