"""Find the decode kernel's tiles on this card: ``python -m tuning.tune_w4a16_decode``.

Every candidate is compiled first, in parallel, then held to the error budget, then timed at 1 and
8 tokens; the fastest one of each shape goes into a table for ``taut_kernels/tiles``: of symmetric
groups of 128, or, with ``--group-size`` and ``--zero-points``, rows of another format.
`tuning.merge_tiles` brings them into the shipped table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taut_bench import cuda_device, report, w4a16_format
from taut_bench.shapes import LLAMA3_8B_PRODUCTS, PRODUCTS, SQUARE
from taut_bench.w4a16_format import DEFAULT, Format
from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.gemm.w4a16.decode_tile import TOKENS, DecodeTile
from taut_kernels.gemm.w4a16.plan import Weight
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import first_line
from taut_kernels.tuner.w4a16_compile import REFUSED, Job, compile_tile
from taut_kernels.tuner.w4a16_layer import Layer, make_layer
from tuning import tune_best, w4a16_known_tiles, w4a16_rows
from tuning.compiling import compile_all

SHAPES = LLAMA3_8B_PRODUCTS | SQUARE
"""N × K of a Llama-3-8B layer's products, and the square of the literature."""
KNOWN = "try only tiles that won on a measured shape, with K split otherwise"
_WARPS_PER_GPU = (850, 4500)
_QUEUES = ((8, 8, 2), (8, 4, 1), (8, 8, 8))
"""(depth, x_depth, batch) to try."""
_REGISTERS = (0, 96, 112, 128, 136, 144)
"""Caps to try. Without one ptxas aims at some 72 registers a thread,
and loads the activations two at a time, right before their product. With 136 or 144 there is room
for the next weights while a unit is multiplied; up to 128 they are asked for behind it."""
_ALL_REGISTERS = 132 * 65536


def candidates(N: int, K: int) -> Iterator[DecodeTile]:
    """Yield the tiles worth compiling for one shape."""
    units = -(-K // tiles_decode.UNIT)
    for row_warps, k_warps, split in itertools.product((1, 2, 4), (1, 2, 4, 8), range(1, 9)):
        warps = N // 16 * k_warps * split
        if not 2 <= row_warps * k_warps <= 8:
            continue
        if w4a16_known_tiles.idle_share(units, k_warps * split) > w4a16_known_tiles.MOST_IDLE:
            continue
        if not _WARPS_PER_GPU[0] <= warps <= _WARPS_PER_GPU[1]:
            continue
        if (row_warps > 2 and k_warps > 1) or (split > 1 and k_warps > 2):
            continue
        for (depth, x_depth, batch), fence, registers in itertools.product(
            _QUEUES, (False, True), _REGISTERS
        ):
            if warps * 32 * registers > _ALL_REGISTERS:
                continue  # not every program would have a place at once
            yield DecodeTile(row_warps, k_warps, split, depth, x_depth, batch, fence, registers)


def _tried(N: int, K: int, given: Format, *, known: bool) -> list[DecodeTile]:
    """Return the candidates of one shape, each once."""
    lean = given.weights is not DEFAULT.weights
    found: list[DecodeTile] = w4a16_known_tiles.lean_decode_tiles(N, K) if lean else []
    if not (lean and known):
        search = w4a16_known_tiles.decode_tiles if known else candidates
        found += search(N, K)
    return list(dict.fromkeys(found))


Result = w4a16_rows.Result[DecodeTile]


def _subject(layer: Layer, M: int, tile: DecodeTile, weights: list[Weight]) -> timing.Subject:
    x = layer.x[:M]

    def call(i: int) -> Tensor:
        return w4a16_launch.launch(tile, x, *weights[i], layer.group_size)

    return timing.Subject(str(tile), call, len(weights))


def _time_shape(
    name: str, given: Format, Ms: Sequence[int], tiles: list[DecodeTile]
) -> list[Result]:
    N, K = PRODUCTS[name]
    size, zero_points = given.group_size, given.zero_points
    layer = make_layer(N, K, size, TOKENS, torch.bfloat16, zero_points=zero_points)
    weights = layer.packed(timing.copies_needed(layer.weight_bytes()))
    results: list[Result] = []
    for M in Ms:
        for tile in tiles:
            subject = _subject(layer, M, tile, weights)
            try:
                y = subject.call(0)
            except REFUSED as error:
                sys.stdout.write(f"{name} M={M} {tile}: {first_line(error)}\n")
                continue
            assert isinstance(y, Tensor)
            if reason := layer.why_wrong(y):
                sys.stdout.write(f"WRONG {name} M={M} {tile}: {reason}\n")
                continue
            us = timing.measure([subject], replays=15)[0].median
            results.append(Result(name, N, K, M, us, tile))
    return results


def _table_rows(results: list[Result], given: Format = DEFAULT) -> list[dict[str, Any]]:
    """Put the best tile of each shape into the rows of a table of ``tiles/``.

    The least sum over the measured M counts, so that no M pays for another.
    """
    sums: dict[tuple[int, int], dict[DecodeTile, list[float]]] = {}
    for result in results:
        sums.setdefault((result.N, result.K), {}).setdefault(result.tile, []).append(result.us)
    rows = []
    for (N, K), tiles in sums.items():
        most = max(len(us) for us in tiles.values())
        complete = {tile: us for tile, us in tiles.items() if len(us) == most}
        tile, us = min(complete.items(), key=lambda item: sum(item[1]))
        named = {"N": N, "K": K, "max_m": TOKENS} | weight_format.as_field(given.weights)
        rows.append(named | {"tile": dataclasses.asdict(tile), "us": us})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.tune_w4a16_decode")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--shape", action="append", choices=sorted(PRODUCTS))
    parser.add_argument("--tokens", type=int, action="append", choices=(1, 8))
    parser.add_argument("--known", action="store_true", help=KNOWN)
    parser.add_argument("--processes", type=int, default=14, help="compilers beside each other")
    w4a16_format.add_tuned_arguments(parser)
    parser.add_argument("--top", type=int, default=6, help="rows printed for each shape")
    arguments = parser.parse_args(argv)
    if cuda_device.missing("tuning.tune_w4a16_decode"):
        return 2
    shapes = {name: PRODUCTS[name] for name in arguments.shape or SHAPES}
    Ms, given = arguments.tokens or [1, 8], w4a16_format.tuned(arguments)
    tiles = {name: _tried(*shape, given, known=arguments.known) for name, shape in shapes.items()}
    wanted = [
        Job(*shapes[name], TOKENS, tile, given.weights)
        for name, some in tiles.items()
        for tile in some
    ]
    jobs = {job.key: job for job in wanted}
    compile_all(compile_tile, jobs.values(), arguments.processes)
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for name in shapes:
        found = _time_shape(name, given, Ms, tiles[name])
        results += found
        for M in Ms:
            mine = sorted((r for r in found if r.M == M), key=lambda r: r.us)
            for result in mine[: arguments.top]:
                line = f"{name:8} M={M:<2} {result.us:6.2f} us  {dataclasses.astuple(result.tile)}"
                sys.stdout.write(line + "\n")
        sys.stdout.flush()
        # After every shape: what was measured survives a run that is cut off.
        _write_results(results, arguments.output, given)
    return 0


def _write_results(results: list[Result], folder: Path, given: Format) -> None:
    command = w4a16_format.tuner("tuning.tune_w4a16_decode", given)
    facts = ", ".join(f"{key} {value}" for key, value in report.environment().items())
    source, rows = f"{command}, {facts}", _table_rows(results, given)
    table = {"gpu": torch.cuda.get_device_name(), "source": source, "rows": rows}
    _write(table, folder / "table.json")
    timed = [dataclasses.asdict(result) for result in results]
    _write(timed, folder / "all.json")
    tune_best.write(timed, folder)


def _write(document: object, path: Path) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
