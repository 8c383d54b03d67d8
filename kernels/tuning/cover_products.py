"""Time ours beside vLLM's on every model's products: ``python -m tuning.cover_products``.

W4A16 products of :func:`taut_bench.model_sizes.every_product`, those that most models have first,
until ``--minutes`` are over. Appends one JSON object a product to ``--output``, after each one, and
passes over what is there already: a run that was cut off goes on. Tiles are compiled in processes
of their own while others are timed; with ``--tiles`` some of the model's next best are timed too.
`tuning.measured_table` makes the verdicts' table of the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch

from taut_bench import cuda_device, model_sizes, report
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.tuner import w4a16_compile, w4a16_stock
from taut_kernels.tuner.refusal import REFUSED, first_line
from taut_kernels.tuner.w4a16_candidates import Product, Tried, candidates
from taut_kernels.tuner.w4a16_layer import Layer, make_layer
from taut_kernels.tuner.w4a16_measure import OURS, TOKENS, Figures, graph_clock, measure


def wanted(
    weights: WeightFormat, kernels: Sequence[str], seen: Iterable[dict[str, Any]]
) -> list[tuple[Product, int]]:
    """Return the products to measure, each with how many models have it, most first.

    Args:
        weights: the format.
        kernels: vLLM's that are to be timed.
        seen: objects of the output so far.
    """
    done = {
        (line["N"], line["K"])
        for line in seen
        if line["format"] == weights and set(kernels) <= set(line["kernels"])
    }
    models = model_sizes.every_product(weights.group_size)
    return [
        (Product(N, K, weights), count)
        for (N, K), count in sorted(models.items(), key=lambda item: (-item[1], item[0]))
        if (N, K) not in done
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the objects of products from an output.

    Args:
        path: of the file; one that is not there is empty.

    Raises:
        ValueError: a line is no such object; names file and line.
    """
    found = []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            parsed = json.loads(line)
            if "environment" not in parsed:
                found.append(parsed | {"us": _by_tokens(parsed["us"])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: no product's figures: {error}") from error
    return found


def _by_tokens(us: dict[str, dict[str, float]]) -> dict[str, dict[int, float]]:
    return {kernel: {int(M): t for M, t in times.items()} for kernel, times in us.items()}


def as_line(figures: Figures, models: int, kernels: Sequence[str]) -> dict[str, Any]:
    """Return a product's object.

    Args:
        figures: what was measured.
        models: that have it.
        kernels: vLLM's that were to be timed.
    """
    product = figures.product
    return {
        "N": product.N,
        "K": product.K,
        "format": product.weights.value,
        "models": models,
        "kernels": list(kernels),
        "us": {
            kernel: {M: round(us, 3) for M, us in times.items()}
            for kernel, times in figures.us.items()
        },
        "decode_tiles": figures.tile_rows(8),
        "wgmma_tiles": figures.tile_rows(0),
        "notes": figures.notes,
    }


class _Plan:
    """What to try of each product, and its compilations."""

    def __init__(self, products: Sequence[Product], tokens: Sequence[int], tiles: int) -> None:
        device = torch.device("cuda")
        self.tried: dict[Product, dict[int, list[Tried]]] = {
            product: {M: candidates(product, M, tiles, device) for M in tokens}
            for product in products
        }
        self.jobs: dict[Product, list[w4a16_compile.Job]] = {
            product: [
                job
                for M, own in tried.items()
                for job in w4a16_compile.jobs_of(product, M, own, device)
            ]
            for product, tried in self.tried.items()
        }


def _layer(product: Product, rows: int) -> Layer:
    weights = product.weights
    return make_layer(
        product.N,
        product.K,
        weights.group_size,
        rows,
        torch.bfloat16,
        zero_points=weights.zero_points,
    )


def _cover(
    listed: Sequence[tuple[Product, int]],
    arguments: argparse.Namespace,
    asked: w4a16_compile.Compilers,
) -> int:
    """Measure until the time is over; return how many products were."""
    deadline = time.monotonic() + 60 * arguments.minutes
    products = [product for product, _ in listed]
    plan = _Plan(products, arguments.tokens, arguments.tiles)
    stock = {name: w4a16_stock.STOCK[name] for name in arguments.kernel}
    measured = 0
    asked_for = products if w4a16_compile.HUMMING in stock else []
    with w4a16_compile.humming_compilers(asked_for, arguments.tokens, print) as compiled:
        for product in products:
            asked.ask(plan.jobs[product])
        for product, models in listed:
            left = deadline - time.monotonic()
            rivals = [compiled[product]] if product in compiled else []
            if not asked.wait(plan.jobs[product], left) or wait(rivals, max(0, left)).not_done:
                break
            if time.monotonic() > deadline:
                break
            try:
                layer = _layer(product, max(arguments.tokens))
                figures = measure(layer, product, plan.tried[product], stock, graph_clock)
            except REFUSED as error:
                figures = Figures(product, notes=[f"not measured: {first_line(error)}"])
            _append(arguments.output, as_line(figures, models, arguments.kernel))
            measured += 1
            torch.cuda.empty_cache()
            sys.stdout.write(_summary(figures) + "\n")
            sys.stdout.flush()
    for line in asked.refusals():
        sys.stdout.write(f"does not compile: {line}\n")
    return measured


def _summary(figures: Figures) -> str:
    row = figures.row()
    if row is None:
        return f"{figures.product}: no figures: {'; '.join(figures.notes)}"
    ratios = zip(row["M"], row["us"], row["vllm_us"], strict=True)
    told = ", ".join(f"{M}: {theirs / ours:.2f}" for M, ours, theirs in ratios)
    notes = f" ({len(figures.notes)} notes)" if figures.notes else ""
    return f"{figures.product}: theirs ÷ ours at {told}{notes}"


def _append(path: Path, document: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(document) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.cover_products")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--minutes", type=float, required=True, help="no product begins later")
    parser.add_argument("--format", type=WeightFormat, default=WeightFormat.G128)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="M")
    parser.add_argument(
        "--kernel",
        nargs="+",
        choices=list(w4a16_stock.STOCK),
        default=("Machete", "Marlin"),
        help="beside ours",
    )
    parser.add_argument("--tiles", type=int, default=0, help="of the cost model, beside what runs")
    parser.add_argument("--products", type=int, help="no more than so many")
    arguments = parser.parse_args(argv)
    if cuda_device.missing("tuning.cover_products"):
        return 2
    try:
        seen = read(arguments.output)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    listed = wanted(arguments.format, arguments.kernel, seen)[: arguments.products]
    _append(arguments.output, {"environment": report.environment()})
    with w4a16_compile.compilers() as asked:
        measured = _cover(listed, arguments, asked)
    sys.stdout.write(f"measured {measured} of {len(listed)} {OURS} products\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
