"""What holds a kernel, by the card's counters: ``python -m taut_bench.stalls``.

Runs itself under Nsight Compute (``ncu``), which replays every kernel of one call alone, with its
caches empty, as often as its counters need: shares and stalls mean something, the microseconds are
longer than a benchmark's (no kernel before it, no early start). Writes ``stalls.csv``,
``stalls.md``, all counters (``stalls-raw.csv.gz``) and ncu's report.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gzip
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from taut_bench import (
    fused_cases,
    fused_rivals,
    report,
    scaled_mm_rivals,
    shapes,
    w4a16_rivals,
)
from taut_bench.scaled_mm import PREPARE
from taut_bench.scaled_mm_layer import ALL_KINDS, BLOCK_KIND, SHAPES, make_layer
from taut_bench.w4a16_format import GROUP_SIZE
from taut_kernels.tuner import w4a16_layer
from taut_kernels.tuner.refusal import REFUSED, first_line

DEFAULT_TOKENS = (1, 16, 64)
PRODUCTS = ("taut", "CUTLASS", "_scaled_mm rows")
BLOCK_PRODUCTS = ("taut", "CUTLASS", "cuBLAS blocks", "DeepGEMM")
W4A16 = "w4a16"
FOUR_BITS = ("taut", "Marlin", "Machete", "cuBLAS", w4a16_rivals.OTHER_PRECISION)
FUSED = ("taut", "vLLM", "torch.compile")
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issued": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "grid": "launch__grid_size",
    "threads": "launch__block_size",
    "waves": "launch__waves_per_multiprocessor",
    "shared": "launch__shared_mem_per_block",
}
"""Column → ncu's name: microseconds, percentages of the card's peak, numbers, bytes."""
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_STALLS_SHOWN = 3
_RANGES = "thread Domain:Push/Pop_Range"
"""How ncu's column of NVTX ranges begins."""
_LABEL = re.compile(r"<default domain>:([^:]*):")
_KERNEL = re.compile(r"(?:void )?([\w:]+)")


@dataclass(frozen=True, slots=True)
class Case:
    """One call to look at.

    Attributes:
        label: shape, tokens and whose kernel.
        call: runs it.
    """

    label: str
    call: Callable[[], object]


def products(kind: str, names: Sequence[str], tokens: Sequence[int]) -> Iterator[Case]:
    """Yield a product's calls, ours and its rivals'.

    Args:
        kind: of :data:`.scaled_mm_layer.ALL_KINDS`.
        names: shapes of :data:`.shapes.PRODUCTS`.
        tokens: numbers of rows.
    """
    kernels = list(BLOCK_PRODUCTS if kind == BLOCK_KIND else PRODUCTS)
    for shape in names:
        layer = make_layer(ALL_KINDS[kind], *shapes.PRODUCTS[shape], max(tokens))
        notes: list[str] = []
        ready = scaled_mm_rivals.prepare_all(layer, kernels, [layer.weight], notes, PREPARE[kind])
        for M in tokens:
            for subject in scaled_mm_rivals.checked_subjects(layer, ready, M, notes):
                yield Case(f"{kind} {shape} M={M} {subject.name}", lambda s=subject: s.call(0))  # type: ignore[misc]
        sys.stdout.writelines(f"{note}\n" for note in notes)


def four_bits(names: Sequence[str], tokens: Sequence[int]) -> Iterator[Case]:
    """Yield W4A16's calls (groups of 128, symmetric, bf16), ours and its rivals'.

    Args:
        names: shapes of :data:`.shapes.PRODUCTS`.
        tokens: numbers of rows.
    """
    for shape in names:
        N, K = shapes.PRODUCTS[shape]
        layer = w4a16_layer.make_layer(N, K, GROUP_SIZE, max(tokens), torch.bfloat16)
        for rival in FOUR_BITS:
            prepare = functools.cache(w4a16_rivals.PREPARE[rival])
            for M in tokens:
                label, x = f"{W4A16} {shape} M={M} {rival}", layer.x[:M]
                try:
                    call = prepare(layer)
                    y = call(x)
                except REFUSED as error:
                    sys.stdout.write(f"{label}: not run: {first_line(error)}\n")
                    continue
                if reason := w4a16_rivals.why_wrong(rival, layer, y):
                    sys.stdout.write(f"{label}: WRONG, not shown: {reason}\n")
                    continue
                yield Case(label, lambda call=call, x=x: call(x))  # type: ignore[misc]


def fused(name: str, widths: Sequence[int], tokens: int) -> Iterator[Case]:
    """Yield a fused form's calls, ours and its rivals'.

    Args:
        name: of :data:`.fused_cases.FORMS`.
        widths: columns N.
        tokens: rows M.
    """
    form = fused_cases.FORMS[name]
    for N in widths:
        operands = [fused_cases.make_operands(form, N, tokens)]
        for rival in FUSED:
            label = f"{name} {tokens}x{N} {rival}"
            try:
                call = fused_rivals.PREPARE[rival](form, operands)
                call(0)
            except REFUSED as error:
                sys.stdout.write(f"{label}: not run: {first_line(error)}\n")
                continue
            yield Case(label, lambda c=call: c(0))  # type: ignore[misc]


def show(case: Case) -> None:
    """Run a call where ncu looks: after it was compiled, between two marks that carry its label."""
    for _ in range(2):
        case.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    torch.cuda.nvtx.range_push(case.label)  # type: ignore[no-untyped-call]
    case.call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def parse(raw: str) -> list[dict[str, str]]:
    """Read ncu's page ``raw`` as CSV: a row a kernel; its second line, the units, is left out.

    Args:
        raw: what ncu printed; lines before the header are skipped.

    Raises:
        ValueError: there is no header.
    """
    lines = raw.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        raise ValueError("ncu printed no table: " + " ".join(lines[-3:]))
    header, _, *rows = csv.reader(lines[starts[0] :])
    return [dict(zip(header, row, strict=True)) for row in rows]


def label_of(row: Mapping[str, str]) -> str:
    """Return the label of the case a kernel belongs to; empty without one.

    Args:
        row: of :func:`parse`.
    """
    ranges = next((row[name] for name in row if name.startswith(_RANGES)), "")
    match = _LABEL.search(ranges)
    return match[1] if match else ""


def stalls(row: Mapping[str, str]) -> dict[str, float]:
    """Return the share of a warp's time between two instructions that each reason took.

    Args:
        row: of :func:`parse`.

    Returns:
        Reason → percentage, the largest first; empty where ncu counted none.
    """
    found = {}
    for name, value in row.items():
        if (match := _STALL.fullmatch(name)) and value:
            found[match[1]] = _number(value)
    total = sum(found.values())
    if not total:
        return {}
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return {reason: 100 * value / total for reason, value in ordered}


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def table(raw: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return a row a kernel: its case, its name, :data:`COUNTERS`, and its largest stalls.

    Args:
        raw: of :func:`parse`, in ncu's base units.
    """
    rows = []
    for row in raw:
        match = _KERNEL.match(row["Kernel Name"])
        cells = [_cell(column, row.get(counter, "")) for column, counter in COUNTERS.items()]
        largest = list(stalls(row).items())[:_STALLS_SHOWN]
        why = ", ".join(f"{reason} {share:.0f} %" for reason, share in largest)
        rows.append([label_of(row), match[1] if match else "", *cells, why])
    return rows


def _cell(column: str, text: str) -> str:
    try:
        value = _number(text)
    except ValueError:
        return "–"
    # ncu counts time in nanoseconds.
    return f"{value / 1e3 if column == 'us' else value:.4g}"


def write(rows: Sequence[Sequence[str]], facts: str, output: Path) -> None:
    """Write ``stalls.csv`` and ``stalls.md``.

    Args:
        rows: of :func:`table`.
        facts: with what they were measured.
        output: a directory.

    Raises:
        OSError: they cannot be written.
    """
    columns = ["case", "kernel", *COUNTERS, "stalls"]
    report.write_csv(output / "stalls.csv", columns, rows)
    table = report.markdown_table(columns, rows)
    legend = "".join(f"- {column}: `{counter}`\n" for column, counter in COUNTERS.items())
    (output / "stalls.md").write_text(f"{facts}\n\n{table}\n{legend}", encoding="utf-8")


def _profile(ncu: str, output: Path, argv: Sequence[str]) -> None:
    command = [ncu, "--set", "full", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--nvtx", "--force-overwrite", "--export", str(output / "stalls.ncu-rep")]
    command += [sys.executable, "-m", "taut_bench.stalls", "--inside", *argv]
    # Inductor's pool of compilers would be attached to, each process of it.
    subprocess.run(command, check=True, env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"})


def _page(ncu: str, output: Path) -> str:
    command = [ncu, "--import", str(output / "stalls.ncu-rep"), "--csv", "--page", "raw"]
    command += ["--print-units", "base"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for kind in arguments.kind or ():
        names = shapes.chosen(arguments, SHAPES)
        tokens = arguments.tokens or DEFAULT_TOKENS
        four = kind == W4A16
        yield from four_bits(list(names), tokens) if four else products(kind, list(names), tokens)
    for name in arguments.form or ():
        yield from fused(name, arguments.width or [4096], arguments.rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m taut_bench.stalls")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument(
        "--kind", action="append", choices=sorted({*ALL_KINDS, W4A16}), help="of product"
    )
    shapes.add_arguments(parser)
    parser.add_argument("--form", action="append", choices=sorted(fused_cases.FORMS))
    parser.add_argument("--width", action="append", type=int, help="of a form; default: 4096")
    parser.add_argument("--rows", type=int, default=4096, help="of a form (default: %(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    ncu = shutil.which("ncu")
    if not torch.cuda.is_available() or ncu is None:
        what = "a CUDA device" if ncu else "Nsight Compute's ncu on the PATH"
        sys.stderr.write(f"error: taut_bench.stalls needs {what}\n")
        return 2
    if arguments.inside:
        for case in _cases(arguments):
            show(case)
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    _profile(ncu, arguments.output, given)
    raw = _page(ncu, arguments.output)
    with gzip.open(arguments.output / "stalls-raw.csv.gz", "wt", encoding="utf-8") as file:
        file.write(raw)
    facts = report.measured_with("each kernel alone, replayed, with empty caches")
    write(table(parse(raw)), facts, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
