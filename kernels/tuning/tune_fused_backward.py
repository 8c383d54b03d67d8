"""Time tiles of the fused training kernels: ``python -m tuning.tune_fused_backward``.

Every candidate is compiled first, in parallel, then held to the reference, then timed over operands
that do not fit L2. What is found goes by hand into the rules of `rowwise/training_tiles.py`. Writes
``tune_fused_backward.csv``, fastest first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taut_bench import cuda_device, report
from taut_bench.fused_backward import LONG_WIDTHS, WIDTHS
from taut_bench.shapes import add_effort
from taut_kernels.activation import swiglu_launch
from taut_kernels.loss import softmax
from taut_kernels.norm import train_launch as norm_launch
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.rowwise.training_tiles import NormRingTile, TrainingTile
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line
from tuning.compiling import compile_all

_ELEMENTS = 2**25
"""Of an operand: 64 MiB in bf16."""
_CHECKED_ROWS = 16
_TOLERANCE = 2e-2
"""Largest error against fp64, a share of the largest value: bf16 rounds at 4e-3."""
_GRAPH_US = 2000
_EPSILON = 1e-5
Tile = TrainingTile | FusedTile | NormRingTile
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel to tune.

    Attributes:
        passes: operands of [M, N] that a call reads and writes.
        widths: N.
        operands: draws them for M rows and N columns.
        run: runs a tile; None as the tile: the reference, in the operands' type.
        candidates: tiles for N.
    """

    passes: int
    widths: tuple[int, ...]
    operands: Callable[[int, int], Tensors]
    run: Callable[[Any, Tensors], Tensors]
    candidates: Callable[[int], Iterator[Tile]]


def _draw(M: int, N: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(M, N, generator=generator, device="cuda", dtype=torch.bfloat16)


def _rows(count: int) -> Callable[[int, int], Tensors]:
    return lambda M, N: tuple(_draw(M, N, seed) for seed in range(count))


def _softmax(tile: TrainingTile | None, operands: Tensors) -> Tensors:
    if tile is None:
        return (softmax.softmax_ref(operands[0]),)
    return (softmax.launch(operands[0], tile),)


def _softmax_backward(tile: TrainingTile | None, operands: Tensors) -> Tensors:
    dy, y = operands
    if tile is None:
        return (softmax.softmax_backward_ref(dy, y),)
    return (softmax.launch_backward(dy, y, tile),)


def _softmax_backward_operands(M: int, N: int) -> Tensors:
    return _draw(M, N, 0), _draw(M, N, 1).softmax(dim=1)


def _steps(N: int, warps: Sequence[int], most: int, **options: Any) -> Iterator[TrainingTile]:
    """Yield one row a program in steps of 4 to 16 columns a thread, at most ``most`` held."""
    for num_warps in warps:
        threads = 32 * num_warps
        if threads * most >= N:
            for columns in (4, 8, 16):
                if threads * columns <= max(1024, N):
                    yield TrainingTile(1, threads * columns, num_warps, **options)


def _softmax_tiles(N: int, most: int) -> Iterator[TrainingTile]:
    """Yield tiles that hold rows, ``most`` columns a thread, and ones that read them twice."""
    if 512 * most >= N:
        yield from _steps(N, (4, 8, 16, 32), most // 2)
        yield from _steps(N, (8, 16, 32), most, again=True)
    if 512 * most <= N:
        for block, warps in ((2048, 8), (8192, 16), (8192, 32), (16384, 32), (32768, 32)):
            for stages in (2, 4):
                yield TrainingTile(1, block, warps, stages=stages)
                yield TrainingTile(1, block, warps, stages=stages, keep=True)


def _norm_ring_tiles(N: int, most: int) -> Iterator[NormRingTile]:
    """Yield rings, those that hold the weight where registers hold more than ``most``."""
    for num_warps in (8, 16, 32):
        chunks = -(-N // (256 * num_warps))
        for held in (False, True)[: 1 + (most >= 64)]:
            for late in range(chunks + 1):
                yield NormRingTile(num_warps, late, held)


def _norm_backward_tiles(N: int, most: int) -> Iterator[TrainingTile | NormRingTile]:
    """Yield tiles of the persistent kernels; ``most`` columns a thread."""
    shortest, longest = training_tiles.NORM_RING_COLUMNS
    if shortest < N <= longest:
        yield from _norm_ring_tiles(N, most)
    for num_warps in (2, 4, 8, 16, 32):
        held = N // (32 * num_warps)
        if not 4 <= held <= most:
            continue
        for per_sm in (1, 2, 3, 4, 8):
            if not 12 <= per_sm * num_warps <= 32:
                continue
            steps = [min(N, 32 * num_warps * columns) for columns in (2, 4, 8, 16)]
            for block in dict.fromkeys(steps):
                yield TrainingTile(1, block, num_warps, per_sm=per_sm)
                if held >= 32 or num_warps == 32:
                    yield TrainingTile(1, block, num_warps, per_sm=per_sm, again=True)
                if held <= 16 and per_sm * num_warps <= 24:
                    yield TrainingTile(1, block, num_warps, stages=2, per_sm=per_sm)
                    yield TrainingTile(1, block, num_warps, stages=3, per_sm=per_sm)


def _norm_operands(count: int) -> Callable[[int, int], Tensors]:
    def draw(M: int, N: int) -> Tensors:
        return *_rows(count)(M, N), _draw(1, N, 9)[0]

    return draw


def _norm_backward(kind: str) -> Callable[[TrainingTile | NormRingTile | None, Tensors], Tensors]:
    from taut_kernels.norm.layer_norm import layer_norm_backward_ref
    from taut_kernels.norm.rms_norm_train import rms_norm_backward_ref

    def run(tile: TrainingTile | NormRingTile | None, operands: Tensors) -> Tensors:
        x, dy, *others = operands
        weight, added = others[-1], others[0] if kind == "added" else None
        # Any number will do for the statistics: the kernel reads, and does not check, them.
        statistics = torch.float64 if x.dtype is torch.float64 else torch.float32
        rstd = torch.ones(x.shape[0], dtype=statistics, device="cuda")
        mean = torch.zeros_like(rstd) if kind == "centred" else None
        if tile is None and mean is not None:
            return layer_norm_backward_ref(dy, x, weight, mean, rstd, True, True)
        if tile is None:
            return rms_norm_backward_ref(dy, added, x, weight, rstd, True)
        wants = (weight.dtype, None if mean is None else weight.dtype)
        found = norm_launch.backward(dy, added, x, weight, mean, rstd, wants, tile)
        return tuple(one for one in found if one is not None)

    return run


def _norm_forward(kind: str) -> Callable[[FusedTile | None, Tensors], Tensors]:
    from taut_kernels.norm.layer_norm import layer_norm_ref
    from taut_kernels.norm.rms_norm_train import rms_norm_train_ref

    def run(tile: FusedTile | None, operands: Tensors) -> Tensors:
        x, *others = operands
        weight, residual = others[-1], others[0] if kind == "added" else None
        bias = weight if kind == "centred" else None
        if tile is None and bias is not None:
            return (layer_norm_ref(x, weight, bias, _EPSILON)[0],)
        if tile is None:
            return (rms_norm_train_ref(x, weight, residual, _EPSILON)[0],)
        found = norm_launch.forward(
            x, residual, weight, bias, _EPSILON, centred=bias is not None, tile=tile
        )
        return (found[0],)

    return run


def _norm_forward_tiles(N: int) -> Iterator[FusedTile]:
    for tile in _steps(N, (4, 8, 16, 32), 64):
        for registers in (0, 64):
            if not registers or N // (32 * tile.num_warps) <= 32:
                yield FusedTile(1, tile.block, tile.num_warps, registers=registers)


def _swiglu(tile: TrainingTile | None, operands: Tensors) -> Tensors:
    gate, up = operands
    if tile is None:
        return (swiglu_launch.swiglu_ref(gate, up, 1.0, 0.0, None),)
    return (swiglu_launch.launch(gate, up, 1.0, 0.0, None, tile),)


def _swiglu_backward(tile: TrainingTile | None, operands: Tensors) -> Tensors:
    dy, gate, up = operands
    if tile is None:
        return swiglu_launch.swiglu_backward_ref(dy, gate, up, 1.0, 0.0, None)
    d_gate, d_up = (torch.empty_like(gate) for _ in range(2))
    form = (1.0, 0.0, None)
    swiglu_launch.launch_backward(dy, gate, up, d_gate, d_up, form, tile=tile)
    return d_gate, d_up


def _pointwise_tiles(N: int) -> Iterator[TrainingTile]:
    for num_warps in (2, 4, 8):
        for columns in (4, 8, 16, 32):
            yield TrainingTile(1, 32 * num_warps * columns, num_warps)


_ALL = (*WIDTHS, *LONG_WIDTHS)
KERNELS: dict[str, Kernel] = {
    "softmax": Kernel(2, _ALL, _rows(1), _softmax, lambda N: _softmax_tiles(N, 128)),
    "softmax_backward": Kernel(
        3, _ALL, _softmax_backward_operands, _softmax_backward, lambda N: _softmax_tiles(N, 64)
    ),
    "rms_norm_backward": Kernel(
        3, WIDTHS, _norm_operands(2), _norm_backward("plain"), lambda N: _norm_backward_tiles(N, 64)
    ),
    "add_rms_norm_backward": Kernel(
        4, WIDTHS, _norm_operands(3), _norm_backward("added"), lambda N: _norm_backward_tiles(N, 64)
    ),
    "layer_norm_backward": Kernel(
        3,
        WIDTHS,
        _norm_operands(2),
        _norm_backward("centred"),
        lambda N: _norm_backward_tiles(N, 32),
    ),
    "rms_norm": Kernel(2, WIDTHS, _norm_operands(1), _norm_forward("plain"), _norm_forward_tiles),
    "add_rms_norm": Kernel(
        4, WIDTHS, _norm_operands(2), _norm_forward("added"), _norm_forward_tiles
    ),
    "layer_norm": Kernel(
        2, WIDTHS, _norm_operands(1), _norm_forward("centred"), _norm_forward_tiles
    ),
    "swiglu": Kernel(3, (14336,), _rows(2), _swiglu, _pointwise_tiles),
    "swiglu_backward": Kernel(5, (14336,), _rows(3), _swiglu_backward, _pointwise_tiles),
}
DEFAULT = ("softmax", "softmax_backward", "rms_norm_backward")
Job = tuple[str, int, Tile]


def _compile(job: Job) -> str | None:
    name, N, tile = job
    kernel = KERNELS[name]
    try:
        kernel.run(tile, kernel.operands(_CHECKED_ROWS, N))
        torch.cuda.synchronize()
    except REFUSED as error:
        return f"{name} N={N} {tile}: {first_line(error)}"
    return None


def _why_wrong(kernel: Kernel, tile: Tile, N: int) -> str | None:
    operands = kernel.operands(_CHECKED_ROWS, N)
    gold = kernel.run(None, tuple(operand.double() for operand in operands))
    for found, wanted in zip(kernel.run(tile, operands), gold, strict=False):
        error = ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
        if not error <= _TOLERANCE:
            return f"relative error {error:.1e}"
    return None


def _time(kernel: Kernel, tile: Tile, copies: Sequence[Tensors], replays: int) -> float:
    kept: list[Tensors | None] = [None] * len(copies)

    def call(i: int) -> None:
        kept[i] = kernel.run(tile, copies[i])

    elements = copies[0][0].numel()
    calls = max(2, min(timing.MIN_CALLS, int(_GRAPH_US * 4e6 / (2 * kernel.passes * elements))))
    subject = timing.Subject(str(tile), call, len(copies))
    return timing.measure([subject], replays, calls)[0].median


Row = tuple[str, int, float, str]
"""Kernel, N, µs and tile."""


def _tune(name: str, N: int, replays: int) -> list[Row]:
    kernel = KERNELS[name]
    M = max(264, min(8192, _ELEMENTS // N))
    copies = [kernel.operands(M, N) for _ in range(2)]
    rows: list[Row] = []
    for tile in dict.fromkeys(kernel.candidates(N)):
        try:
            if reason := _why_wrong(kernel, tile, N):
                sys.stdout.write(f"WRONG {name} N={N} {tile}: {reason}\n")
                continue
            rows.append((name, N, _time(kernel, tile, copies, replays), str(tile)))
        except REFUSED as error:
            sys.stdout.write(f"{name} N={N} {tile}: {first_line(error)}\n")
    return sorted(rows, key=lambda row: row[2])


def _write(rows: Sequence[Row], directory: Path) -> None:
    cells = [(name, N, f"{us:.2f}", tile) for name, N, us, tile in rows]
    columns = ("kernel", "N", "us", "tile")
    report.write_csv(directory / "tune_fused_backward.csv", columns, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tuning.tune_fused_backward", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--op", action="append", choices=sorted(KERNELS))
    parser.add_argument("--width", type=int, action="append")
    add_effort(parser, processes=14, replays=7)
    arguments = parser.parse_args(argv)
    if cuda_device.missing("tuning.tune_fused_backward"):
        return 2
    names = arguments.op or DEFAULT
    cases = [(name, N) for name in names for N in arguments.width or KERNELS[name].widths]
    jobs: list[Job] = [
        (name, N, tile) for name, N in cases for tile in dict.fromkeys(KERNELS[name].candidates(N))
    ]
    compile_all(_compile, jobs, arguments.processes)
    copy = timing.copy_ceiling()
    rows: list[Row] = []
    for name, N in cases:
        found = _tune(name, N, arguments.replays)
        rows += found
        M = max(264, min(8192, _ELEMENTS // N))
        for _, _, us, tile in found[:5]:
            share = 2 * KERNELS[name].passes * M * N / (us * 1e-6) / copy
            sys.stdout.write(f"{name} {M}x{N} {us:.1f} us, {share:.0%} of copy, {tile}\n")
        sys.stdout.flush()
        # After every case: what was measured survives a run that is cut off.
        _write(rows, arguments.output)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
