"""From W4A16 benchmarks to the table the plugin decides by: ``python -m …bench.measured_table``.

Reads the CSV files of `taut_kernels.bench.w4a16` (of one card; where two have a cell, the later
file counts; ``FILE@512``: of 512 and more tokens alone, as where a run left Marlin out, which is
behind Machete there) and writes ``tiles/w4a16_measured-<card>.json``,
:mod:`taut_kernels.measured_w4a16`. Needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from taut_kernels import measured_w4a16

OURS = "taut"
VLLM = ("Marlin", "Machete")
"""The kernels a layer falls to where it is not ours, by their names in the benchmark."""

Cells = dict[tuple[int, int], dict[int, dict[str, float]]]
"""(N, K) → M → kernel → µs."""


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
        seen: Cells = {}
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get("group_size") is not None:
                    raise ValueError(f"{path}: rows of another format than the verdicts' are of")
                try:
                    shape, M = (int(row["N"]), int(row["K"])), int(row["M"])
                    seen.setdefault(shape, {}).setdefault(M, {})[row["kernel"]] = float(row["us"])
                except (KeyError, ValueError) as error:
                    raise ValueError(f"{path}: not a CSV of a benchmark: {error}") from error
        for shape, by_tokens in seen.items():
            # Figures of two runs never meet in one ratio.
            complete = {
                M: times
                for M, times in by_tokens.items()
                if least <= M and OURS in times and any(name in times for name in vllm)
            }
            cells.setdefault(shape, {}).update(complete)
    return {shape: by_tokens for shape, by_tokens in cells.items() if by_tokens}


def _path_and_tokens(named: str) -> tuple[Path, int]:
    path, _, tokens = named.rpartition("@")
    return (Path(path), int(tokens)) if path and tokens.isdecimal() else (Path(named), 0)


def table(cells: Cells, gpu: str, source: str) -> str:
    """Return the table's JSON, one shape a line.

    Args:
        cells: of :func:`read`.
        gpu: name of the card.
        source: command, date, versions.

    Raises:
        ValueError: a shape lacks figures the rule needs.
    """
    rows = []
    for (N, K), by_tokens in cells.items():
        tokens = sorted(by_tokens)
        ours = [round(by_tokens[M][OURS], 2) for M in tokens]
        theirs = [
            round(min(us for name, us in by_tokens[M].items() if name in VLLM), 2) for M in tokens
        ]
        rows.append(json.dumps({"N": N, "K": K, "M": tokens, "us": ours, "vllm_us": theirs}))
    head = f'{{"gpu": {json.dumps(gpu)}, "source": {json.dumps(source)}, "rows": [\n'
    text = head + ",\n".join(rows) + "\n]}\n"
    measured_w4a16.parse(text, "the table")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m taut_kernels.bench.measured_table", description=__doc__
    )
    parser.add_argument("csv", nargs="+", help="of bench.w4a16, one card's; FILE or FILE@TOKENS")
    parser.add_argument("--gpu", required=True, help="as torch.cuda.get_device_name spells it")
    parser.add_argument("--source", required=True, help="command, date, versions")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    arguments = parser.parse_args(argv)
    try:
        text = table(read(arguments.csv), arguments.gpu, arguments.source)
        arguments.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for (N, K), found in measured_w4a16.parse(text, "the table").shapes.items():
        verdict = "ours" if found.wins else "vLLM's"
        figures = f"decode {found.decode:.2f}, overall {found.overall:.2f}"
        sys.stdout.write(f"{N}×{K}: {figures}: {verdict}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
