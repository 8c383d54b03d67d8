"""What a decoder layer's decode step takes: ``python -m taut_bench.decode_chain``.

Layers of Llama-3-8B's shapes in one CUDA graph, each with its own weights, so that none comes from
L2. Timed in turn: the kernels as they ship, and without early starts (programmatic dependent
launch) but those of W4A16's products, which always start early. 8-bit products are ours throughout,
also with more tokens, where the plugin leaves some to CUTLASS. ``--forms`` also tries each of them
in every form (`decoder_layer.FORMS`), vLLM's CUTLASS kernel among them, the others in their best;
``--tile`` the chain with another tile of a norm, activation or RoPE.
Writes ``decode_chain.csv`` and ``.md``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from taut_bench import cuda_device, other_tiles, report
from taut_bench.decoder_layer import FORMS, HIDDEN, PRODUCTS, SCHEMES, Layer, Step
from taut_bench.shapes import token_counts
from taut_kernels.launch import early_start
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.tuner import timing

DEFAULT_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
DEFAULT_CONTEXTS = (192,)
DEFAULT_BOUND = 1024
_LAYERS_OF_A_GRAPH = 24
_REPLAYS = 20
_COLUMNS = ("scheme", "tokens", "context", "bound", "kernels", "us", "p20_us", "p80_us")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell: µs of a layer, ``kernels`` says which."""

    step: Step
    kernels: str
    timing: timing.Timing

    def cells(self) -> tuple[object, ...]:
        """Return the row of the CSV."""
        step, t = self.step, self.timing
        figures = (f"{us:.3f}" for us in (t.median, t.p20, t.p80))
        return (step.scheme, step.tokens, step.context, step.bound, self.kernels, *figures)


@contextmanager
def late_starts() -> Iterator[None]:
    """Launch kernels between products without early starts."""
    shipped = early_start.EARLY_TOKENS
    try:
        early_start.EARLY_TOKENS = 0
        tiles_fused.lookup.cache_clear()  # it keeps what it answered
        yield
    finally:
        early_start.EARLY_TOKENS = shipped
        tiles_fused.lookup.cache_clear()


class Chain:
    """Layers behind each other; the result of one is the next one's input."""

    def __init__(self, step: Step) -> None:
        first = Layer(step, 0)
        count = timing.copies_needed(first.weight_bytes())
        self.step = step
        self.layers = [first, *(Layer(step, seed) for seed in range(1, count))]
        self.x, self.residual = (
            torch.randn(step.tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )

    def subject(
        self,
        name: str,
        forms: Mapping[str, str] | None = None,
        *,
        late: bool = False,
        tiles: Mapping[str, FusedTile] | None = None,
    ) -> timing.Subject:
        """Return the chain in some form as a subject of the clock.

        Args:
            name: of the subject.
            forms: of 8-bit products.
            late: without early starts of what stands between products.
            tiles: of norms, activations or RoPE instead of the tables', by op.
        """
        residual, last = self.residual.clone(), [self.x]

        def call(i: int) -> Tensor:
            # The first input must outlive the graph that reads it.
            x = last[0] if i else self.x
            with (
                late_starts() if late else nullcontext(),
                other_tiles.instead(tiles) if tiles else nullcontext(),
            ):
                last[0] = self.layers[i](x, residual, forms or {})
            return last[0]

        return timing.Subject(name, call, len(self.layers))


def _measure(subjects: Sequence[timing.Subject]) -> list[timing.Timing]:
    return timing.measure(subjects, _REPLAYS, _LAYERS_OF_A_GRAPH)


def _starts(chain: Chain, others: Sequence[tuple[str, FusedTile]]) -> list[Row]:
    late = dict.fromkeys(PRODUCTS, "late")
    subjects = [chain.subject("as shipped"), chain.subject("late starts", late, late=True)]
    subjects += [chain.subject(f"{op} {tile}", tiles={op: tile}) for op, tile in others]
    timings = _measure(subjects)
    return [Row(chain.step, s.name, t) for s, t in zip(subjects, timings, strict=True)]


def _forms(chain: Chain) -> list[Row]:
    """Try each product in every form, twice over, the others in their best so far."""
    best, rows = dict.fromkeys(PRODUCTS, "table"), []
    for sweep, product in itertools.product(range(2), PRODUCTS):
        subjects = [chain.subject(form, best | {product: form}) for form in FORMS]
        timings = _measure(subjects)
        found = dict(zip(FORMS, timings, strict=True))
        best[product] = min(found, key=lambda form: found[form].median)
        if sweep:
            others = ", ".join(f"{n} {f}" for n, f in best.items() if n != product)
            for form, t in found.items():
                rows.append(Row(chain.step, f"{product} {form} ({others})", t))
    return rows


def _write(rows: Sequence[Row], ceiling: float, directory: Path) -> None:
    report.write_csv(directory / "decode_chain.csv", _COLUMNS, (row.cells() for row in rows))
    lines = [
        report.measured_with(f"copy ceiling {ceiling / 1e12:.2f} TB/s"),
        "",
        "µs of a decoder layer, median [p20, p80].",
        "",
        "| scheme | tokens | keys (bound) | kernels | µs |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        step, t = row.step, row.timing
        where = f"{step.scheme} | {step.tokens} | {step.context} ({step.bound}) | {row.kernels}"
        lines.append(f"| {where} | {t.median:.2f} [{t.p20:.2f}, {t.p80:.2f}] |")
    (directory / "decode_chain.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m taut_bench.decode_chain")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--scheme", action="append", choices=sorted(SCHEMES))
    parser.add_argument("--tokens", type=token_counts, help="all, or numbers with commas")
    parser.add_argument("--contexts", type=_numbers, help="keys of a sequence, with commas")
    parser.add_argument("--bound", type=int, help="most keys a graph is captured for")
    parser.add_argument("--forms", action="store_true", help="try 8-bit products in every form")
    parser.add_argument(
        "--tile",
        action="append",
        type=other_tiles.parse,
        default=[],
        help="also time the chain with this tile of an op, as add_rms_norm=1x2048/8w/r48",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = _parser().parse_args(argv)
    if cuda_device.missing("taut_bench.decode_chain"):
        return 2
    ceiling = timing.copy_ceiling()
    rows: list[Row] = []
    points = itertools.product(
        arguments.scheme or SCHEMES,
        arguments.tokens or DEFAULT_TOKENS,
        arguments.contexts or DEFAULT_CONTEXTS,
    )
    for scheme, tokens, context in points:
        bound = max(context, arguments.bound or DEFAULT_BOUND)
        chain = Chain(Step(scheme, tokens, context, bound))
        found = _starts(chain, arguments.tile)
        if arguments.forms and scheme != "w4a16":
            found += _forms(chain)
        for row in found:
            sys.stdout.write(" ".join(map(str, row.cells())) + "\n")
        sys.stdout.flush()
        rows += found
        # What was measured survives a run that is cut off.
        _write(rows, ceiling, arguments.output)
        del chain
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
