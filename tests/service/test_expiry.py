"""Calls that share a timer: made in time and once, or not at all."""

from __future__ import annotations

import asyncio
import gc
import weakref

from taut_service.expiry import Expiry
from taut_service.http.request_head import Signal


async def test_calls_are_made_in_their_order_and_not_before_their_time() -> None:
    expiry, made = Expiry(0.2), []
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for name in "abc":
        expiry.start(lambda name=name: made.append((name, loop.time() - begun)))
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert [name for name, _ in made] == ["a", "b", "c"]
    for (_, after_s), least_s in zip(made, (0.2, 0.22, 0.24), strict=True):
        # A loop's clock has milliseconds.
        assert after_s >= least_s - 0.002
    assert len(expiry) == 0


async def test_what_is_taken_back_is_not_called_and_holds_nothing() -> None:
    class Owner:
        def expire(self) -> None:
            raise AssertionError

    expiry, made = Expiry(0.03), []
    owner = Owner()
    number = expiry.start(owner.expire)
    expiry.start(lambda: made.append("stays"))
    expiry.stop(number)
    expiry.stop(number)
    known = weakref.ref(owner)
    del owner
    gc.collect()
    assert known() is None
    await asyncio.sleep(0.06)
    assert made == ["stays"]


async def test_one_that_is_due_may_take_back_another_and_begin_anew() -> None:
    expiry, made = Expiry(0.02), []

    def first() -> None:
        made.append("first")
        expiry.stop(second)
        expiry.start(lambda: made.append("again"))

    loop = asyncio.get_running_loop()
    begun = loop.time()
    expiry.start(first)
    second = expiry.start(lambda: made.append("second"))
    async with asyncio.timeout(5):
        while len(made) < 2:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
    assert made == ["first", "again"]
    assert loop.time() - begun >= 0.04 - 0.002


async def test_one_that_raises_keeps_no_other_waiting() -> None:
    loop = asyncio.get_running_loop()
    said: list[object] = []
    loop.set_exception_handler(lambda _, context: said.append(context["exception"]))
    expiry, made = Expiry(0.01), []
    fault = ValueError("of the first")

    def first() -> None:
        raise fault

    expiry.start(first)
    expiry.start(lambda: made.append("second"))
    await asyncio.sleep(0.05)
    expiry.start(lambda: made.append("later"))
    await asyncio.sleep(0.05)
    assert said == [fault]
    assert made == ["second", "later"]


async def test_it_is_used_again_after_all_were_called() -> None:
    expiry, made = Expiry(0.01), []
    for name in ("a", "b"):
        expiry.start(lambda name=name: made.append(name))
        await asyncio.sleep(0.03)
    assert made == ["a", "b"]


async def test_signal_lets_its_waiter_go_on_until_it_is_cleared() -> None:
    signal = Signal()
    signal.set()
    await signal.wait()
    signal.clear()
    waiting = asyncio.ensure_future(signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.set()
    signal.set()
    await waiting
    signal.clear()
    waiting = asyncio.ensure_future(signal.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    signal.set()
    await signal.wait()
