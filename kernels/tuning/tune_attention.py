"""Find attention's tiles on this card: ``python -m tuning.tune_attention``.

Heads of 128 elements, bf16: both forward kernels, both backward kernels, and decode with 16-bit
and 8-bit caches. Candidates are compiled first, in parallel, then held to the error budget, then
timed; the best one of each kernel goes into a table for ``taut_kernels/tiles``. A decode tile is
judged by the geometric mean of its times over :data:`DECODE_SHAPES`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taut_bench import cuda_device, report
from taut_bench.attention_cases import (
    DIM,
    PAGE,
    Cached,
    DecodeGate,
    Gradients,
    Prompt,
    PromptGate,
    Shape,
    make_cached,
    make_prompt,
)
from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.decode import op as decode
from taut_kernels.attention.prefill import hopper as prefill_hopper
from taut_kernels.attention.prefill import op as prefill
from taut_kernels.attention.tile import AttentionTile, DecodeTile, HopperTile, Tile
from taut_kernels.launch import launcher
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line
from tuning.attention_candidates import (
    backward_candidates,
    decode_candidates,
    forward_candidates,
    hopper_candidates,
    splits_candidates,
)
from tuning.compiling import compile_all

TOKENS = 4096
"""Of the prompt that prefill's tiles are timed on."""
DECODE_SHAPES = {
    "small": ((1, 1024), (1, 8192), (8, 1024)),
    "large": ((1, 32768), (1, 131072), (8, 4096), (8, 8192), (32, 1024), (32, 4096)),
    "many": ((64, 1024), (64, 8192), (128, 1024), (128, 8192)),
}
"""Load → sequences and context."""
DECODE_CACHES = {2: "bf16", 1: "fp8"}
"""Bytes of an element → the cache that stands for it."""
FORWARD: dict[str, Callable[[], Iterator[AttentionTile | HopperTile]]] = {
    "forward": forward_candidates,
    "forward_hopper": hopper_candidates,
}
"""Forward kernel → its candidates."""
_Job = tuple[str, Tile, str]
"""kernel, tile, cache"""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One timed candidate; ``us`` is microseconds a call, or their geometric mean."""

    kernel: str
    bits: int
    load: str
    us: float
    tile: Tile
    each: tuple[float, ...] = ()


def _settings(tokens: int) -> prefill.Settings:
    return prefill.Settings(None, None, tokens, tokens, True, 0, DIM**-0.5)


def _forward(tile: AttentionTile | HopperTile, prompt: Prompt) -> tuple[Tensor, Tensor]:
    q, k, v = prompt.q, prompt.k, prompt.v
    o = launcher.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(1, q.shape[2], q.shape[1], device=q.device)
    if isinstance(tile, HopperTile):
        prefill_hopper.launch(tile, q, k, v, o, lse, _settings(q.shape[1]))
    else:
        prefill.launch_forward(tile, q, k, v, o, lse, _settings(q.shape[1]))
    return o, lse


def _backward(
    key_tile: AttentionTile, query_tile: AttentionTile, prompt: Prompt, saved: tuple[Tensor, Tensor]
) -> Gradients:
    q, k, v, (o, lse) = prompt.q, prompt.k, prompt.v, saved
    settings = _settings(q.shape[1])
    return prefill.launch_backward(key_tile, query_tile, prompt.do, q, k, v, o, lse, settings)


def _run(kernel: str, tile: Any, prompt: Prompt, saved: tuple[Tensor, Tensor]) -> Any:
    """Run one kernel of prefill with a tile, the others by the rule."""
    if kernel in FORWARD:
        return _forward(tile, prompt)[0]
    keys, queries = attention_tiles.backward(None, DIM)
    if kernel == "key_gradients":
        return _backward(tile, queries, prompt, saved)
    return _backward(keys, tile, prompt, saved)


def _compile(job: _Job) -> str | None:
    """Compile one candidate into Triton's cache; a line where it does not compile."""
    kernel, tile, cache = job
    try:
        if isinstance(tile, DecodeTile):
            cached = make_cached(Shape("decode", 1, 8 * tile.keys * tile.num_warps + PAGE, cache))
            decode.launch(tile, cached.q, cached.k_cache, cached.v_cache, cached.settings(), 2)
        else:
            prompt = make_prompt(256)
            saved = (prompt.q, torch.zeros(1, prompt.q.shape[2], 256, device="cuda"))
            _run(kernel, tile, prompt, saved)
        torch.cuda.synchronize()
    except REFUSED as error:
        return f"{kernel} {tile}: {first_line(error)}"
    return None


def _checked(where: str, judge: Callable[[], str | None]) -> bool:
    """Say whether a candidate runs and is right; print why not."""
    try:
        reason = judge()
    except REFUSED as error:
        reason = first_line(error)
    if reason:
        sys.stdout.write(f"WRONG {where}: {reason}\n")
    return reason is None


def _time(subjects: Sequence[timing.Subject], calls: int) -> list[float]:
    return [one.median for one in timing.measure(subjects, replays=7, min_calls=calls)]


def tune_prefill(kernel: str, tiles: Sequence[AttentionTile | HopperTile]) -> list[Result]:
    """Check and time one kernel's candidates.

    Args:
        kernel: one of :data:`attention_tiles.KERNELS` but ``decode``.
        tiles: candidates that compile.

    Returns:
        Those that are right, the fastest first. A backward kernel's time is that of the whole
        backward pass with the other kernel's tile by the rule.
    """
    gate, large = PromptGate(), make_prompt(TOKENS)
    rule = attention_tiles.forward(DIM, False, launcher.is_hopper(large.q.device))
    small_saved, saved = _forward(rule, gate.prompt), _forward(rule, large)

    def judge(tile: AttentionTile | HopperTile) -> str | None:
        found = _run(kernel, tile, gate.prompt, small_saved)
        if kernel in FORWARD:
            return gate.why_wrong(found, None, True)
        return gate.why_wrong(None, found, True)

    right = [tile for tile in tiles if _checked(f"{kernel} {tile}", partial(judge, tile))]

    def call(tile: AttentionTile | HopperTile, _: int) -> object:
        return _run(kernel, tile, large, saved)

    subjects = [timing.Subject(str(tile), partial(call, tile), 1) for tile in right]
    times = _time(subjects, 4)
    found = [Result(kernel, 16, "large", us, tile) for us, tile in zip(times, right, strict=True)]
    return sorted(found, key=lambda result: result.us)


def _decode_times(
    tiles: Sequence[DecodeTile], cache: str, shapes: Sequence[tuple[int, int]]
) -> dict[DecodeTile, list[float]]:
    """Return µs of each tile at each shape; tiles that are wrong at one are left out."""
    times: dict[DecodeTile, list[float]] = {tile: [] for tile in tiles}
    for batch, tokens in shapes:
        shape = Shape("decode", batch, tokens, cache)
        count = min(8, timing.copies_needed(shape.bytes_read()))
        copies = [make_cached(shape) for _ in range(count)]
        gate = DecodeGate(copies[0])
        for tile in list(times):
            where = f"decode {cache} {tile} B={batch} T={tokens}"
            if not _checked(where, partial(_judge_decode, gate, tile, copies[0])):
                del times[tile]
        subjects = [
            timing.Subject(str(tile), partial(_decode_copy, tile, copies), count) for tile in times
        ]
        for tile, us in zip(times, _time(subjects, 8), strict=True):
            times[tile].append(us)
        del copies, subjects, gate
        torch.cuda.empty_cache()
    return times


def _decode(tile: DecodeTile, one: Cached) -> Tensor:
    return decode.launch(tile, one.q, one.k_cache, one.v_cache, one.settings())


def _decode_copy(tile: DecodeTile, copies: Sequence[Cached], i: int) -> Tensor:
    return _decode(tile, copies[i])


def _judge_decode(gate: DecodeGate, tile: DecodeTile, one: Cached) -> str | None:
    return gate.why_wrong(_decode(tile, one)[:, 0], True)


def _ranked(size: int, load: str, times: dict[DecodeTile, list[float]]) -> list[Result]:
    found = []
    for tile, each in times.items():
        us = math.exp(sum(map(math.log, each)) / len(each))
        found.append(Result("decode", 8 * size, load, us, tile, tuple(each)))
    return sorted(found, key=lambda result: result.us)


def tune_decode(size: int, load: str, tiles: Sequence[DecodeTile]) -> list[Result]:
    """Check and time decode's candidates, then the splits of the best three.

    Args:
        size: bytes of a cached element.
        load: a key of :data:`DECODE_SHAPES`.
        tiles: candidates that compile.

    Returns:
        Those that are right, the fastest first.
    """
    cache, shapes = DECODE_CACHES[size], DECODE_SHAPES[load]
    first = _ranked(size, load, _decode_times(tiles, cache, shapes))
    best = [result.tile for result in first[:3] if isinstance(result.tile, DecodeTile)]
    finer = [each for tile in best for each in splits_candidates(tile)]
    finest = _ranked(size, load, _decode_times(finer, cache, shapes))
    return sorted(finest + first, key=lambda result: result.us)


def table_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the best tile of each kernel as rows of a table of ``tiles/``.

    Args:
        results: of all kernels, in any order.
    """
    best: dict[tuple[str, int, str], Result] = {}
    for result in results:
        key = (result.kernel, result.bits, result.load)
        if key not in best or result.us < best[key].us:
            best[key] = result
    return [
        {
            "kernel": one.kernel,
            "D": DIM,
            "bits": one.bits,
            "load": one.load,
            "tile": dataclasses.asdict(one.tile),
            "us": round(one.us, 3),
        }
        for one in best.values()
    ]


def _write(results: Sequence[Result], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    facts = ", ".join(f"{key} {value}" for key, value in report.environment().items())
    source = f"python -m tuning.tune_attention, {facts}"
    table = {
        "gpu": torch.cuda.get_device_name(), "source": source, "rows": table_rows(results)
    }  # fmt: skip
    everything = [dataclasses.asdict(result) for result in results]
    for name, document in (("table.json", table), ("all.json", everything)):
        text = json.dumps(document, indent=1) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


def _jobs(kernels: Sequence[str]) -> list[_Job]:
    jobs: list[_Job] = []
    for kernel in kernels:
        if kernel == "decode":
            for size, cache in DECODE_CACHES.items():
                jobs += [(kernel, tile, cache) for tile in decode_candidates(size)]
        else:
            found = FORWARD[kernel]() if kernel in FORWARD else backward_candidates()
            jobs += [(kernel, tile, "bf16") for tile in found]
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.tune_attention")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--kernel", action="append", choices=attention_tiles.KERNELS)
    parser.add_argument("--processes", type=int, default=14, help="compilers beside each other")
    parser.add_argument("--top", type=int, default=6, help="rows printed for each kernel")
    arguments = parser.parse_args(argv)
    if cuda_device.missing("tuning.tune_attention"):
        return 2
    kernels = arguments.kernel or attention_tiles.KERNELS
    good = compile_all(_compile, _jobs(kernels), arguments.processes)
    results: list[Result] = []
    for kernel in kernels:
        for found in _tuned(kernel, good):
            results += found
            for one in found[: arguments.top]:
                each = " ".join(f"{us:.1f}" for us in one.each)
                what = f"{kernel:16}{one.bits:3} bits {one.load:6}"
                sys.stdout.write(f"{what}{one.us:9.2f} us  {one.tile}  {each}\n")
            sys.stdout.flush()
            # What was measured survives a run that is cut off.
            _write(results, arguments.output)
    return 0


def _tuned(kernel: str, good: Sequence[_Job]) -> Iterator[list[Result]]:
    """Tune one kernel with the candidates that compile, a list of results at a time."""
    if kernel != "decode":
        tiles = [tile for name, tile, _ in good if name == kernel]
        yield tune_prefill(kernel, [tile for tile in tiles if not isinstance(tile, DecodeTile)])
        return
    for (size, cache), load in itertools.product(DECODE_CACHES.items(), DECODE_SHAPES):
        found = [tile for _, tile, its in good if its == cache and isinstance(tile, DecodeTile)]
        yield tune_decode(size, load, found)


if __name__ == "__main__":
    sys.exit(main())
