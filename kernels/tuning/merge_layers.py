"""Bring whole layers' figures into a table of tiles: ``python -m tuning.merge_layers``.

Takes a shipped ``tiles/<card>.json`` and the CSV of `bench.decode_chain --forms` on that card,
with that table. A product's bucket gets the form that was fastest over its numbers of tokens, late
or clearly faster early, its layer's µs, and those with vLLM's kernel in its place; buckets of which
not every number of tokens was timed stay as they are. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut_kernels.gemm.scaled_mm.tile import PREFETCH
from taut_kernels.launch.tile_tables import card_file
from tuning.measured_scaled_mm_table import VLLM, forms_of_layers
from tuning.merge_tiles import card_text, write_over

STARTS: dict[str, int | None] = {"late": None, "early": 0, "early+prefetch": PREFETCH}
"""Form of ours, by its name in `decode_chain` → ``prefetch`` of a row's ``layer``."""
_CLEARLY = 0.993
"""What an early start may take of a late one's time to be taken: some of less gain cost 2 to 5 % in
every second run (down at 32 tokens on an H100)."""


def layer_of(by_tokens: Mapping[int, Mapping[str, float]], Ms: Sequence[int]) -> dict[str, Any]:
    """Return a row's ``layer``: its best form, and µs with it and with vLLM's kernel.

    Args:
        by_tokens: µs by number of tokens and form.
        Ms: the row's numbers of tokens, all timed.
    """
    sums = {form: sum(by_tokens[M][form] for M in Ms) for form in STARTS}
    form = min(sums, key=lambda name: sums[name])
    if sums[form] > _CLEARLY * sums["late"]:
        form = "late"
    return {
        "prefetch": STARTS[form],
        "M": list(Ms),
        "us": [by_tokens[M][form] for M in Ms],
        "vllm_us": [by_tokens[M][VLLM] for M in Ms],
    }


def merged(shipped: str, path: Path) -> str:
    """Return a card's file with layers' figures.

    Args:
        shipped: its text.
        path: CSV of `bench.decode_chain --forms`.

    Raises:
        ValueError: one of them is not what it is to be.
    """
    gpu, tables = card_file(shipped, "the shipped file")
    timed = forms_of_layers(path)
    for row in tables["scaled_mm"]["rows"]:
        by_tokens = timed.get((row["op"], row["N"], row["K"]), {})
        if row["max_m"] is not None and all(M in by_tokens for M in row["M"]):
            row["layer"] = layer_of(by_tokens, row["M"])
    return card_text(gpu, tables)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.merge_layers", description=__doc__)
    parser.add_argument("shipped", type=Path, help="tiles/<card>.json; written over")
    parser.add_argument("layers", type=Path, help="decode_chain.csv of --forms")
    arguments = parser.parse_args(argv)
    return write_over(arguments.shipped, lambda shipped: merged(shipped, arguments.layers))


if __name__ == "__main__":
    sys.exit(main())
