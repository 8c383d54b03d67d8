"""Find the loss kernels' tiles on this card: ``python -m tuning.tune_loss``.

Every candidate is compiled first, in parallel, then held to the reference on a few rows, then timed
over rows that do not fit L2, the gradient written over the logits. The fastest one of each op and
vocabulary goes into a table for ``taut_kernels/tiles``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from taut_bench import cuda_device, report
from taut_bench.shapes import add_effort
from taut_kernels.loss import divergence as loss_divergence
from taut_kernels.loss import row_softmax
from taut_kernels.loss.tiles import OPS, RING, LossTile, RingTile, ring_rule, rule
from taut_kernels.tuner import timing
from tuning.compiling import compile_all

VOCABULARIES = (32000, 50304, 128256, 151936, 256000)
"""Llama-2, GPT-2 padded, Llama-3, Qwen-2.5, Gemma-2."""
RING_CHUNK_BYTES = 28 * 8192
"""What a ring's chunks take of a multiprocessor's shared memory."""
_ROWS = 2048
_CHECKED_ROWS = 16
_FORM = "forward_kl"
_TOLERANCE = 2e-2
"""Largest error against fp64, a share of the largest gradient: bf16 rounds at 4e-3."""


def candidates(op: str, V: int) -> Iterator[LossTile | RingTile]:
    """Yield the tiles worth compiling for one op and vocabulary.

    Args:
        op: one of `OPS`, or `RING`.
        V: vocabulary.
    """
    if op == RING:
        yield from _rings(V)
    else:
        yield from _blocks(op, V)


def _rings(V: int) -> Iterator[RingTile]:
    """Yield rings that hold a row in as few programs as can, and in twice as many."""
    usual = ring_rule(V)
    found = {usual: None} if usual else {}
    shapes = ((1, 16, 1), (2, 16, 1), (2, 8, 1), (4, 8, 1), (1, 16, 2), (2, 8, 2))
    for units, num_warps, per_sm in shapes:
        slots = RING_CHUNK_BYTES // (16 * units * 32 * num_warps * per_sm) // 2 * 2
        held = 0
        for parts in (1, 2, 4, 8):
            rings = [RingTile(parts, units, num_warps, slots, lag, per_sm) for lag in (0, 2, 4)]
            rings = [ring for ring in rings if ring.ahead(V) > 1]
            held += bool(rings)
            if held <= 2:
                found |= dict.fromkeys(rings)
    yield from found


def _blocks(op: str, V: int) -> Iterator[LossTile]:
    found = {rule(op, V): None}
    for block in (2048, 4096, 8192, 16384, 32768):
        for num_warps in (4, 8, 16, 32):
            # 8 columns a load and thread. Two rows, and 32 warps with 64 registers a thread, have
            # room for no more than 16: the rest spills.
            room = 32 if op == "cross_entropy" and num_warps < 32 else 16
            if not 8 <= block // (32 * num_warps) <= room:
                continue
            found |= {LossTile(block, num_warps, stages): None for stages in (1, 2, 3, 4)}
    yield from found


def _run(op: str, tile: LossTile | RingTile, logits: Tensor, teacher: Tensor | None) -> None:
    """Run a kernel over rows, the gradient in their place."""
    M = logits.shape[0]
    scale = torch.ones(M, dtype=torch.float32, device="cuda")
    if op != "divergence":
        target = torch.zeros(M, dtype=torch.int64, device="cuda")
        objective = row_softmax.Objective()
        row_softmax.launch(logits, target, objective, scale, logits, tile=tile)
        return
    assert teacher is not None
    assert isinstance(tile, LossTile)
    keep = torch.ones(M, dtype=torch.int8, device="cuda")
    divergence = loss_divergence.Divergence(_FORM, 1.0, 0.5)
    loss_divergence.launch(logits, teacher, keep, divergence, scale, logits, tile=tile)


def _compile(job: tuple[str, int, LossTile | RingTile]) -> str | None:
    """Compile one candidate into Triton's cache; a line where it does not compile."""
    op, V, tile = job
    rows = torch.zeros(1, V, dtype=torch.bfloat16, device="cuda")
    try:
        _run(op, tile, rows, rows.clone())
        torch.cuda.synchronize()
    except (triton.CompilationError, RuntimeError) as error:
        return f"{op} V={V} {tile}: {str(error).splitlines()[0]}"
    return None


def _why_wrong(op: str, tile: LossTile | RingTile, logits: Tensor, teacher: Tensor) -> str | None:
    found = logits[:_CHECKED_ROWS].clone()
    wanted = found.double().softmax(1)
    if op != "divergence":
        wanted[:, 0] -= 1
    else:
        wanted -= teacher[:_CHECKED_ROWS].double().softmax(1)
    _run(op, tile, found, teacher[:_CHECKED_ROWS])
    error = ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
    return None if error <= _TOLERANCE else f"relative error {error:.1e}"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One timed candidate; ``us`` is microseconds a call over ``_ROWS`` rows."""

    op: str
    V: int
    us: float
    tile: LossTile | RingTile


def _time(op: str, V: int, replays: int) -> list[Result]:
    generator = torch.Generator("cuda").manual_seed(V)
    shape = (_ROWS, V)
    logits, teacher = (
        3 * torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    results: list[Result] = []
    for tile in candidates(op, V):
        try:
            reason = _why_wrong(op, tile, logits, teacher)
        except (triton.CompilationError, RuntimeError) as error:
            sys.stdout.write(f"{op} V={V} {tile}: {str(error).splitlines()[0]}\n")
            continue
        if reason:
            sys.stdout.write(f"WRONG {op} V={V} {tile}: {reason}\n")
            continue
        work = logits.clone()

        def call(_: int, tile: LossTile | RingTile = tile, work: Tensor = work) -> None:
            _run(op, tile, work, teacher)

        us = timing.measure([timing.Subject(str(tile), call, 1)], replays, 2)[0].median
        results.append(Result(op, V, us, tile))
    return results


def table_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Put the fastest tile of each op and vocabulary into rows of a table of ``tiles/``.

    Args:
        results: timed candidates.
    """
    best: dict[tuple[str, int], Result] = {}
    for result in sorted(results, key=lambda r: r.us):
        best.setdefault((result.op, result.V), result)
    return [
        {"op": op, "V": V, "tile": dataclasses.asdict(result.tile), "us": round(result.us, 2)}
        for (op, V), result in best.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.tune_loss", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--op", action="append", choices=(*OPS, RING))
    parser.add_argument("--vocabulary", type=int, action="append")
    add_effort(parser, processes=14, replays=7)
    arguments = parser.parse_args(argv)
    if cuda_device.missing("tuning.tune_loss"):
        return 2
    cases = [
        (op, V) for op in arguments.op or (*OPS, RING) for V in arguments.vocabulary or VOCABULARIES
    ]
    jobs = [(op, V, tile) for op, V in cases for tile in candidates(op, V)]
    compile_all(_compile, jobs, arguments.processes)
    arguments.output.mkdir(parents=True, exist_ok=True)
    copy = timing.copy_ceiling()
    source = "python -m tuning.tune_loss, " + ", ".join(
        f"{key} {value}" for key, value in report.environment().items()
    )
    results: list[Result] = []
    for op, V in cases:
        found = sorted(_time(op, V, arguments.replays), key=lambda r: r.us)
        results += found
        passes = 3 if op == "divergence" else 2
        for result in found[:4]:
            share = passes * 2 * _ROWS * V / (result.us * 1e-6) / copy
            line = f"{op} V={V} {result.us:.1f} us, {share:.0%} of copy, {result.tile}"
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
        table = {
            "gpu": torch.cuda.get_device_name(),
            "source": source,
            "rows": table_rows(results),
        }
        # After every case: what was measured survives a run that is cut off.
        text = json.dumps(table, indent=1) + "\n"
        (arguments.output / "loss.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
