"""Two servers under the same load, a block of one and then a block of the other.

Both models get the same prompts, the same seed and temperature 0, and answer with the same number
of tokens (``ignore_eos``, ``min_tokens``). Within each pair of blocks one begins with the baseline
and one with the candidate, which of the two is drawn: a drift of the machine, and whatever going
second brings, hit both alike. Before each concurrency one block per model is thrown away as
warm-up, so that compilation and connections are not measured.
"""

import asyncio
import gc
import os
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.latency.plan import LatencyPlan
from taut_deploy.validate.latency.prompts import make_prompts
from taut_deploy.validate.latency.stream import Answer, ask
from taut_deploy.validate.text import TokenizedText

ROLES = ("baseline", "candidate")
_GIVE_UP_AFTER = 2
# uvicorn, and so vLLM, closes a connection that was idle for 5 s; a request sent at that moment
# would fail through no fault of the model. Idle connections are dropped well before.
_KEEPALIVE_S = 2.0
_CAPACITY_STATUS = (408, 429)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A served model: role, base URL without ``/v1``, model name, headers of every request."""

    role: str
    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Block:
    """What one model answered in one block.

    Args:
        answers: in the order in which they ended, failed ones among them.
        wall_s: seconds from the first request to the last answer.
        went_first: whether the block began with this model.
    """

    answers: tuple[Answer, ...]
    wall_s: float
    went_first: bool

    @property
    def whole(self) -> tuple[Answer, ...]:
        """The answers that did not fail."""
        return tuple(answer for answer in self.answers if answer.failure is None)


@dataclass(frozen=True, slots=True)
class Level:
    """All blocks at one concurrency, those of the baseline and the candidate in pairs.

    ``client_busy`` is the share of the time that the measuring thread computed; near 1 it measures
    itself.
    """

    concurrency: int
    pairs: tuple[tuple[Block, Block], ...]
    client_busy: float

    def blocks(self, role: str) -> list[Block]:
        """The blocks of one role."""
        return [pair[ROLES.index(role)] for pair in self.pairs]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything measured; ``gave_up`` says why there is less than was planned, or is None."""

    levels: tuple[Level, ...]
    gave_up: str | None


def measure(
    plan: LatencyPlan,
    endpoints: tuple[Endpoint, Endpoint],
    text: TokenizedText,
    seed: int,
    on_block: Callable[[int, int], None],
) -> Measurement:
    """Measure both models.

    Args:
        plan: how much.
        endpoints: baseline and candidate.
        text: where prompts come from.
        seed: of prompts and order.
        on_block: called with pairs of blocks done and planned.

    Raises:
        CouldNotValidateError: a server refuses the request, or the baseline answers nothing.
    """
    with _collecting_between_blocks():
        return asyncio.run(_Run(plan, endpoints, text, seed, on_block).measure())


@contextmanager
def _collecting_between_blocks() -> Iterator[None]:
    """No garbage collection by itself: in the middle of an answer it would be read as latency.

    What was there before is set aside, so that a collection takes no time to speak of.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _trusted() -> ssl.SSLContext | bool:
    """The certificates that the accuracy part trusts: requests reads these variables, httpx not."""
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if not bundle:
        return True
    if Path(bundle).is_dir():
        return ssl.create_default_context(capath=bundle)
    return ssl.create_default_context(cafile=bundle)


@dataclass
class _Run:
    plan: LatencyPlan
    endpoints: tuple[Endpoint, Endpoint]
    text: TokenizedText
    seed: int
    on_block: Callable[[int, int], None]

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._planned = sum(self.plan.blocks(level) for level in self.plan.concurrency)
        self._done = 0
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def measure(self) -> Measurement:
        levels = []
        async with self._open_clients():
            for concurrency in self.plan.concurrency:
                await self._warm_up(concurrency)
                level, gave_up = await self._level(concurrency)
                levels.append(level)
                if gave_up is not None:
                    return Measurement(tuple(levels), gave_up)
        return Measurement(tuple(levels), None)

    @asynccontextmanager
    async def _open_clients(self) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
        first, second = (
            httpx.AsyncClient(
                timeout=None,  # noqa: S113 - every request has a deadline of its own
                limits=limits,
                verify=_trusted(),
                headers={"Accept-Encoding": "identity", **endpoint.headers},
            )
            for endpoint in self.endpoints
        )
        async with first, second:
            self._clients = {"baseline": first, "candidate": second}
            yield

    async def _warm_up(self, concurrency: int) -> None:
        bodies = self._bodies(concurrency)
        for endpoint in self.endpoints:
            block = await self._block(endpoint, bodies, concurrency, went_first=False)
            for answer in block.answers:
                status = answer.status or 0
                # It did not take the request: no measurement of its speed.
                if 300 <= status < 500 and status not in _CAPACITY_STATUS:
                    raise CouldNotValidateError(
                        f"{endpoint.role} {endpoint.url}: /v1/completions refused the latency "
                        f"request: {answer.failure}; it must be vLLM, or give --no-latency"
                    )

    async def _level(self, concurrency: int) -> tuple[Level, str | None]:
        pairs: list[tuple[Block, Block]] = []
        gave_up = None
        started, busy = time.perf_counter(), time.thread_time()
        for baseline_first in self._orders(self.plan.blocks(concurrency)):
            pairs.append(await self._pair(concurrency, baseline_first))
            self._done += 1
            self.on_block(self._done, self._planned)
            gave_up = self._why_give_up(pairs)
            if gave_up is not None:
                break
        spent = time.thread_time() - busy
        share = spent / (time.perf_counter() - started)
        return Level(concurrency, tuple(pairs), share), gave_up

    def _orders(self, blocks: int) -> list[bool]:
        """Whether the baseline goes first: once in every two blocks, in a drawn order."""
        drawn = self._random.random((blocks + 1) // 2) < 0.5
        return [bool(first) for flip in drawn for first in (flip, not flip)][:blocks]

    async def _pair(self, concurrency: int, baseline_first: bool) -> tuple[Block, Block]:
        bodies = self._bodies(concurrency)
        blocks: dict[str, Block] = {}
        for endpoint in self.endpoints[:: 1 if baseline_first else -1]:
            went_first = not blocks
            blocks[endpoint.role] = await self._block(endpoint, bodies, concurrency, went_first)
        return blocks["baseline"], blocks["candidate"]

    def _bodies(self, concurrency: int) -> list[dict[str, Any]]:
        count = self.plan.block_requests(concurrency)
        prompts = make_prompts(self.text, count, self.plan.prompt_tokens, self._random)
        length = self.plan.output_tokens
        return [
            {
                "prompt": prompt,
                "max_tokens": length,
                "min_tokens": length,
                "ignore_eos": True,
                "temperature": 0.0,
                "seed": self.seed,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            for prompt in prompts
        ]

    async def _block(
        self, endpoint: Endpoint, bodies: list[dict[str, Any]], concurrency: int, went_first: bool
    ) -> Block:
        """Closed loop: ``concurrency`` requests in flight until all of ``bodies`` are answered."""
        client, url = self._clients[endpoint.role], endpoint.url + "/v1/completions"
        waiting, answers = iter(bodies), []

        async def visitor() -> None:
            for body in waiting:
                sent = {"model": endpoint.model, "cache_salt": secrets.token_hex(16), **body}
                answers.append(await ask(client, url, sent, self.plan.timeout_s))

        gc.collect()
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(visitor())
        return Block(tuple(answers), time.perf_counter() - started, went_first)

    def _why_give_up(self, pairs: list[tuple[Block, Block]]) -> str | None:
        """Stop asking a model that answers nothing: every request may take its whole time-out."""
        for endpoint in self.endpoints:
            last = [pair[ROLES.index(endpoint.role)] for pair in pairs[-_GIVE_UP_AFTER:]]
            if len(last) < _GIVE_UP_AFTER or any(block.whole for block in last):
                continue
            failure = last[-1].answers[-1].failure
            requests = sum(len(block.answers) for block in last)
            what = f"{requests} requests in a row failed, the last with: {failure}"
            if endpoint.role == "baseline":
                raise CouldNotValidateError(f"baseline {endpoint.url}: {what}")
            return what
        return None
