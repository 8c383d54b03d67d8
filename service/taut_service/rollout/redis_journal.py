"""The journal of several gateways: a list of lines and a hash of counts for each rollout.

Only the gateway that knows the whole list may append to it (one Lua script compares its length), so
of two that decide at the same moment one wins, and the other reads what it decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from typing import Any, cast

from redis.exceptions import RedisError

from taut_service.admit.limits.redis_store import connect
from taut_service.config.settings import RolloutRedis
from taut_service.rollout.audit import Entry, TamperedError, check_lines
from taut_service.rollout.journal import JournalLostError, require_same

_APPEND = """
if redis.call('LLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
redis.call('RPUSH', KEYS[1], ARGV[2])
return 1
"""
KEEP_S = 90 * 86_400
"""For how long the evidence of a rollout outlives its last observation."""


class RedisJournal:
    """A :class:`.journal.Journal` that gateways share. Belongs to one event loop.

    Args:
        settings: where.

    Raises:
        SettingsError: the password file cannot be read.
    """

    def __init__(self, settings: RolloutRedis) -> None:
        self._audit = f"{settings.key_prefix}audit"
        self._place = f"Redis {self._audit}"
        self._evidence = f"{settings.key_prefix}evidence:"
        self._timeout_s = settings.timeout_s
        self._client = connect(settings, "rollout.redis")
        self.entries: list[Entry] = []

    async def refresh(self) -> None:
        """Read what others have appended."""
        known = self.entries[-1:]
        # The last line that is known comes again: a list that was emptied or cut lacks it.
        lines = await self._lines(len(self.entries) - len(known))
        require_same(known, lines, self._place)
        try:
            new = check_lines(lines[len(known) :], self._place, known[0] if known else None)
        except TamperedError as error:
            raise JournalLostError(str(error)) from error
        self.entries += new

    async def check(self) -> None:
        """Read the whole list again."""
        require_same(self.entries, await self._lines(0), self._place)

    async def _lines(self, first: int) -> list[str]:
        lines = await self._ask(self._client.lrange(self._audit, first, -1))
        return [line.decode("ascii", "replace") for line in lines]

    async def append(self, entry: Entry) -> bool:
        """Append a line, unless somebody was faster."""
        known = str(len(self.entries))
        call = self._client.eval(_APPEND, 1, self._audit, known, entry.line)
        if not await self._ask(call):
            await self.refresh()
            return False
        self.entries.append(entry)
        return True

    async def add_counts(self, key: str, counts: Mapping[str, int]) -> dict[str, int]:
        """Add to evidence, return everybody's."""
        name = self._evidence + key
        # One transaction: a failure adds nothing, or all of it and is not answered.
        pipeline = self._client.pipeline(transaction=True)
        for field, times in counts.items():
            pipeline.hincrby(name, field, times)
        pipeline.expire(name, KEEP_S)
        pipeline.hgetall(name)
        *_, found = await self._ask(pipeline.execute())
        try:
            return {field.decode(): int(times) for field, times in found.items()}
        except ValueError as error:
            raise JournalLostError(f"Redis {name}: holds what is no count") from error

    async def forget(self, key: str, fields: Collection[str]) -> None:
        """Drop counts."""
        await self._ask(self._client.hdel(self._evidence + key, *fields))

    async def close(self) -> None:
        """Hang up."""
        await self._client.aclose()

    async def _ask(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await cast("Awaitable[Any]", call)
        except (RedisError, OSError, TimeoutError) as error:
            raise JournalLostError(f"Redis: {str(error) or 'no answer'}") from error
