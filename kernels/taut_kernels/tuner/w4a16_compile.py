"""Compiling tiles beside each other, in processes, before any of them is timed.

Compiling is what measuring costs most: one to three seconds of a core each. The processes fill
Triton's cache on disk, where this one finds them.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton

from taut_kernels.gemm.w4a16 import dispatch
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.decode_tile import TOKENS, DecodeTile
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.plan import Call
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.tuner.refusal import first_line
from taut_kernels.tuner.w4a16_candidates import Product, Tried
from taut_kernels.tuner.w4a16_layer import blank_layer, empty_weight
from taut_kernels.tuner.w4a16_stock import compile_humming

REFUSED = (triton.TritonError, RuntimeError, ValueError)
"""A tile that the compiler, the card or a plan does not take: in small groups stages are larger."""
HUMMING = "Humming"
PROCESSES = max(1, min(14, len(os.sched_getaffinity(0)) - 1))


class Job(NamedTuple):
    """One compilation.

    Attributes:
        N: output features.
        K: input features.
        M: tokens.
        tile: how to cut the work.
        weights: the format.
    """

    N: int
    K: int
    M: int
    tile: dispatch.Tile
    weights: WeightFormat

    @property
    def key(self) -> tuple[object, ...]:
        """What of it the compiled form depends on: N is no constant of the kernels, M of few."""
        tokens = 0
        if isinstance(self.tile, RingTile | WavesTile):
            tokens = self.M
        elif isinstance(self.tile, DecodeTile):
            tokens = 8 if self.M <= TOKENS else 16
        return self.K, self.tile, tokens, self.weights


def jobs_of(product: Product, M: int, tried: Iterable[Tried], device: torch.device) -> list[Job]:
    """Return what has to be compiled for some candidates of a product.

    Args:
        product: the layer's shard.
        M: tokens.
        tried: of :func:`.w4a16_candidates.candidates`.
        device: where they run.
    """
    N, K, weights = product.N, product.K, product.weights
    call = Call(M, N, K, weights.group_size, torch.bfloat16, device, weights.zero_points, False)
    found: list[Job] = []
    for one in tried:
        tile = dispatch.tile_of(one, call) if isinstance(one, str) else one
        if isinstance(tile, str):
            continue  # the dense regime's own kernel is one form, compiled where it first runs
        for part in (tile.head, tile.tail) if isinstance(tile, WavesTile) else (tile,):
            # Of a part of two, M may make more sums meet than a layer counts.
            fed = isinstance(part, WgmmaRingTile) and part.tma
            tokens = part.block_m if isinstance(part, WgmmaRingTile) and fed else M
            found.append(Job(N, K, tokens, part, weights))
    return found


def compile_tile(job: Job) -> str | None:
    """Compile one tile into Triton's cache, by launching it once.

    Args:
        job: what to compile.

    Returns:
        A line where it does not compile.
    """
    N, K, M, tile, weights = job
    try:
        x = torch.zeros(M, K, dtype=torch.bfloat16, device="cuda")
        weight = empty_weight(N, K, weights.group_size, zero_points=weights.zero_points)
        dispatch.launch(tile, x, *weight, weights.group_size)
        torch.cuda.synchronize()
    except REFUSED as error:
        return f"N={N} K={K} M={M} {tile}: {first_line(error)}"
    return None


class Compilers:
    """Processes that compile, each form once.

    Args:
        pool: of processes.
    """

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        self._pool = pool
        self._asked: dict[tuple[object, ...], concurrent.futures.Future[str | None]] = {}

    def ask(self, jobs: Iterable[Job]) -> None:
        """Have forms compiled that nobody asked for yet, in this order."""
        for job in jobs:
            if job.key not in self._asked:
                self._asked[job.key] = self._pool.submit(compile_tile, job)

    def wait(self, jobs: Iterable[Job], seconds: float) -> bool:
        """Wait for forms that were asked for.

        Args:
            jobs: which.
            seconds: the longest wait.

        Returns:
            Whether all of them are there.
        """
        wanted = [self._asked[job.key] for job in jobs]
        return not concurrent.futures.wait(wanted, max(0.0, seconds)).not_done

    def refusals(self) -> list[str]:
        """Return a line for each form that was tried and does not compile."""
        tried = [f for f in self._asked.values() if f.done() and not f.cancelled()]
        found = [f.result() if f.exception() is None else str(f.exception()) for f in tried]
        return [line for line in dict.fromkeys(found) if line]


@contextmanager
def compilers(processes: int = PROCESSES) -> Iterator[Compilers]:
    """Start compilers, and end them with what they have in hand.

    Args:
        processes: how many beside each other.
    """
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=context)
    try:
        yield Compilers(pool)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def humming_compilers(
    products: Sequence[Product], tokens: Sequence[int], say: Callable[[str], object]
) -> Iterator[dict[Product, concurrent.futures.Future[None]]]:
    """Have Humming compile in the background, for products whose rival it is.

    Args:
        products: of which it is; none may be.
        tokens: numbers of tokens.
        say: takes a line where it cannot compile, which is then told of each product.
    """

    def compile_one(product: Product) -> None:
        N, K, weights = product.N, product.K, product.weights
        blank = blank_layer(N, K, weights.group_size, zero_points=weights.zero_points)
        compile_humming(blank, tokens)

    # Its compiler runs in processes of its own.
    pool = concurrent.futures.ThreadPoolExecutor(PROCESSES)
    try:
        if products:
            # Alone: what brings weights to its layout is compiled once for all.
            error = pool.submit(compile_one, products[0]).exception()
            if error is not None:
                say(f"{HUMMING} does not compile: {first_line(error)}")
                products = []
        yield {product: pool.submit(compile_one, product) for product in products}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
