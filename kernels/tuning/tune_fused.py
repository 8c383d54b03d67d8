"""Find the fused kernels' tiles on this card: ``python -m tuning.tune_fused --output DIR``.

Every candidate is compiled first, in parallel processes, then held to the error budget, then timed.
The fastest of each form, width and number of tokens goes into a table for ``taut_kernels/tiles``.
Programmatic dependent launch is not tried: a chain of equal kernels overlaps as no model's does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from taut_bench import cuda_device, report
from taut_bench.fused import asked_for, copies_of, parser_of
from taut_bench.fused_cases import (
    EPSILON,
    FORMS,
    HEAD_DIM,
    Call,
    Form,
    Operands,
    Result,
    make_operands,
    quantised_dtype,
    why_wrong,
)
from taut_kernels.activation import silu_mul_launch
from taut_kernels.norm import rms_norm_launch
from taut_kernels.rope import rope_launch
from taut_kernels.rowwise import quantize
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.tuner import timing
from tuning.compiling import compile_all

TIE = 1.02
"""Times this near each other are not told apart."""
_MOST_ELEMENTS = 64
"""Columns a thread may hold with 16 warps or fewer; more spills."""
_HELD_IN_16_BITS = ("silu_mul_quant", "row_quant")
_HELD_TWICE = ("rms_norm_quant", "add_rms_norm_quant")
_CAPS = (32, 40, 48, 64)
"""Registers that let 2,048, 1,536, 1,280 and 1,024 threads run on a multiprocessor."""


def candidates(form: Form, N: int, M: int) -> Iterator[FusedTile]:
    """Yield the tiles worth compiling for one form, width and number of tokens."""
    if form.op == "rope":
        for heads, tokens, warps in itertools.product((4, 8, 16, 32), (1, 2, 4), (1, 2, 4)):
            if heads * tokens * HEAD_DIM <= 64 * 32 * warps and heads * HEAD_DIM >= 128 * warps:
                yield FusedTile(tokens, heads, warps)
        return
    if form.op == "silu_mul":
        for block, warps, rows in itertools.product((512, 1024, 2048, 4096), (2, 4, 8), (1, 2)):
            if 4 <= rows * block // (32 * warps) <= 32 and rows <= M:
                yield FusedTile(rows, block, warps)
        return
    yield from _row_candidates(form.op, N, M)


def _row_candidates(op: str, N: int, M: int) -> Iterator[FusedTile]:
    # 32 warps leave a thread 64 registers.
    tight = 32 if op in _HELD_IN_16_BITS else 16
    for warps, each, rows in itertools.product((2, 4, 8, 16, 32), (8, 16), (1, 2, 4)):
        block = 32 * warps * each
        columns = -(-N // block) * block
        held = rows * columns // (32 * warps)
        if rows <= M and block < 2 * N and 4 <= held <= (tight if warps == 32 else _MOST_ELEMENTS):
            yield FusedTile(rows, block, warps)
            # A cap both ways: more programs at a time, or more loads before the first sum than
            # ptxas has registers for if it is left to aim.
            least = 2 * held - 4 if op in _HELD_TWICE else held + 8
            for cap in _CAPS:
                if least <= cap <= 65536 // (32 * warps):
                    yield FusedTile(rows, block, warps, registers=cap)


def _call(form: Form, tile: FusedTile, copies: Sequence[Operands]) -> Call:
    """Bind the launcher to a tile; results are kept as :func:`fused_cases.taut` keeps them."""
    kept: list[Result] = [_allocate(form, operands) for operands in copies]

    def call(i: int) -> Result:
        operands, result = copies[i], kept[i]
        if form.op == "rope":
            q, k = operands.q.unflatten(1, (-1, HEAD_DIM)), operands.k.unflatten(1, (-1, HEAD_DIM))  # type: ignore[no-untyped-call]
            assert operands.positions is not None
            assert operands.cache is not None
            rope_launch.launch(tile, operands.positions, q, k, operands.cache, True)
            return operands.x
        y, scales = result if isinstance(result, tuple) else (result, None)
        if form.op.startswith("silu"):
            silu_mul_launch.launch(tile, form.out, operands.x, *form.activation, y, scales)
        elif form.op == "row_quant":
            assert scales is not None
            quantize.launch(tile, form.out, operands.x, y, scales)
        else:
            weight, residual = operands.weight, operands.residual
            rms_norm_launch.launch(tile, form.out, operands.x, weight, residual, EPSILON, y, scales)
        return result

    return call


def _allocate(form: Form, operands: Operands) -> Result:
    M, columns = operands.x.shape
    N = columns // 2 if form.op.startswith("silu") else columns
    if form.out == "same":
        return torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    q = torch.empty(M, N, dtype=quantised_dtype(form), device="cuda")
    return q, torch.empty(M, 1, dtype=torch.float32, device="cuda")


def _compile(job: tuple[str, int, FusedTile]) -> str | None:
    """Compile one candidate into Triton's cache; a line where it does not compile."""
    name, N, tile = job
    try:
        _call(FORMS[name], tile, [make_operands(FORMS[name], N, tile.rows)])(0)
        torch.cuda.synchronize()
    except (triton.CompilationError, RuntimeError) as error:
        return f"{name} N={N} {tile}: {str(error).splitlines()[0]}"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """One timed candidate; ``us`` is microseconds a call."""

    form: str
    op: str
    N: int
    M: int
    us: float
    tile: FusedTile


def _time(name: str, N: int, M: int, tiles: Sequence[FusedTile]) -> list[Timed]:
    form = FORMS[name]
    copies = copies_of(form, N, M)
    subjects, kept = [], []
    for tile in tiles:
        try:
            reason = why_wrong(form, N, lambda form, some, tile=tile: _call(form, tile, some))  # type: ignore[misc]
        except (triton.CompilationError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
        if reason:
            sys.stdout.write(f"dropped {name} N={N} {tile}: {reason}\n")
            continue
        subjects.append(timing.Subject(str(tile), _call(form, tile, copies), len(copies)))
        kept.append(tile)
    times = timing.measure(subjects, replays=20) if subjects else []
    found = [
        Timed(name, form.op, N, M, time.median, tile)
        for tile, time in zip(kept, times, strict=True)
    ]
    return sorted(found, key=lambda timed: timed.us)


def table_rows(results: Sequence[Timed]) -> list[dict[str, Any]]:
    """Put the best tile of each op, width and number of tokens into the rows of a table.

    Forms of one op share a tile: the least sum over them counts. A row serves up to its number of
    tokens, the last one any number. Where the tile of the next larger number of tokens is as good
    within `TIE`, it is taken too, and the two become one row: fewer forms to compile.
    """
    sums: dict[tuple[str, int], dict[int, dict[FusedTile, list[float]]]] = {}
    for timed in results:
        at = sums.setdefault((timed.op, timed.N), {}).setdefault(timed.M, {})
        at.setdefault(timed.tile, []).append(timed.us)
    rows: list[dict[str, Any]] = []
    for (op, N), by_tokens in sums.items():
        shape_rows: list[tuple[int | None, FusedTile, list[float]]] = []
        for M, tiles in sorted(by_tokens.items(), reverse=True):
            most = max(len(us) for us in tiles.values())
            whole = {tile: us for tile, us in tiles.items() if len(us) == most}
            best = min(whole, key=lambda tile: sum(whole[tile]))
            larger = shape_rows[-1][1] if shape_rows else None
            if larger in whole and sum(whole[larger]) <= TIE * sum(whole[best]):
                continue
            shape_rows.append((M if shape_rows else None, best, whole[best]))
        for limit, tile, us in reversed(shape_rows):
            rounded = [round(value, 3) for value in us]
            fields = dataclasses.asdict(tile)
            rows.append({"op": op, "N": N, "max_m": limit, "tile": fields, "us": rounded})
    return rows


def run(widths: Mapping[str, Sequence[int]], tokens: Sequence[int], output: Path) -> int:
    """Tune and write ``table.json`` and ``all.json``; return the exit status.

    Args:
        widths: keys of `FORMS` and their N.
        tokens: numbers of tokens to measure.
        output: directory, made if missing.
    """
    cells = [
        (name, N, M, list(candidates(FORMS[name], N, M)))
        for name, some in widths.items()
        for N in some
        for M in sorted(tokens)
    ]
    jobs = dict.fromkeys((name, N, tile) for name, N, _, tiles in cells for tile in tiles)
    compile_all(_compile, jobs, max(1, min(14, (os.cpu_count() or 2) - 2)))
    results: list[Timed] = []
    output.mkdir(parents=True, exist_ok=True)
    source = "python -m tuning.tune_fused, " + ", ".join(
        f"{key} {value}" for key, value in report.environment().items()
    )
    for name, N, M, tiles in cells:
        found = _time(name, N, M, tiles)
        results += found
        rule = tiles_fused.rule(FORMS[name].op, N, M)
        for timed in found[:3]:
            sys.stdout.write(f"{name} N={N} M={M} {timed.us:7.2f} us {timed.tile}\n")
        sys.stdout.write(f"{name} N={N} M={M} rule: {rule}\n")
        sys.stdout.flush()
        table = {
            "gpu": torch.cuda.get_device_name(),
            "source": source,
            "rows": table_rows(results),
        }
        _write(table, output / "table.json")
        _write([dataclasses.asdict(timed) for timed in results], output / "all.json")
    return 0


def _write(document: object, path: Path) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = parser_of("python -m tuning.tune_fused", __doc__).parse_args(argv)
    if cuda_device.missing("tuning.tune_fused"):
        return 2
    widths, tokens = asked_for(arguments)
    # gpt-oss's form takes the tiles of SiLU·mul: tuned for it where it is asked for.
    wanted = {n: sizes for n, sizes in widths.items() if arguments.form or not FORMS[n].gpt_oss}
    return run(wanted, tokens, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
