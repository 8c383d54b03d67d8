"""From W4A16 benchmarks to the table the plugin decides by: ``python -m tuning.measured_table``.

Reads the CSV files of `taut_bench.w4a16` and the JSON lines (``.jsonl``) of
`tuning.cover_products` (of one card; where two have a cell, the later
file counts; ``FILE@512``: of 512 and more tokens alone, as where a run left Marlin out, which is
behind Machete there) and writes the table ``w4a16_measured`` of
:mod:`taut_kernels.gemm.w4a16.verdict`; `tuning.merge_tiles` brings it into a card's file. Files
of another format in bf16 make rows of that format; fp16 and groups of a channel are no rows'
own. Needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut_bench import w4a16_format
from taut_kernels.gemm.w4a16 import verdict as measured_w4a16
from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.gemm.w4a16.op import GROUP_SIZES
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import tile_tables
from taut_kernels.tuner.w4a16_measure import OURS
from tuning import cover_products
from tuning.merge_tiles import alone

VLLM = ("Marlin", "Machete", "Humming")
"""The kernels a layer may fall to where it is not ours, by their names in the benchmark."""

Cells = dict[tuple[int, int, WeightFormat], dict[int, dict[str, float]]]
"""(N, K, format) → M → kernel, without the format behind its name → µs."""


def read(files: Sequence[str | Path], vllm: Sequence[str] = VLLM) -> Cells:
    """Collect the cells of benchmarks.

    Args:
        files: CSV files, the later ones count; a number behind ``@`` is the least of its tokens.
        vllm: names of vLLM's kernels.

    Returns:
        All cells in which both ours and one of vLLM's were timed.

    Raises:
        ValueError: a file is no such CSV; names it.
    """
    cells: Cells = {}
    for named in files:
        path, least = _path_and_tokens(str(named))
        seen = _read_lines(path) if path.suffix == ".jsonl" else _read_csv(path)
        for shape, by_tokens in seen.items():
            # Figures of two runs never meet in one ratio.
            complete = {
                M: times
                for M, times in by_tokens.items()
                if least <= M and OURS in times and any(name in times for name in vllm)
            }
            cells.setdefault(shape, {}).update(complete)
    return {shape: by_tokens for shape, by_tokens in cells.items() if by_tokens}


def _read_csv(path: Path) -> Cells:
    seen: Cells = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            given = _format_of(row, path)
            try:
                shape, M = (int(row["N"]), int(row["K"]), given.weights), int(row["M"])
                kernel = row["kernel"].removesuffix(given.kernel(""))
                seen.setdefault(shape, {}).setdefault(M, {})[kernel] = float(row["us"])
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}: not a CSV of a benchmark: {error}") from error
    return seen


def _read_lines(path: Path) -> Cells:
    """Collect the objects of a file; a product's later ones add the kernels they brought.

    Ours was timed in each: a later kernel's time is told by its ratio to ours of the same object,
    so that figures of two runs do not meet in one ratio.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    seen: Cells = {}
    for line in cover_products.read(path):
        by_tokens = seen.setdefault((line["N"], line["K"], WeightFormat(line["format"])), {})
        for M, ours in line["us"].get(OURS, {}).items():
            cell = by_tokens.setdefault(M, {OURS: ours})
            for kernel, times in line["us"].items():
                if M in times and kernel not in cell:
                    cell[kernel] = times[M] / ours * cell[OURS]
    return seen


def _format_of(row: Mapping[str, str], path: Path) -> w4a16_format.Format:
    """Return the format of a row of a CSV; refuse what no verdict's row is of."""
    if row.get("group_size") is None:
        return w4a16_format.DEFAULT
    group, zero_points, dtype = (row.get(column) for column in w4a16_format.COLUMNS)
    sizes = {str(size): size for size in GROUP_SIZES}
    if group not in sizes or zero_points not in ("yes", "no") or dtype != "bf16":
        raise ValueError(f"{path}: rows of another format than the verdicts' are of")
    return w4a16_format.Format(sizes[group], zero_points == "yes", dtype)


def _path_and_tokens(named: str) -> tuple[Path, int]:
    path, _, tokens = named.rpartition("@")
    return (Path(path), int(tokens)) if path and tokens.isdecimal() else (Path(named), 0)


def table(cells: Cells, gpu: str, source: str, kept: Sequence[dict[str, Any]] = ()) -> str:
    """Return the table's JSON, one shape and format a line.

    Args:
        cells: of :func:`read`.
        gpu: name of the card.
        source: command, date, versions.
        kept: rows of an older table, which stay as they are: the cells add shapes it lacks.

    Raises:
        ValueError: a shape lacks figures the rule needs.
    """
    rows = [json.dumps(row) for row in kept]
    there = {(row["N"], row["K"], weight_format.of_row(row)) for row in kept}
    for (N, K, weights), by_tokens in cells.items():
        if (N, K, weights) in there:
            continue
        tokens = sorted(by_tokens)
        ours = [round(by_tokens[M][OURS], 2) for M in tokens]
        theirs = [
            round(min(us for name, us in by_tokens[M].items() if name in VLLM), 2) for M in tokens
        ]
        named = {"N": N, "K": K} | weight_format.as_field(weights)
        rows.append(json.dumps(named | {"M": tokens, "us": ours, "vllm_us": theirs}))
    head = f'{{"gpu": {json.dumps(gpu)}, "source": {json.dumps(source)}, "rows": [\n'
    text = head + ",\n".join(rows) + "\n]}\n"
    measured_w4a16.parse(text, "the table")
    return text


def _kept(path: Path | None, gpu: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of an older table of the card, and its source with what joins it to more."""
    if path is None:
        return [], ""
    text = path.read_text(encoding="utf-8")
    if "tables" in json.loads(text):
        text = alone(text, measured_w4a16.TABLE, str(path))
    measured_w4a16.parse(text, str(path))
    named, rows = tile_tables.rows_of(text, str(path))
    if named != gpu:
        raise ValueError(f"--keep {path}: is of {named}, not of {gpu}")
    return rows, f"{json.loads(text)['source']}; "


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.measured_table", description=__doc__)
    parser.add_argument(
        "csv",
        nargs="+",
        help="of taut_bench.w4a16 or tuning.cover_products, one card's; FILE or FILE@TOKENS",
    )
    parser.add_argument("--gpu", required=True, help="as torch.cuda.get_device_name spells it")
    parser.add_argument("--source", required=True, help="command, date, versions")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument(
        "--keep",
        type=Path,
        help="such a table, or tiles/<card>.json: its rows stay, its source is first",
    )
    arguments = parser.parse_args(argv)
    try:
        kept, source = _kept(arguments.keep, arguments.gpu)
        text = table(read(arguments.csv), arguments.gpu, source + arguments.source, kept)
        arguments.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for (N, K, weights), found in measured_w4a16.parse(text, "the table").choices.items():
        verdict = "ours" if found.wins else "vLLM's"
        figures = f"decode {found.decode:.2f}, overall {found.overall:.2f}"
        form = "".join(f" {name}" for name in weight_format.as_field(weights).values())
        sys.stdout.write(f"{N}×{K}{form}: {figures}: {verdict}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
