"""Measures a model's W4A16 products on this card within a budget, and keeps what was measured.

The products with the most bytes in a model come first. Their tiles are compiled beside each other
(:mod:`.w4a16_compile`) while others are timed; the file is written after each product, so that a
session that is cut off, or whose budget is spent, leaves what it has and the next one goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from taut_kernels.gemm.w4a16 import decode_tile, lookup, verdict, weight_format
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import launcher, measured_here
from taut_kernels.launch.measured_here import Document, Machine
from taut_kernels.tuner import w4a16_measure, w4a16_stock
from taut_kernels.tuner.refusal import REFUSED, first_line
from taut_kernels.tuner.w4a16_candidates import Product, Tried, candidates
from taut_kernels.tuner.w4a16_compile import (
    HUMMING,
    Compilers,
    Job,
    compilers,
    humming_compilers,
    jobs_of,
)
from taut_kernels.tuner.w4a16_layer import make_layer
from taut_kernels.tuner.w4a16_measure import TOKENS, Clock, Figures, graph_clock

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Wish:
    """A product that a model has.

    Attributes:
        product: the layer's shard.
        layers: how many the model has.
    """

    product: Product
    layers: int

    @property
    def weight(self) -> int:
        """What orders wishes: weights that a decode step reads."""
        return self.product.N * self.product.K * self.layers


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to time of a product: our candidates, their compilations, and vLLM's kernels."""

    product: Product
    tried: Mapping[int, Sequence[Tried]]
    jobs: Sequence[Job]
    stock: Mapping[str, w4a16_stock.Prepare]


@dataclass(frozen=True, slots=True)
class Session:
    """How to measure.

    Attributes:
        path: file of the verdicts, made or gone on with.
        machine: this one.
        source: command and date, for the file.
        deadline: of `time.monotonic`; no product begins later.
        tiles: of the cost model, to try beside what runs now.
        clock: times calls.
        start_compilers: starts them.
        device: where it runs.
        say: takes a line for people after each product.
    """

    path: Path
    machine: Machine
    source: str
    deadline: float
    tiles: int
    say: Say
    clock: Clock = graph_clock
    start_compilers: Callable[[], AbstractContextManager[Compilers]] = compilers
    device: str = "cuda"

    def run(self, wishes: Sequence[Wish]) -> Document:
        """Measure what the file lacks, as far as the time goes.

        Args:
            wishes: the model's products.

        Returns:
            What the file holds now.

        Raises:
            ValueError: the file there is damaged, or of another machine.
            OSError: it cannot be written.
        """
        document = self._begin()
        todo = [wish for wish in wishes if not _is_there(document, wish.product)]
        if not todo or time.monotonic() > self.deadline:
            return document
        todo.sort(key=lambda wish: -wish.weight)
        with self.start_compilers() as asked:
            plans = [self._plan(wish.product, asked) for wish in todo]
            others = [plan.product for plan in plans if HUMMING in plan.stock]
            with humming_compilers(others, TOKENS, self.say) as compiled:
                for plan in plans:
                    if not self._is_ready(plan, asked, compiled.get(plan.product)):
                        break
                    figures = self._measure(plan)
                    document = _with(document, figures)
                    measured_here.write(self.path, document)
                    self.say(_line(figures))
        return document

    def _plan(self, product: Product, asked: Compilers) -> _Plan:
        """Say what to time of a product, and have its tiles compiled."""
        device = torch.device(self.device)
        tried = {M: candidates(product, M, self.tiles, device) for M in TOKENS}
        jobs = [job for M, own in tried.items() for job in jobs_of(product, M, own, device)]
        asked.ask(jobs)
        hopper = launcher.is_hopper(device)
        stock = w4a16_stock.stock_of(product.N, product.weights.group_size, hopper=hopper)
        return _Plan(product, tried, jobs, stock)

    def _is_ready(self, plan: _Plan, asked: Compilers, other: Future[None] | None) -> bool:
        """Wait for what a product runs, until the time is over."""
        if not asked.wait(plan.jobs, self.deadline - time.monotonic()):
            return False
        left = max(0.0, self.deadline - time.monotonic())
        late = other is not None and wait([other], left).not_done
        return not late and time.monotonic() <= self.deadline

    def _begin(self) -> Document:
        if not self.path.exists():
            return Document(self.machine, self.source, {})
        document = measured_here.read(self.path)
        if (why := measured_here.why_foreign(document, self.machine)) is not None:
            raise ValueError(f"{self.path}: {why}; delete it and measure again with 'taut tune'")
        return replace(document, source=self.source)

    def _measure(self, plan: _Plan) -> Figures:
        N, K, weights = plan.product.N, plan.product.K, plan.product.weights
        try:
            layer = make_layer(
                N,
                K,
                weights.group_size,
                max(TOKENS),
                torch.bfloat16,
                zero_points=weights.zero_points,
                device=self.device,
            )
            return w4a16_measure.measure(layer, plan.product, plan.tried, plan.stock, self.clock)
        except REFUSED as error:
            return Figures(plan.product, notes=[f"not measured: {first_line(error)}"])


def _key(row: dict[str, Any]) -> tuple[int, int, WeightFormat]:
    return row["N"], row["K"], weight_format.of_row(row)


def _is_there(document: Document, product: Product) -> bool:
    wanted = (product.N, product.K, product.weights)
    return any(_key(row) == wanted for row in document.tables.get(verdict.TABLE, ()))


def _with(document: Document, figures: Figures) -> Document:
    row = figures.row()
    if row is None:
        return document
    new = {
        verdict.TABLE: [row],
        decode_tile.TABLE: figures.tile_rows(8),
        lookup.TABLE: figures.tile_rows(0),
    }
    tables = {name: [*document.tables.get(name, []), *rows] for name, rows in new.items()}
    return replace(document, tables=tables)


def _line(figures: Figures) -> str:
    row, notes = figures.row(), "; ".join(figures.notes)
    if row is None:
        return f"{figures.product}: stays with vLLM, no figures: {notes}"
    ratios = zip(row["M"], row["us"], row["vllm_us"], strict=True)
    told = ", ".join(f"{theirs / ours:.2f} at {M}" for M, ours, theirs in ratios)
    return f"{figures.product}: vLLM's time ÷ ours {told}" + (f" ({notes})" if notes else "")


def judged(document: Document, wishes: Sequence[Wish]) -> list[dict[str, Any]]:
    """Return what a file says of a model's products.

    Args:
        document: of the file.
        wishes: the products.

    Returns:
        One object a product, in their order: N, K, format, layers, and ``ours``: whether ours is
        the faster, None where nobody measured; with it M, us and vllm_us.
    """
    rows = {_key(row): row for row in document.tables.get(verdict.TABLE, ())}
    text = json.dumps({"gpu": document.machine.gpu, "source": "", "rows": list(rows.values())})
    shapes = verdict.parse(text, "the measurements").choices
    found = []
    for wish in wishes:
        key = (wish.product.N, wish.product.K, wish.product.weights)
        told: dict[str, Any] = {"N": key[0], "K": key[1], "format": key[2].value}
        told |= {"layers": wish.layers, "ours": None}
        if key in shapes:
            figures = {name: rows[key][name] for name in ("M", "us", "vllm_us")}
            told |= {"ours": shapes[key].wins} | figures
        found.append(told)
    return found
