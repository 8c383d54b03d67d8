"""Finds out whether a worker works: a golden prompt must get its expected first token.

A kernel that computes rubbish answers ``/health`` with 200 like any other; only its tokens tell.
So a worker gets traffic after its golden prompt came out right, and again after every outage;
while it is ready a cheap ``GET /health`` is enough most of the time. One task per worker.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from taut_service.config.settings import Golden
from taut_service.worker.upstream_errors import NoDescriptorError, StallError, UpstreamError
from taut_service.worker.worker import Worker, WorkerState

STALLS_BEFORE_LOST = 3
"""Silent health checks in a row that mean an outage: a busy worker may miss one."""


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """How often and how patiently to probe, in seconds.

    Args:
        not_ready_s: pause between golden prompts while the worker is not ready.
        ready_s: pause between health checks while it is.
        health_timeout_s: patience with ``GET /health``.
        golden_timeout_s: patience with the golden prompt; a worker's first prompt may compile
            kernels.
        woken_s: shortest pause between two probes, however often requests fail.
        golden_again_s: pause between golden prompts while the worker is ready: what computed right
            once may not for ever.
        first_look_s: how long a starting gateway waits for the first verdict on its workers
            before it listens.
    """

    not_ready_s: float = 0.75
    ready_s: float = 5.0
    health_timeout_s: float = 5.0
    golden_timeout_s: float = 120.0
    woken_s: float = 0.1
    golden_again_s: float = 60.0
    first_look_s: float = 3.0


class Prober:
    """Keeps one worker's state true.

    Args:
        worker: whose ``state`` it sets. Without a golden prompt its ``/health`` decides.
        times: pauses and limits.
        clock: seconds, monotonic; given by tests.
    """

    def __init__(
        self, worker: Worker, times: ProbeTimes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker = worker
        self._times = times
        self._clock = clock
        self._proven_at = 0.0
        self._stalls = 0

    async def run(self) -> None:
        """Probe for ever; ends by cancellation. A worker that nobody probes gets no requests."""
        try:
            await self._run()
        finally:
            self._worker.become(WorkerState.UNREACHABLE, "not probed any more")

    async def _run(self) -> None:
        worker, times = self._worker, self._times
        while True:
            worker.check_now.clear()
            await self.probe()
            await asyncio.sleep(times.woken_s)
            pause = (times.ready_s if self._works() else times.not_ready_s) - times.woken_s
            try:
                async with asyncio.timeout(pause):
                    await worker.check_now.wait()
            except TimeoutError:
                continue

    async def probe(self) -> None:
        """Probe once and set the worker's state."""
        worker = self._worker
        try:
            if worker.golden is not None and not self._works():
                await self._check_golden(worker.golden)
            else:
                await self._check_health()
        except NoDescriptorError:
            # The gateway's own trouble: what was known of the worker still holds.
            return
        except (StallError, TimeoutError):
            self._stalls += 1
            if not self._works() or self._stalls >= STALLS_BEFORE_LOST:
                self._lose("did not answer in time")
        except UpstreamError as error:
            self._lose(str(error))
        else:
            self._stalls = 0
            due = self._clock() - self._proven_at >= self._times.golden_again_s
            if worker.golden is not None and self._works() and due:
                await self._check_golden_again(worker.golden)

    def _works(self) -> bool:
        return self._worker.state is WorkerState.READY

    def _lose(self, detail: str) -> None:
        worker = self._worker
        # Until it has worked once, "starting" is the more helpful word; the detail says what is
        # missing.
        state = WorkerState.UNREACHABLE if worker.was_ready else WorkerState.STARTING
        worker.become(state, detail)

    async def _check_health(self) -> None:
        client = self._worker.client
        status, _ = await client.ask("GET", "/health", b"", self._times.health_timeout_s)
        if status != 200:
            self._lose(f"/health answered {status}")
        elif not self._works():
            self._worker.become(WorkerState.READY)

    async def _check_golden(self, golden: Golden) -> None:
        status, answer = await self._ask_golden(golden, self._times.golden_timeout_s)
        if status != 200:
            self._lose(f"the golden prompt was answered with status {status}")
        else:
            self._judge(golden, answer)

    async def _check_golden_again(self, golden: Golden) -> None:
        # Of a worker that works only a wrong token says something. It may be too busy to answer
        # this prompt, and /health has just said that it lives.
        try:
            status, answer = await self._ask_golden(golden, self._times.health_timeout_s)
        except (UpstreamError, TimeoutError):
            return
        if status == 200:
            self._judge(golden, answer)

    async def _ask_golden(self, golden: Golden, timeout_s: float) -> tuple[int, bytes]:
        request = {
            "model": self._worker.served_name,
            "prompt": golden.prompt,
            "max_tokens": 1,
            "temperature": 0,
        }
        body = json.dumps(request).encode()
        return await self._worker.client.ask("POST", "/v1/completions", body, timeout_s)

    def _judge(self, golden: Golden, answer: bytes) -> None:
        text = _first_text(answer)
        if text == golden.expected_text:
            self._proven_at = self._clock()
            self._worker.become(WorkerState.READY)
        else:
            got = "no completion" if text is None else repr(text[:80])
            self._worker.become(
                WorkerState.WRONG_TOKEN, f"expected {golden.expected_text!r}, got {got}"
            )


def _first_text(answer: bytes) -> str | None:
    """Return ``choices[0].text`` of a completion, None if there is no such thing."""
    try:
        text = json.loads(answer)["choices"][0]["text"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) else None
