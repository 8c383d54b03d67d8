"""Bring tuned W4A16 tiles into a shipped table: ``python -m taut_kernels.bench.merge_tiles``.

Takes the shipped file and those that `tune_w4a16_decode` or `tune_w4a16_wgmma` wrote for the same
card. A row takes the place of the shipped one of its N, K, max_m and format; one that has no place
yet goes to the end. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from taut_kernels import tiles_decode, tiles_wgmma, weight_format

_PARSERS: dict[str, Callable[[str, str], object]] = {
    "w4a16_decode": tiles_decode.parse,
    "w4a16_wgmma": tiles_wgmma.parse,
}
"""By what a shipped file's name begins with."""


def _key(row: dict[str, Any]) -> tuple[object, ...]:
    return row["N"], row["K"], row["max_m"], row.get(weight_format.FIELD)


def merged(shipped: str, tuned: Sequence[str], parse: Callable[[str, str], object]) -> str:
    """Return a shipped table's text with the rows of others.

    Args:
        shipped: its text.
        tuned: the others', the later ones count.
        parse: reads such a table, or refuses it.

    Raises:
        ValueError: one of them is no such table, or of another card.
    """
    parse(shipped, "the shipped table")
    table: dict[str, Any] = json.loads(shipped)
    rows = {_key(row): row for row in table["rows"]}
    for text in tuned:
        parse(text, "a tuned table")
        new: dict[str, Any] = json.loads(text)
        if new["gpu"] != table["gpu"]:
            raise ValueError(f"tiles of {new['gpu']} are none of {table['gpu']}")
        rows |= {_key(row): row for row in new["rows"]}
        if new["source"] not in table["source"]:
            table["source"] += f"; {new['source']}"
    text = json.dumps(table | {"rows": list(rows.values())}, indent=1) + "\n"
    parse(text, "the merged table")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m taut_kernels.bench.merge_tiles", description=__doc__
    )
    parser.add_argument("shipped", type=Path, help="a file of taut_kernels/tiles; written over")
    parser.add_argument("tuned", type=Path, nargs="+", help="what a tuner wrote; the later count")
    arguments = parser.parse_args(argv)
    family = arguments.shipped.name.partition("-")[0]
    try:
        if family not in _PARSERS:
            raise ValueError(f"{arguments.shipped}: no table of {' or '.join(_PARSERS)}")
        texts = [path.read_text(encoding="utf-8") for path in arguments.tuned]
        before = arguments.shipped.read_text(encoding="utf-8")
        arguments.shipped.write_text(merged(before, texts, _PARSERS[family]), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
