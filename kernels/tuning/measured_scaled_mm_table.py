"""Make a table of verdicts on 8-bit products: ``python -m …bench.measured_scaled_mm_table``.

Takes the CSVs of `taut_bench.scaled_mm` of each kind (where two have a cell, the later one
counts), maybe one of `taut_bench.decode_chain --forms`, and writes what
:mod:`taut_kernels.gemm.scaled_mm.verdict` reads. Only what vLLM runs there is a rival: CUTLASS; for
block-wise FP8 the faster of it and DeepGEMM, behind the quantisation (``--kind
fp8-block-quantised``). A card with tiles of its own has verdicts on the first two in their table.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut_bench import shapes
from taut_bench.decoder_layer import FORMS
from taut_bench.scaled_mm_layer import ALL_KINDS, BLOCK_KIND, KINDS
from taut_kernels.gemm.scaled_mm import verdict as measured_scaled_mm
from taut_kernels.tuner.w4a16_measure import OURS
from tuning import measured_table

VLLM = "CUTLASS"
"""The kernel a call falls to where it is not ours, by its name in the benchmark."""
BLOCK_VLLM = (VLLM, "DeepGEMM")
"""Those of block-wise FP8, with and without DeepGEMM."""
_TILE_OF_THE_TABLE = "table"
"""The form of ours that ships, by its name in `decode_chain`."""

Product = tuple[str, int, int]
"""op, N, K."""
Figures = dict[str, list[Any]]
"""``M``, ``us`` and ``vllm_us``."""


def _figures(
    by_tokens: Mapping[int, Mapping[str, float]], ours: str, vllm: Sequence[str] = (VLLM,)
) -> Figures:
    tokens = sorted(by_tokens)
    fastest = [min(by_tokens[M][name] for name in vllm) for M in tokens]
    return {"M": tokens, "us": [by_tokens[M][ours] for M in tokens], "vllm_us": fastest}


def rows(op: str, paths: Sequence[Path], vllm: Sequence[str] = (VLLM,)) -> list[dict[str, Any]]:
    """Return products as rows of the table.

    Args:
        op: whose they are.
        paths: CSVs of `bench.scaled_mm`, the later ones count.
        vllm: vLLM's kernels; a cell without one of them is refused.

    Raises:
        ValueError: one is no such CSV, or they have no cell in which both ours and vLLM's were
            timed; names it.
    """
    cells = measured_table.read(paths, vllm)
    each = [times for by_tokens in cells.values() for times in by_tokens.values()]
    if not each or any(name not in times for times in each for name in vllm):
        named, rivals = ", ".join(map(str, paths)), " and ".join(vllm)
        raise ValueError(f"{named}: no cell with times of {OURS} and {rivals}")
    return [
        {"op": op, "N": N, "K": K} | _figures(by_tokens, OURS, vllm)
        for (N, K, _), by_tokens in cells.items()
    ]


def forms_of_layers(path: Path) -> dict[Product, dict[int, dict[str, float]]]:
    """Return whole layers' µs: by op, N and K of the product whose form differs, tokens and form.

    Args:
        path: CSV of `bench.decode_chain --forms`, of one length of context.

    Raises:
        ValueError: it is no such CSV; names it.
    """
    found: dict[Product, dict[int, dict[str, float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                product, _, form = row["kernels"].partition(" (")[0].partition(" ")
                if product not in shapes.PRODUCTS or form not in FORMS:
                    continue
                key = KINDS[row["scheme"]], *shapes.PRODUCTS[product]
                times = found.setdefault(key, {}).setdefault(int(row["tokens"]), {})
                if form in times:
                    raise ValueError(f"{product} {form} is there twice")
                times[form] = float(row["us"])
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}: not a CSV of decode_chain: {error}") from error
    both = {_TILE_OF_THE_TABLE, VLLM}
    if not found or any(both - set(times) for some in found.values() for times in some.values()):
        raise ValueError(f"{path}: not every layer was timed with ours and with {VLLM}")
    return found


def layers(path: Path) -> dict[Product, Figures]:
    """Return whole layers' figures by op, N and K of the product in which they differ.

    Args:
        path: as of :func:`forms_of_layers`.

    Raises:
        ValueError: it is no such CSV; names it.
    """
    found = forms_of_layers(path)
    return {key: _figures(some, _TILE_OF_THE_TABLE) for key, some in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tuning.measured_scaled_mm_table", description=__doc__
    )
    for kind in KINDS:
        parser.add_argument(
            f"--{kind}", type=Path, nargs="+", default=[], help=f"scaled_mm_{kind}.csv …"
        )
    parser.add_argument(
        f"--{BLOCK_KIND}", type=Path, nargs="+", default=[], help="those behind the quantisation"
    )
    parser.add_argument("--layers", type=Path, help="decode_chain.csv of --forms")
    parser.add_argument("--gpu", required=True, help="as torch.cuda.get_device_name spells it")
    parser.add_argument("--source", required=True, help="command, date, versions")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    arguments = parser.parse_args(argv)
    try:
        given = {kind: getattr(arguments, kind.replace("-", "_")) for kind in ALL_KINDS}
        listed = [
            row
            for kind, paths in given.items()
            if paths
            for row in rows(ALL_KINDS[kind], paths, BLOCK_VLLM if kind == BLOCK_KIND else (VLLM,))
        ]
        if not listed:
            raise ValueError(f"no CSV given: {', '.join(f'--{kind}' for kind in ALL_KINDS)}")
        within = layers(arguments.layers) if arguments.layers else {}
        for row in listed:
            if layer := within.get((row["op"], row["N"], row["K"])):
                row["layer"] = layer
        head = f'"gpu": {json.dumps(arguments.gpu)}, "source": {json.dumps(arguments.source)}'
        text = f'{{{head}, "rows": [\n' + ",\n".join(map(json.dumps, listed)) + "\n]}\n"
        table = measured_scaled_mm.parse(text, "the table")
        arguments.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for (op, N, K), (ratios, _) in table.choices.items():
        figures = ", ".join(f"{M}: {ratio:.2f}" for M, ratio in ratios.items())
        sys.stdout.write(f"{op} {N}×{K}: vLLM's time ÷ ours at {figures}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
