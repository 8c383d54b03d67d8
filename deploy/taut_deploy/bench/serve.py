"""Tokens per second of OpenAI-compatible servers, interleaved in one run.

The same requests go to every target in turn (A B A B …), so that a drift of the machine hits all
of them; the median over rounds is reported with its range and fifths. Output length is fixed
(``ignore_eos``), so tokens are comparable: a server that ends earlier all the same is refused. Of
servers on this machine the CPU time of a token is reported too, which a busy machine moves less.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass

import httpx

from taut_deploy.bench.process_tree import cpu_seconds
from taut_deploy.bench.server_process import server_at
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
    """Result for one target: generated tokens per second over rounds, and how they spread.

    ``cpu_ms`` is the CPU time of a token in milliseconds, the median over rounds; None where the
    server does not run here.
    """

    label: str
    concurrency: int
    tokens: int
    median: float
    lowest: float
    highest: float
    p20: float
    p80: float
    rounds: int
    cpu_ms: float | None = None


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
        servers = {target.label: server_at(target.url) for target in targets}
        rates: dict[str, list[float]] = {target.label: [] for target in targets}
        spent: dict[str, list[float]] = {target.label: [] for target in targets}
        for _ in range(load.rounds):
            for target in targets:
                server = servers[target.label]
                before = 0.0 if server is None else cpu_seconds(server)
                rates[target.label].append(await _round(client, target, load))
                if server is not None:
                    tokens = load.concurrency * load.tokens
                    spent[target.label].append(1000 * (cpu_seconds(server) - before) / tokens)
    return [_summary(label, load, found, spent[label]) for label, found in rates.items()]


def _summary(label: str, load: Load, found: list[float], cpu_ms: list[float]) -> Throughput:
    median, lowest, highest = statistics.median(found), min(found), max(found)
    # One round has no fifths.
    fifths = statistics.quantiles(found, n=5, method="inclusive") if len(found) > 1 else found * 4
    spread = (lowest, highest, fifths[0], fifths[3])
    cost = statistics.median(cpu_ms) if cpu_ms else None
    return Throughput(label, load.concurrency, load.tokens, median, *spread, len(found), cost)


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
        "min_tokens": load.tokens,  # for servers that do not know ignore_eos, such as llama.cpp's
    }
    try:
        response = await client.post(f"{target.url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise WorkerError(f"{target.url}: cannot be reached ({type(error).__name__})") from error
    if response.status_code != httpx.codes.OK:
        raise WorkerError(f"{target.url}: answered {response.status_code}: {response.text[:200]}")
    answered = int(response.json()["usage"]["completion_tokens"])
    if answered != load.tokens:
        raise WorkerError(
            f"{target.url}: answered {answered} of {load.tokens} tokens, so its rate does not "
            "compare with others (it knows neither ignore_eos nor min_tokens); "
            "ask for fewer with --tokens"
        )
    return answered
