"""Finds out whether a worker works: a golden prompt must get its expected first token.

A kernel that computes rubbish answers ``/health`` with 200 like any other; only its tokens tell.
So a worker gets traffic after its golden prompt came out right, and again after every outage;
while it is ready a cheap ``GET /health`` is enough. One task per worker.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from taut_service.connection import StallError, UpstreamError
from taut_service.pool import Worker, WorkerState
from taut_service.settings import Golden

STALLS_BEFORE_LOST = 3
"""Silent health checks in a row that mean an outage: a busy worker may miss one."""
MAX_ANSWER_BYTES = 1024 * 1024


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
    """

    not_ready_s: float = 0.75
    ready_s: float = 5.0
    health_timeout_s: float = 5.0
    golden_timeout_s: float = 120.0
    woken_s: float = 0.1


class Prober:
    """Keeps one worker's state true.

    Args:
        worker: whose ``state`` it sets.
        model: the name the worker serves.
        golden: prompt and expected first token; None makes ``/health`` decide.
        times: pauses and limits.
    """

    def __init__(
        self, worker: Worker, model: str, golden: Golden | None, times: ProbeTimes
    ) -> None:
        self._worker = worker
        self._model = model
        self._golden = golden
        self._times = times
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
            pause = (times.ready_s if worker.ready else times.not_ready_s) - times.woken_s
            try:
                async with asyncio.timeout(pause):
                    await worker.check_now.wait()
            except TimeoutError:
                continue

    async def probe(self) -> None:
        """Probe once and set the worker's state."""
        worker = self._worker
        try:
            if worker.ready or self._golden is None:
                await self._check_health()
            else:
                await self._check_golden(self._golden)
        except (StallError, TimeoutError):
            self._stalls += 1
            if not worker.ready or self._stalls >= STALLS_BEFORE_LOST:
                self._lose("did not answer in time")
        except UpstreamError as error:
            self._lose(str(error))
        else:
            self._stalls = 0

    def _lose(self, detail: str) -> None:
        worker = self._worker
        # Until it has worked once, "starting" is the more helpful word; the detail says what is
        # missing.
        state = WorkerState.UNREACHABLE if worker.was_ready else WorkerState.STARTING
        worker.become(state, detail)

    async def _check_health(self) -> None:
        status, _ = await self._ask("GET", "/health", b"", self._times.health_timeout_s)
        if status != 200:
            self._lose(f"/health answered {status}")
        elif not self._worker.ready:
            self._worker.become(WorkerState.READY)

    async def _check_golden(self, golden: Golden) -> None:
        request = {
            "model": self._model,
            "prompt": golden.prompt,
            "max_tokens": 1,
            "temperature": 0,
        }
        status, answer = await self._ask(
            "POST", "/v1/completions", json.dumps(request).encode(), self._times.golden_timeout_s
        )
        if status != 200:
            self._lose(f"the golden prompt was answered with status {status}")
            return
        text = _first_text(answer)
        if text == golden.expected_text:
            self._worker.become(WorkerState.READY)
        else:
            got = "no completion" if text is None else repr(text[:80])
            self._worker.become(
                WorkerState.WRONG_TOKEN, f"expected {golden.expected_text!r}, got {got}"
            )

    async def _ask(
        self, method: str, path: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        client = self._worker.client
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {client.authority.decode()}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        answer = b""
        async with asyncio.timeout(timeout_s):
            connection = await client.send(head.encode(), body)
            try:
                while len(answer) <= MAX_ANSWER_BYTES and (data := await connection.read()):
                    answer += data
            finally:
                client.give_back(connection)
        return connection.status, answer


def _first_text(answer: bytes) -> str | None:
    """Return ``choices[0].text`` of a completion, None if there is no such thing."""
    try:
        text = json.loads(answer)["choices"][0]["text"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) else None
