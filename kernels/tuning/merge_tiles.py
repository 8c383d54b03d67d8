"""Bring tuned tiles into a shipped table: ``python -m tuning.merge_tiles``.

Takes the shipped file and those that `tune_w4a16_decode`, `tune_w4a16_wgmma` or `tune_scaled_mm`
wrote for the same card, or for one that takes this card's tiles. A W4A16 row takes the place of the
shipped one of its N, K, max_m and format; one that has no place yet goes to the end. An 8-bit
product's rows are buckets of tokens that follow each other: the tuned ones take the place of all of
its shipped ones from the first that is not below them on. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.launch.tile_tables import TWINS

Rows = list[dict[str, Any]]


def _key(row: dict[str, Any]) -> tuple[object, ...]:
    return row["N"], row["K"], row["max_m"], row.get(weight_format.FIELD)


def _in_place(shipped: Rows, tuned: Rows) -> Rows:
    """Return W4A16's shipped rows with the tuned ones in their places."""
    rows = {_key(row): row for row in shipped} | {_key(row): row for row in tuned}
    return list(rows.values())


def _limit(row: dict[str, Any]) -> float:
    return math.inf if row["max_m"] is None else row["max_m"]


def _from_a_bucket_on(shipped: Rows, tuned: Rows) -> Rows:
    """Return 8-bit products' shipped rows up to where the tuned ones of each begin, then these."""
    new: dict[tuple[object, ...], Rows] = {}
    for row in tuned:
        new.setdefault((row["op"], row["N"], row["K"]), []).append(row)
    rows: Rows = []
    for row in shipped:
        product = (row["op"], row["N"], row["K"])
        if product not in new or _limit(row) < _limit(new[product][0]):
            rows.append(row)
        elif row["max_m"] is None:
            rows += new.pop(product)
    return rows + [row for some in new.values() for row in some]


def _a_line_each(table: dict[str, Any]) -> str:
    """Write a table with a line a row."""
    head = "".join(f" {json.dumps(key)}: {json.dumps(table[key])},\n" for key in ("gpu", "source"))
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table["rows"])
    return f'{{\n{head} "rows": [\n{rows}\n ]\n}}\n'


def _indented(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Family:
    """How one kind of table is read, merged and written.

    Attributes:
        parse: reads such a table, or refuses it with a ValueError; takes text and a name.
        merge: brings tuned rows into shipped ones.
        write: makes its text.
    """

    parse: Callable[[str, str], object]
    merge: Callable[[Rows, Rows], Rows] = _in_place
    write: Callable[[dict[str, Any]], str] = _indented


FAMILIES = {
    "w4a16_decode": Family(tiles_decode.parse),
    "w4a16_wgmma": Family(tiles_wgmma.parse),
    "scaled_mm": Family(tiles_scaled_mm.parse, _from_a_bucket_on, _a_line_each),
}
"""By what a shipped file's name begins with."""


def merged(shipped: str, tuned: Sequence[str], family: Family) -> str:
    """Return a shipped table's text with the rows of others.

    Args:
        shipped: its text.
        tuned: the others', the later ones count.
        family: which kind of table they are.

    Raises:
        ValueError: one of them is no such table, or of a card with other tiles.
    """
    family.parse(shipped, "the shipped table")
    table: dict[str, Any] = json.loads(shipped)
    for text in tuned:
        family.parse(text, "a tuned table")
        new: dict[str, Any] = json.loads(text)
        if table["gpu"] not in (new["gpu"], TWINS.get(new["gpu"])):
            raise ValueError(f"tiles of {new['gpu']} are none of {table['gpu']}")
        table["rows"] = family.merge(table["rows"], new["rows"])
        if new["source"] not in table["source"]:
            table["source"] += f"; {new['source']}"
    text = family.write(table)
    family.parse(text, "the merged table")
    return text


def write_over(path: Path, make: Callable[[str], str]) -> int:
    """Replace a table's text by what is made of it; return a command's exit status.

    Args:
        path: the table.
        make: takes its text; what it refuses with an OSError or ValueError is said, and the table
            stays as it is.
    """
    try:
        path.write_text(make(path.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.merge_tiles", description=__doc__)
    parser.add_argument("shipped", type=Path, help="a file of taut_kernels/tiles; written over")
    parser.add_argument("tuned", type=Path, nargs="+", help="what a tuner wrote; the later count")
    arguments = parser.parse_args(argv)
    family = arguments.shipped.name.partition("-")[0]

    def make(shipped: str) -> str:
        if family not in FAMILIES:
            raise ValueError(f"{arguments.shipped}: no table of {' or '.join(FAMILIES)}")
        texts = [path.read_text(encoding="utf-8") for path in arguments.tuned]
        return merged(shipped, texts, FAMILIES[family])

    return write_over(arguments.shipped, make)


if __name__ == "__main__":
    sys.exit(main())
