"""Bring tuned tiles into a shipped table: ``python -m tuning.merge_tiles``.

Takes a card's file, the name of one of its tables, and what the scripts of this package wrote for
the same card, or for one that takes this card's tiles. A row of W4A16's tiles takes the place of
the shipped one of its N, K, max_m and format; one that has no place yet goes to the end. An 8-bit
product's rows are buckets of tokens that follow each other: the tuned ones take the place of all of
its shipped ones from the first that is not below them on. Any other table is replaced whole. Needs
no GPU.
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

from taut_kernels.attention import tiles as tiles_attention
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import verdict as measured_scaled_mm
from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import verdict as measured_w4a16
from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.launch.tile_tables import TWINS, card_file
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.primitives import conv2d_tiles, gemm_tiles
from taut_kernels.rowwise import tiles as tiles_fused

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


def _whole(_: Rows, tuned: Rows) -> Rows:
    return tuned


@dataclass(frozen=True, slots=True)
class Family:
    """How one table is read and merged.

    Attributes:
        parse: reads one alone, or refuses it with a ValueError; takes text and a name.
        merge: brings tuned rows into shipped ones.
    """

    parse: Callable[[str, str], object]
    merge: Callable[[Rows, Rows], Rows] = _whole


FAMILIES = {
    "attention": Family(tiles_attention.parse),
    "conv2d": Family(conv2d_tiles.parse),
    "fused": Family(tiles_fused.parse),
    "gemm": Family(gemm_tiles.parse),
    "loss": Family(tiles_loss.parse),
    "scaled_mm": Family(tiles_scaled_mm.parse, _from_a_bucket_on),
    "scaled_mm_measured": Family(measured_scaled_mm.parse),
    "w4a16_decode": Family(tiles_decode.parse, _in_place),
    "w4a16_measured": Family(measured_w4a16.parse),
    "w4a16_wgmma": Family(tiles_wgmma.parse, _in_place),
}
"""By the table's name."""


def alone(card: str, name: str, where: str) -> str:
    """Return one table of a card's file as a tuner writes it.

    Args:
        card: the file's text.
        name: of the table.
        where: the file's name, for errors.
    """
    gpu, tables = card_file(card, where)
    return _alone(gpu, tables[name])


def _alone(gpu: str, table: dict[str, Any]) -> str:
    return json.dumps({"gpu": gpu, "source": "; ".join(table["sources"]), "rows": table["rows"]})


def card_text(gpu: str, tables: dict[str, Any]) -> str:
    """Write a card's file, with a line a row; tables that do not read are refused.

    Raises:
        ValueError: a table is damaged; names it.
    """
    parts = []
    for name in sorted(tables):
        FAMILIES[name].parse(_alone(gpu, tables[name]), name)
        lists = (
            f"  {json.dumps(key)}: [\n"
            + ",\n".join(f"   {json.dumps(one)}" for one in tables[name][key])
            + "\n  ]"
            for key in ("sources", "rows")
        )
        parts.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lists) + "}")
    return f'{{\n "gpu": {json.dumps(gpu)},\n "tables": {{\n' + ",\n".join(parts) + "\n }\n}\n"


def merged(shipped: str, name: str, tuned: Sequence[str]) -> str:
    """Return a card's file with tuned rows in one of its tables.

    Args:
        shipped: its text.
        name: of the table.
        tuned: texts of such a table alone; the later ones count.

    Raises:
        ValueError: one of them is no such table, or of a card with other tiles.
    """
    if name not in FAMILIES:
        raise ValueError(f"no table {name!r}: {', '.join(FAMILIES)}")
    gpu, tables = card_file(shipped, "the shipped file")
    family = FAMILIES[name]
    table = tables.setdefault(name, {"sources": [], "rows": []})
    for text in tuned:
        family.parse(text, "a tuned table")
        new: dict[str, Any] = json.loads(text)
        if gpu not in (new["gpu"], TWINS.get(new["gpu"])):
            raise ValueError(f"tiles of {new['gpu']} are none of {gpu}")
        table["rows"] = family.merge(table["rows"], new["rows"])
        if family.merge is _whole:
            table["sources"] = new["source"].split("; ")
        elif new["source"] not in "; ".join(table["sources"]):
            table["sources"].append(new["source"])
    return card_text(gpu, tables)


def write_over(path: Path, make: Callable[[str], str]) -> int:
    """Replace a file's text by what is made of it; return a command's exit status.

    Args:
        path: the file.
        make: takes its text; what it refuses with an OSError or ValueError is said, and the file
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
    parser.add_argument("table", help=f"one of {', '.join(FAMILIES)}")
    parser.add_argument("tuned", type=Path, nargs="+", help="what a tuner wrote; the later count")
    arguments = parser.parse_args(argv)

    def make(shipped: str) -> str:
        texts = [path.read_text(encoding="utf-8") for path in arguments.tuned]
        return merged(shipped, arguments.table, texts)

    return write_over(arguments.shipped, make)


if __name__ == "__main__":
    sys.exit(main())
