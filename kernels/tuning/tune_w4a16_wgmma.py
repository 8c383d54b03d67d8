"""Find the tiles for more than 8 tokens: ``python -m tuning.tune_w4a16_wgmma``.

Every candidate of the `wgmma` ring (to 128 tokens; fed by TMA from 32 to 256) and the ring kernel
(to 64), and from 256 to 2048 tokens of two tiles for one product, is compiled first, in parallel,
then held to the error budget, called again and again for the same bits, then timed, with the dense
product (from 17 tokens on) and what ships today; the fastest one of each shape and bucket of M goes
into a table for ``taut_kernels/tiles``. With ``--between`` the fastest ones meet what ships,
in turn, at numbers of tokens spread over the bucket (``between.csv``, what ships first), and the
table has the rows that are worth a change and those that a change of a wider bucket asks for.
``--group-size`` and ``--zero-points`` make rows of another format than symmetric groups of 128;
`tuning.merge_tiles` brings them into the shipped table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taut_bench import cuda_device, report, w4a16_format
from taut_bench.shapes import PRODUCTS
from taut_bench.w4a16_format import DEFAULT, Format
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.gemm.w4a16.decode_ring_tile import MAX_TOKENS, RingTile
from taut_kernels.gemm.w4a16.lookup import BUCKETS, DECODE_TOKENS, Choice
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.plan import Call, Weight
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.launch import tile_tables
from taut_kernels.launch.launcher import gpu_name, is_hopper
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import first_line
from taut_kernels.tuner.w4a16_candidates import Product
from taut_kernels.tuner.w4a16_compile import REFUSED, compile_tile, jobs_of
from taut_kernels.tuner.w4a16_layer import Layer, make_layer
from tuning import tune_best, w4a16_finalists, w4a16_known_tiles, w4a16_rows
from tuning.compiling import compile_all
from tuning.decode_ring_candidates import decode_ring_candidates
from tuning.tune_w4a16_decode import KNOWN, SHAPES
from tuning.wgmma_ring_candidates import wgmma_ring_candidates
from tuning.wgmma_tma_candidates import tma_candidates
from tuning.wgmma_waves_candidates import (
    fed_waves_candidates,
    grouped_candidates,
    uneven_candidates,
)

TOKENS = (*BUCKETS, 4096)
"""M at which a bucket is decided: its largest, and 4096 for the one without a limit."""
REPEATS = 12
REGIMES = ("ring", "wgmma-ring", "tma", "tma-waves")
RING_TOKENS = 128
"""Most tokens whose ring candidates are a rule's; from 256 on a short list has them."""
_FED_WAVES = (192, 2048)
Tile = RingTile | WgmmaRingTile | WavesTile


def all_candidates(
    N: int, K: int, M: int, regimes: Sequence[str], given: Format = DEFAULT
) -> list[Tile]:
    """Return the candidates of some regimes, each once."""
    found: list[Tile] = []
    if "ring" in regimes and M <= MAX_TOKENS:
        found += decode_ring_candidates(N, K, M, given)
    if "wgmma-ring" in regimes and M <= RING_TOKENS:
        found += wgmma_ring_candidates(N, K, M, given)
    if "tma" in regimes:
        found += tma_candidates(N, K, M)
    if "tma-waves" in regimes and _FED_WAVES[0] <= M <= _FED_WAVES[1]:
        found += fed_waves_candidates(N, K, M)
    if "tma-waves" in regimes:
        found += uneven_candidates(M)
        found += grouped_candidates(M)
    return list(dict.fromkeys(found))


def regime_of(tile: Tile) -> str:
    """Name the regime of a tile, one of :data:`REGIMES`."""
    if isinstance(tile, WgmmaRingTile):
        return "tma" if tile.tma else "wgmma-ring"
    return "ring" if isinstance(tile, RingTile) else "tma-waves"


Result = w4a16_rows.Result[Choice]


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """What was timed of one shape.

    Attributes:
        results: every candidate's.
        decided: with ``--between`` N, K and bucket → what ships and what should.
        met: with it the times of the choices that met.
    """

    results: list[Result] = dataclasses.field(default_factory=list)
    decided: dict[w4a16_rows.Place, tuple[Choice, Choice]] = dataclasses.field(default_factory=dict)
    met: list[Result] = dataclasses.field(default_factory=list)


def _subject(layer: Layer, M: int, tile: Choice, weights: list[Weight]) -> timing.Subject:
    x, has_zeros = layer.x[:M], layer.weight_zero_point is not None
    shape = (M, layer.N, layer.K)
    call_of = Call(*shape, layer.group_size, x.dtype, x.device, has_zeros, has_bias=False)
    cut = w4a16_launch.tile_of(tile, call_of)

    def call(i: int) -> Tensor:
        return w4a16_launch.launch(cut, x, *weights[i], layer.group_size)

    return timing.Subject(str(tile), call, len(weights))


def _why_wrong(layer: Layer, subject: timing.Subject) -> str | None:
    """Hold a candidate to the error budget and to the same bits in every call."""
    first = subject.call(0)
    assert isinstance(first, Tensor)
    if reason := layer.why_wrong(first):
        return reason
    for _ in range(REPEATS):
        again = subject.call(0)
        assert isinstance(again, Tensor)
        if not torch.equal(first, again):
            return "bits differ from call to call"
    return None


def _time_shape(
    name: str,
    given: Format,
    Ms: Sequence[int],
    tiles: dict[int, list[Tile]],
    replays: int,
    *,
    between: bool,
) -> Timed:
    """Return every candidate's time."""
    N, K = PRODUCTS[name]
    size, zero_points = given.group_size, given.zero_points
    layer = make_layer(N, K, size, max(Ms), torch.bfloat16, zero_points=zero_points)
    weights = layer.packed(timing.copies_needed(layer.weight_bytes()))
    timed = Timed()
    for M in Ms:
        others: tuple[Choice, ...] = () if M <= DECODE_TOKENS else ("dense",)
        bucket, device = tiles_wgmma.bucket_of(M), layer.x.device
        gpu, hopper = gpu_name(device), is_hopper(device)
        ships = tiles_wgmma.lookup(gpu, N, K, bucket, given.weights, hopper=hopper)
        for tile in dict.fromkeys((*others, ships, *tiles[M])):
            subject = _subject(layer, M, tile, weights)
            try:
                reason = _why_wrong(layer, subject)
            except REFUSED as error:
                sys.stdout.write(f"{name} M={M} {tile}: {first_line(error)}\n")
                continue
            if reason:
                sys.stdout.write(f"WRONG {name} M={M} {tile}: {reason}\n")
                continue
            us = timing.measure([subject], replays, 8 if M >= 1024 else 32)[0].median
            timed.results.append(Result(name, N, K, M, us, tile))
            if tile == ships:
                sys.stdout.write(f"{name:8} M={M:<4} {us:8.2f} us  ships: {tile}\n")
        found = [r for r in timed.results if r.M == M]
        _print_best(found)
        if between:
            least = max((bucket_end for bucket_end in TOKENS if bucket_end < M), default=0)
            tokens = w4a16_finalists.spread(least, M)

            def subject_of(choice: Choice, M: int) -> timing.Subject:
                return _subject(layer, M, choice, weights)

            best, met = _meet(found, ships, tokens, subject_of, replays)
            timed.decided[N, K, bucket] = ships, best
            timed.met.extend(met)
    return timed


def _meet(
    found: list[Result],
    ships: Choice,
    tokens: list[int],
    subject_of: w4a16_finalists.SubjectOf,
    replays: int,
) -> tuple[Choice, list[Result]]:
    """Return the choice that should serve a bucket, and the times of those that met over it."""
    ends = {r.tile: r.us for r in found}
    few = w4a16_finalists.times_at(list(ends), tokens[1], subject_of, replays)
    fastest = sorted(ends, key=lambda tile: ends[tile] * few[tile])
    choices = list(dict.fromkeys((ships, *fastest[: w4a16_finalists.FINALISTS])))
    times = w4a16_finalists.meet(choices, tokens, subject_of, replays)
    met = [
        dataclasses.replace(found[0], M=M, us=us, tile=choice)
        for choice, own in zip(choices, times, strict=True)
        for M, us in zip(tokens, own, strict=True)
    ]
    return choices[w4a16_finalists.worth_taking(times)], met


def _as_json(choice: Choice) -> str | dict[str, Any]:
    return choice if isinstance(choice, str) else dataclasses.asdict(choice)


def _print_best(results: list[Result], top: int = 6) -> None:
    for result in sorted(results, key=lambda r: r.us)[:top]:
        tile = _as_json(result.tile)
        tile = tile if isinstance(tile, str) else f"{result.tile}  {tuple(tile.values())}"
        sys.stdout.write(f"{result.shape:8} M={result.M:<4} {result.us:8.2f} us  {tile}\n")
    sys.stdout.flush()


def _changed(
    decided: dict[w4a16_rows.Place, tuple[Choice, Choice]], met: list[Result], given: Format
) -> list[Result]:
    """Return what a table of this card should change to, each with its time at its bucket's end."""
    table = tile_tables.of_card(tiles_wgmma.tables(), torch.cuda.get_device_name())
    rows = w4a16_rows.changed(decided, {} if table is None else table.choices, given.weights)
    # By bucket the last that met, at its end. The head alone of a pair was timed as the pair.
    ends = {(r.N, r.K, tiles_wgmma.bucket_of(r.M), r.tile): r for r in met}
    return [
        dataclasses.replace(ends[*place, decided[place][1]], tile=choice)
        for place, choice in rows.items()
    ]


def table_rows(results: list[Result], given: Format = DEFAULT) -> list[dict[str, Any]]:
    """Put the fastest choice of each shape and number of tokens into rows of a ``tiles/`` table."""
    fastest: dict[tuple[int, int, int], Result] = {}
    for r in results:
        best = fastest.get((r.N, r.K, r.M))
        if best is None or r.us < best.us:
            fastest[r.N, r.K, r.M] = r
    rows = []
    for (N, K, M), r in fastest.items():
        max_m = M if M in BUCKETS else None
        named = {"N": N, "K": K, "max_m": max_m} | weight_format.as_field(given.weights)
        rows.append(named | tiles_wgmma.as_fields(r.tile) | {"us": round(r.us, 3)})
    return rows


def _tried(
    N: int, K: int, M: int, regimes: Sequence[str], given: Format, *, known: bool
) -> list[Tile]:
    """Return the tiles to try: known winners only, or all candidates."""
    if not known:
        return all_candidates(N, K, M, regimes, given)
    tiles = w4a16_known_tiles.product_tiles(N, K, M)
    return [tile for tile in tiles if regime_of(tile) in regimes]


def _write(
    directory: Path, table: dict[str, Any], results: list[Result], met: list[Result]
) -> None:
    """Write the table, every candidate's time, and the times of those that met."""
    timed = [{"shape": r.shape, "M": r.M, "us": r.us, "tile": _as_json(r.tile)} for r in results]
    for file, document in (("w4a16_wgmma.json", table), ("all.json", timed)):
        text = json.dumps(document, indent=1) + "\n"
        (directory / file).write_text(text, encoding="utf-8")
    tune_best.write(timed, directory)
    if met:
        rows = [(r.shape, r.M, f"{r.us:.1f}", str(r.tile)) for r in met]
        report.write_csv(directory / "between.csv", ("shape", "M", "us", "tile"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.tune_w4a16_wgmma")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--shape", action="append", choices=sorted(PRODUCTS))
    parser.add_argument("--tokens", type=int, action="append", choices=TOKENS)
    parser.add_argument("--regime", action="append", choices=REGIMES)
    parser.add_argument("--known", action="store_true", help=KNOWN)
    parser.add_argument(
        "--between", action="store_true", help="decide all over a bucket, not at its end alone"
    )
    parser.add_argument("--processes", type=int, default=14, help="compilers beside each other")
    parser.add_argument("--replays", type=int, default=8)
    w4a16_format.add_tuned_arguments(parser)
    arguments = parser.parse_args(argv)
    if cuda_device.missing("tuning.tune_w4a16_wgmma"):
        return 2
    shapes = arguments.shape or list(SHAPES)
    Ms = arguments.tokens or list(TOKENS)
    regimes, given = arguments.regime or REGIMES, w4a16_format.tuned(arguments)
    tiles: dict[tuple[str, int], list[Tile]] = {
        (name, M): _tried(*PRODUCTS[name], M, regimes, given, known=arguments.known)
        for name in shapes
        for M in Ms
    }
    wanted = [
        job
        for (name, M), some in tiles.items()
        for job in jobs_of(Product(*PRODUCTS[name], given.weights), M, some, torch.device("cuda"))
    ]
    compile_all(compile_tile, {job.key: job for job in wanted}.values(), arguments.processes)
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = w4a16_format.tuner("tuning.tune_w4a16_wgmma", given)
    facts = ", ".join(f"{key} {value}" for key, value in report.environment().items())
    results: list[Result] = []
    met: list[Result] = []
    decided: dict[w4a16_rows.Place, tuple[Choice, Choice]] = {}
    for name in shapes:
        own = {M: tiles[name, M] for M in Ms}
        timed_here = _time_shape(name, given, Ms, own, arguments.replays, between=arguments.between)
        results += timed_here.results
        met += timed_here.met
        decided |= timed_here.decided
        table = {
            "gpu": torch.cuda.get_device_name(),
            "source": f"{command}, {facts}",
            "rows": table_rows(_changed(decided, met, given) if decided else results, given),
        }
        # After every shape: what was measured survives a run that is cut off.
        _write(arguments.output, table, results, met)
    return 0


if __name__ == "__main__":
    sys.exit(main())
