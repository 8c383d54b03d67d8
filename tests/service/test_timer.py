"""A call that is put off: one at a time, called off, or made."""

from __future__ import annotations

import asyncio
import gc
import weakref

from taut_service.timer import Timer


async def test_a_call_is_made_once_and_may_start_the_next() -> None:
    loop, timer, made = asyncio.get_running_loop(), Timer(), []
    done = asyncio.Event()

    def call() -> None:
        assert timer.handle is None
        made.append(loop.time())
        if len(made) < 3:
            timer.start(loop, 0.001, call)
        else:
            done.set()

    timer.start(loop, 0.001, call)
    assert timer.handle is not None
    async with asyncio.timeout(10):
        await done.wait()
    assert len(made) == 3
    assert timer.handle is None


async def test_another_start_and_a_stop_call_the_earlier_one_off() -> None:
    loop, timer, made = asyncio.get_running_loop(), Timer(), []
    timer.start(loop, 0.01, lambda: made.append("first"))
    timer.start(loop, 0.01, lambda: made.append("second"))
    await asyncio.sleep(0.1)
    assert made == ["second"]
    timer.start(loop, 0.01, lambda: made.append("third"))
    timer.stop()
    timer.stop()
    await asyncio.sleep(0.1)
    assert made == ["second"]


async def test_a_stopped_timer_keeps_its_owner_from_nothing() -> None:
    class Owner:
        def __init__(self) -> None:
            self.timer = Timer()
            self.timer.start(asyncio.get_running_loop(), 60, self.late)
            self.timer.stop()

        def late(self) -> None:
            raise AssertionError

    gc.disable()
    try:
        gone = weakref.ref(Owner())
        assert gone() is None, "no cycle: it goes without the garbage collector"
    finally:
        gc.enable()
