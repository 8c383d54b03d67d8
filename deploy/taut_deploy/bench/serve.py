"""Tokens per second of OpenAI-compatible servers, interleaved in one run.

The same requests go to every target in turn (A B A B …), so that a drift of the machine hits all
of them; the median over rounds is reported with its range and fifths. Output length is fixed
(``ignore_eos``), so tokens are comparable.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass

import httpx

from taut_deploy.errors import WorkerError

_PROMPT = "Write down everything you know about the history of the printing press."


@dataclass(frozen=True)
class Target:
    """A server under measurement: label, base URL without ``/v1``, and model name."""

    label: str
    url: str
    model: str


@dataclass(frozen=True)
class Load:
    """What is asked: concurrent requests, rounds per target, tokens per answer."""

    concurrency: int
    rounds: int
    tokens: int


@dataclass(frozen=True)
class Throughput:
    """Result for one target: generated tokens per second over rounds, and how they spread."""

    label: str
    concurrency: int
    tokens: int
    median: float
    lowest: float
    highest: float
    p20: float
    p80: float
    rounds: int


def measure(targets: list[Target], load: Load, api_key: str | None = None) -> list[Throughput]:
    """Measure every target under one load.

    Raises:
        WorkerError: if a target cannot be reached or answers with an error.
    """
    return asyncio.run(_measure(targets, load, api_key))


async def _measure(targets: list[Target], load: Load, api_key: str | None) -> list[Throughput]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=load.concurrency)
    async with httpx.AsyncClient(timeout=600, headers=headers, limits=limits) as client:
        for target in targets:
            await _round(client, target, load)  # warm-up: compilation, caches, connections
        rates: dict[str, list[float]] = {target.label: [] for target in targets}
        for _ in range(load.rounds):
            for target in targets:
                rates[target.label].append(await _round(client, target, load))
    return [_summary(label, load, found) for label, found in rates.items()]


def _summary(label: str, load: Load, found: list[float]) -> Throughput:
    median, lowest, highest = statistics.median(found), min(found), max(found)
    # One round has no fifths.
    fifths = statistics.quantiles(found, n=5, method="inclusive") if len(found) > 1 else found * 4
    spread = (lowest, highest, fifths[0], fifths[3])
    return Throughput(label, load.concurrency, load.tokens, median, *spread, len(found))


async def _round(client: httpx.AsyncClient, target: Target, load: Load) -> float:
    started = time.perf_counter()
    counts = await asyncio.gather(
        *(_complete(client, target, load, i) for i in range(load.concurrency))
    )
    return sum(counts) / (time.perf_counter() - started)


async def _complete(client: httpx.AsyncClient, target: Target, load: Load, index: int) -> int:
    body = {
        "model": target.model,
        "prompt": f"{index}. {_PROMPT}",  # distinct, so that no prefix is shared
        "max_tokens": load.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        response = await client.post(f"{target.url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise WorkerError(f"{target.url}: cannot be reached ({type(error).__name__})") from error
    if response.status_code != httpx.codes.OK:
        raise WorkerError(f"{target.url}: answered {response.status_code}: {response.text[:200]}")
    return int(response.json()["usage"]["completion_tokens"])
