"""Make a table of verdicts on 8-bit products: ``python -m …bench.measured_scaled_mm_table``.

Takes the CSVs of `taut_kernels.bench.scaled_mm`, one a kind, and writes what
:mod:`taut_kernels.measured_scaled_mm` reads. Only what vLLM runs there is a rival: CUTLASS.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taut_kernels import measured_scaled_mm
from taut_kernels.bench import measured_table

VLLM = "CUTLASS"
"""The kernel a call falls to where it is not ours, by its name in the benchmark."""


def rows(op: str, path: Path) -> list[dict[str, Any]]:
    """Return a CSV's products as rows of the table.

    Args:
        op: whose they are.
        path: of `bench.scaled_mm`.

    Raises:
        ValueError: it is no such CSV, or has no cell in which both ours and vLLM's were timed;
            names it.
    """
    cells = measured_table.read([path], (VLLM,))
    if not cells:
        raise ValueError(f"{path}: no cell with times of {measured_table.OURS} and {VLLM}")
    found = []
    for (N, K, _), by_tokens in cells.items():
        tokens = sorted(by_tokens)
        times = {
            key: [by_tokens[M][name] for M in tokens]
            for key, name in (("us", measured_table.OURS), ("vllm_us", VLLM))
        }
        found.append({"op": op, "N": N, "K": K, "M": tokens} | times)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m taut_kernels.bench.measured_scaled_mm_table", description=__doc__
    )
    parser.add_argument("--fp8", type=Path, required=True, help="scaled_mm_fp8.csv")
    parser.add_argument("--int8", type=Path, required=True, help="scaled_mm_int8.csv")
    parser.add_argument("--gpu", required=True, help="as torch.cuda.get_device_name spells it")
    parser.add_argument("--source", required=True, help="command, date, versions")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    arguments = parser.parse_args(argv)
    try:
        listed = rows("fp8_gemm", arguments.fp8) + rows("w8a8_gemm", arguments.int8)
        head = f'"gpu": {json.dumps(arguments.gpu)}, "source": {json.dumps(arguments.source)}'
        text = f'{{{head}, "rows": [\n' + ",\n".join(map(json.dumps, listed)) + "\n]}\n"
        table = measured_scaled_mm.parse(text, "the table")
        arguments.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for (op, N, K), ratios in table.ratios.items():
        figures = ", ".join(f"{M}: {ratio:.2f}" for M, ratio in ratios.items())
        sys.stdout.write(f"{op} {N}×{K}: vLLM's time ÷ ours at {figures}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
