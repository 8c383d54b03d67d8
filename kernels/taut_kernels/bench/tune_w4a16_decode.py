"""Find the decode kernel's tiles on this card: ``python -m taut_kernels.bench.tune_w4a16_decode``.

Every candidate is compiled first, in parallel, then held to the error budget, then timed; the
fastest one of each shape and token tile goes into a table for ``taut_kernels/tiles``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from taut_kernels import formats_mma, tiles_decode
from taut_kernels.bench import report, timing, w4a16_known_tiles
from taut_kernels.bench.shapes import LLAMA3_8B_PRODUCTS, PRODUCTS, SQUARE
from taut_kernels.bench.w4a16_layer import Layer, make_layer
from taut_kernels.gemm import w4a16_launch
from taut_kernels.gemm.w4a16 import make_arrivals
from taut_kernels.tiles_decode import DecodeTile

SHAPES = LLAMA3_8B_PRODUCTS | SQUARE
"""N × K of a Llama-3-8B layer's products, and the square of the literature."""
GROUP_SIZE = 128
KNOWN = "try only tiles that won on a measured shape, with K split otherwise"
_WARPS_PER_GPU = (850, 4500)


_QUEUES = {
    (1, 1): ((8, 8, 2), (8, 4, 1), (8, 8, 8)),
    (1, 2): ((4, 4, 2), (2, 2, 2), (8, 2, 2), (8, 1, 1)),
    (2, 2): ((4, 4, 2), (4, 4, 4), (2, 2, 2), (4, 2, 2), (6, 2, 2), (4, 1, 1)),
}
"""(depth, x_depth, batch) to try, by row tiles and token tiles."""
_REGISTERS = {(1, 1): (0, 96, 112, 128, 136, 144), (1, 2): (0, 96), (2, 2): (128, 168)}
"""Caps to try, by row tiles and token tiles. Without one ptxas aims at some 72 registers a thread,
and loads the activations two at a time, right before their product. With 136 or 144 there is room
for the next weights while a unit is multiplied; up to 128 they are asked for behind it."""
_ALL_REGISTERS = 132 * 65536


def candidates(N: int, K: int, token_tiles: int) -> Iterator[DecodeTile]:
    """Yield the tiles worth compiling for one shape."""
    units = -(-K // tiles_decode.UNIT)
    for row_tiles, row_warps, k_warps, split in itertools.product(
        (1, 2), (1, 2, 4), (1, 2, 4, 8), range(1, 9)
    ):
        warps = N // 16 // row_tiles * k_warps * split
        if not 2 <= row_warps * k_warps <= 8:
            continue
        if w4a16_known_tiles.idle_share(units, k_warps * split) > w4a16_known_tiles.MOST_IDLE:
            continue
        if not _WARPS_PER_GPU[0] <= warps <= _WARPS_PER_GPU[1]:
            continue
        if (row_warps > 2 and k_warps > 1) or (split > 1 and k_warps > 2):
            continue
        for (depth, x_depth, batch), fence, registers in itertools.product(
            _QUEUES.get((row_tiles, token_tiles), ()),
            (False, True) if token_tiles == 1 else (False,),
            _REGISTERS.get((row_tiles, token_tiles), ()),
        ):
            if token_tiles == 1 and warps * 32 * registers > _ALL_REGISTERS:
                continue  # not every program would have a place at once
            yield DecodeTile(
                row_tiles, row_warps, k_warps, split, depth, x_depth, batch, fence, registers
            )


def _compile(job: tuple[int, int, int, DecodeTile]) -> str | None:
    """Compile one candidate into Triton's cache; a line where it does not compile."""
    N, K, M, tile = job
    x, qweight, scales, arrivals = _operands(N, K, M)
    try:
        w4a16_launch.launch(tile, x, qweight, scales, None, None, arrivals, GROUP_SIZE)
        torch.cuda.synchronize()
    except (triton.CompilationError, RuntimeError) as error:
        return f"N={N} K={K} M={M} {tile}: {str(error).splitlines()[0]}"
    return None


def _operands(
    N: int, K: int, M: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make operands of the right shapes and types; only their compiled form matters."""
    x = torch.zeros(M, K, dtype=torch.bfloat16, device="cuda")
    qweight = torch.zeros(N // 16, K // 64, 32, 4, dtype=torch.int32, device="cuda")
    quads = -(-K // GROUP_SIZE // 4)
    scales = torch.zeros(N // 16, quads, 8, 4, 2, dtype=torch.bfloat16, device="cuda")
    arrivals = torch.zeros(N // 16, dtype=torch.int32, device="cuda")
    return x, qweight, scales, arrivals


Weights = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Copies of a layer's qweight, scales and arrivals."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One timed candidate; ``us`` is microseconds a call."""

    shape: str
    N: int
    K: int
    M: int
    us: float
    tile: DecodeTile


def _subject(layer: Layer, M: int, tile: DecodeTile, weights: Weights) -> timing.Subject:
    x = layer.x[:M]

    def call(i: int) -> torch.Tensor:
        qweight, scales, arrivals = weights[i]
        return w4a16_launch.launch(tile, x, qweight, scales, None, None, arrivals, GROUP_SIZE)

    return timing.Subject(str(tile), call, len(weights))


def _time_shape(
    name: str, N: int, K: int, Ms: Sequence[int], tiles: dict[int, list[DecodeTile]]
) -> list[Result]:
    layer = make_layer(N, K, GROUP_SIZE, 16, torch.bfloat16)
    copies = timing.copies_needed(layer.weight_bytes())
    qweight = formats_mma.repack_weight(layer.weight_packed, K)
    scales = formats_mma.repack_scale(layer.weight_scale)
    weights = [
        (qweight.clone(), scales.clone(), make_arrivals(N, layer.x.device)) for _ in range(copies)
    ]
    results: list[Result] = []
    for M in Ms:
        for tile in tiles[M]:
            subject = _subject(layer, M, tile, weights)
            try:
                y = subject.call(0)
            except (triton.CompilationError, RuntimeError) as error:
                sys.stdout.write(f"{name} M={M} {tile}: {str(error).splitlines()[0]}\n")
                continue
            assert isinstance(y, torch.Tensor)
            if reason := layer.why_wrong(y):
                sys.stdout.write(f"WRONG {name} M={M} {tile}: {reason}\n")
                continue
            us = timing.measure([subject], replays=15)[0].median
            results.append(Result(name, N, K, M, us, tile))
    return results


def _table_rows(results: list[Result]) -> list[dict[str, Any]]:
    """Put the best tile of each shape and token tile into the rows of a table of ``tiles/``.

    With 8 token columns the least sum over the measured M counts, so that no M pays for another.
    """
    sums: dict[tuple[int, int, int], dict[DecodeTile, list[float]]] = {}
    for result in results:
        key = (result.N, result.K, 8 if result.M <= 8 else 16)
        sums.setdefault(key, {}).setdefault(result.tile, []).append(result.us)
    rows = []
    for (N, K, max_m), tiles in sums.items():
        most = max(len(us) for us in tiles.values())
        complete = {tile: us for tile, us in tiles.items() if len(us) == most}
        tile, us = min(complete.items(), key=lambda item: sum(item[1]))
        rows.append({"N": N, "K": K, "max_m": max_m, "tile": dataclasses.asdict(tile), "us": us})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m taut_kernels.bench.tune_w4a16_decode")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--shape", action="append", choices=sorted(PRODUCTS))
    parser.add_argument("--tokens", type=int, action="append", choices=(1, 8, 16))
    parser.add_argument("--known", action="store_true", help=KNOWN)
    parser.add_argument("--processes", type=int, default=14, help="compilers beside each other")
    parser.add_argument("--top", type=int, default=6, help="rows printed for each shape")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("error: taut_kernels.bench.tune_w4a16_decode needs a CUDA device\n")
        return 2
    shapes = {name: PRODUCTS[name] for name in arguments.shape or SHAPES}
    Ms = arguments.tokens or [1, 8, 16]
    search = w4a16_known_tiles.decode_tiles if arguments.known else candidates
    tiles = {
        (name, M): list(search(*shape, 1 if M <= 8 else 2))
        for name, shape in shapes.items()
        for M in Ms
    }
    jobs = {
        (*shapes[name], 8 if M <= 8 else 16, tile): None
        for (name, M), some in tiles.items()
        for tile in some
    }
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        for line in pool.map(_compile, jobs, chunksize=max(1, len(jobs) // 200)):
            if line:
                sys.stdout.write(f"does not compile: {line}\n")
    sys.stdout.write(f"compiled {len(jobs)} candidates\n")
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for name, (N, K) in shapes.items():
        found = _time_shape(name, N, K, Ms, {M: tiles[name, M] for M in Ms})
        results += found
        for M in Ms:
            mine = sorted((r for r in found if r.M == M), key=lambda r: r.us)
            for result in mine[: arguments.top]:
                line = f"{name:8} M={M:<2} {result.us:6.2f} us  {dataclasses.astuple(result.tile)}"
                sys.stdout.write(line + "\n")
        sys.stdout.flush()
        # After every shape: what was measured survives a run that is cut off.
        _write_results(results, arguments.output)
    return 0


def _write_results(results: list[Result], folder: Path) -> None:
    source = "python -m taut_kernels.bench.tune_w4a16_decode, " + ", ".join(
        f"{key} {value}" for key, value in report.environment().items()
    )
    rows = _table_rows(results)
    table = {"gpu": torch.cuda.get_device_name(), "source": source, "rows": rows}
    _write(table, folder / "table.json")
    _write([dataclasses.asdict(result) for result in results], folder / "all.json")


def _write(document: object, path: Path) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
