"""What a test's patience counts: what ran and what was waited for, not a machine at a stand."""

from __future__ import annotations

import asyncio
import time

import pytest
from patience import STILL_S, eventually, timed, within


async def stand_still(seconds: float) -> str:
    """As the machine does: nothing else runs meanwhile, and nothing is computed."""
    time.sleep(seconds)  # noqa: ASYNC251
    return "late"


async def compute(seconds: float) -> str:
    begin = time.process_time()
    while time.process_time() < begin + seconds:
        pass
    return "late"


async def test_what_waits_too_long_is_ended() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match=r"not within 0\.1 s"):
        await within(0.1, work())
    await asyncio.wait_for(ended.wait(), 30)


async def test_machine_that_stands_still_is_not_counted() -> None:
    assert await within(0.2, stand_still(0.5)) == "late"
    stood = iter([0.3, 0.3, 0.0])

    async def stands() -> bool:
        seconds = next(stood)
        await stand_still(seconds)
        return not seconds

    assert await eventually(stands, 0.3) < 0.3


async def test_what_is_computed_is_counted() -> None:
    with pytest.raises(TimeoutError):
        await within(0.2, compute(0.4))
    assert (await timed(compute(0.2)))[1] > 0.2


async def test_failures_are_raised_as_they_are() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await within(1, fail())
    with pytest.raises(TimeoutError, match="not within"):
        await eventually(lambda: False, 2 * STILL_S)
