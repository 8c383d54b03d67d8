"""The one reader of what was measured: ``tiles/<card>.json``, one file a card.

::

    {"gpu": "<torch.cuda.get_device_name>",
     "tables": {"<table>": {"sources": ["<command, date, versions>", …], "rows": [{…}, …]}, …}}

A row is what one call, or a range of calls, was measured to be fastest with. Its fields, as far as
a table has them, are ``op``; ``format`` of the weights; ``N`` and ``K``, or what else the shape is;
``max_m``, the largest M it is for (null: any); ``kernel``; ``tile``, the fields of that kernel's
tile; and ``us``, µs a call. Times of rivals stand beside ``us`` where a table needs them.

What a tuner writes is one table alone: ``{"gpu": …, "source": …, "rows": […]}``;
``python -m tuning.merge_tiles`` brings it into a card's file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from taut_kernels.launch import measured_here

_DIRECTORY = Path(__file__).parents[1] / "tiles"

TWINS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}
"""Card → the card whose tiles it takes where it has no table of its own.

Both are a GH100 of 132 multiprocessors; the H100's memory is slower, which moves all tiles of a
shape alike. A table of its own replaces the twin's whole. Which products are faster than vLLM's is
measured on each card (:mod:`.measured_w4a16`, :mod:`.measured_scaled_mm`); norms, activations and
decode attention count as measured where their tiles are lent.
"""

Row = Mapping[str, Any]
KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")
_SHAPE = ("op", "kernel", "format", "D", "V", "C", "N", "K", "max_m", "max_n")
"""What names a row in an error, as far as it has them."""


@dataclass(frozen=True, slots=True)
class Table(Generic[KeyT, ValueT]):
    """What was measured on one card.

    Attributes:
        gpu: its name.
        choices: what a row's key is measured to be fastest with.
    """

    gpu: str
    choices: Mapping[KeyT, ValueT]


Buckets = tuple[tuple[int | None, ValueT], ...]
"""Of one key: the largest number of tokens, rising, None last; and what is for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader(Generic[KeyT, ValueT]):
    """How one table is read; each key has one row.

    Attributes:
        name: of the table in a card's file.
        fields: that every row has.
        optional: that a row may have.
        entry: makes key and value of a row, or refuses it with a ValueError.
        measured_here: this machine's rows (:mod:`.measured_here`) come before those shipped.
        lent: they join those of the card's twin, too.
    """

    name: str
    fields: frozenset[str]
    entry: Callable[[Row], tuple[KeyT, ValueT]]
    optional: frozenset[str] = frozenset()
    measured_here: bool = False
    lent: bool = True

    def parse(self, text: str, where: str) -> Table[KeyT, ValueT]:
        """Read one table alone, as a tuner writes it.

        Args:
            text: JSON.
            where: file name, for errors.

        Raises:
            ValueError: an unknown key, a missing field, a value out of its range, or a shape named
                twice; names ``where`` and the row.
        """
        return self.read(*rows_of(text, where), where)

    def read(self, gpu: str, rows: list[dict[str, Any]], where: str) -> Table[KeyT, ValueT]:
        """Read rows.

        Args:
            gpu: the card's name.
            rows: of the table.
            where: file name, for errors.

        Raises:
            ValueError: as :meth:`parse`.
        """
        choices: dict[KeyT, ValueT] = {}
        for row in rows:
            key, value = self._entry(row, where)
            if key in choices:
                raise ValueError(f"{where}: {_named(row)} is there twice")
            choices[key] = value
        return Table(gpu, choices)

    def tables(self) -> dict[str, Table[KeyT, ValueT]]:
        """Read every card's table, and this machine's; a caller keeps them.

        Raises:
            ValueError: a file is damaged; names it.
        """
        tables = {}
        for path in sorted(_DIRECTORY.glob("*.json")):
            gpu, listed = _of_card_file(path)
            if self.name in listed:
                tables[gpu] = self.read(gpu, listed[self.name]["rows"], path.name)
        if self.measured_here and (found := measured_here.rows(self.name)) is not None:
            try:
                own = self.read(*found)
            except ValueError as error:
                raise ValueError(f"{error}; {measured_here.AGAIN}") from error
            shipped = of_card(tables, own.gpu) if self.lent else tables.get(own.gpu)
            before = {} if shipped is None else shipped.choices
            tables[own.gpu] = Table(own.gpu, {**before, **own.choices})
        return tables

    def _entry(self, row: dict[str, Any], where: str) -> tuple[KeyT, ValueT]:
        if set(row) - self.optional != self.fields:
            raise ValueError(
                f"{where}: a row needs exactly {sorted(self.fields)}, got {sorted(row)}"
            )
        try:
            return self.entry(row)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{where}: {_named(row)}: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketReader(Reader[KeyT, Any]):
    """How a table is read whose rows of one key are buckets that follow each other.

    Attributes:
        limit: the field that rises from row to row, null in the last.
        whole: the last row of a key must have no limit.
    """

    limit: str = "max_m"
    whole: bool = True

    def read(self, gpu: str, rows: list[dict[str, Any]], where: str) -> Table[KeyT, Any]:
        """Read rows; values are :data:`Buckets`.

        Raises:
            ValueError: as :meth:`parse`, or limits out of order.
        """
        choices: dict[KeyT, Buckets[Any]] = {}
        last: dict[KeyT, str] = {}
        for row in rows:
            key, value = self._entry(row, where)
            before, last[key] = choices.get(key, ()), _named(row)
            limit = row[self.limit]
            if before and (before[-1][0] is None or (limit is not None and limit <= before[-1][0])):
                raise ValueError(f"{where}: {_named(row)}: {self.limit} must rise, null last")
            choices[key] = (*before, (limit, value))
        for key, buckets in choices.items():
            if self.whole and buckets[-1][0] is not None:
                raise ValueError(f"{where}: {last[key]}: {self.limit} must be null in the last row")
        return Table(gpu, choices)


def within(buckets: Buckets[ValueT], M: int) -> ValueT | None:
    """Return what is for ``M`` tokens: the first bucket that holds them; None where none does."""
    return next((value for limit, value in buckets if limit is None or limit >= M), None)


def _named(row: Row) -> str:
    return " ".join(f"{name}={row[name]}" for name in _SHAPE if name in row)


def rows_of(text: str, where: str) -> tuple[str, list[dict[str, Any]]]:
    """Read the frame of one table alone.

    Args:
        text: JSON.
        where: file name, for errors.

    Returns:
        The card's name, and the rows.

    Raises:
        ValueError: other keys than gpu, source and rows; names ``where``.
    """
    data: dict[str, Any] = json.loads(text)
    if set(data) != {"gpu", "source", "rows"}:
        raise ValueError(f"{where}: expected exactly gpu, source and rows, got {sorted(data)}")
    return data["gpu"], data["rows"]


def card_file(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Read a card's file.

    Args:
        text: JSON.
        where: file name, for errors.

    Returns:
        The card's name, and table → its sources and rows.

    Raises:
        ValueError: it has another form; names ``where``.
    """
    data: dict[str, Any] = json.loads(text)
    if set(data) != {"gpu", "tables"}:
        raise ValueError(f"{where}: expected exactly gpu and tables, got {sorted(data)}")
    for name, table in data["tables"].items():
        if set(table) != {"sources", "rows"}:
            raise ValueError(f"{where}: {name} needs sources and rows, got {sorted(table)}")
    return data["gpu"], data["tables"]


@cache
def _of_card_file(path: Path) -> tuple[str, dict[str, Any]]:
    return card_file(path.read_text(encoding="utf-8"), path.name)


def shipped_rows(name: str, gpu: str) -> list[dict[str, Any]]:
    """Return the rows a card's table has now, for tuning to keep those it does not replace.

    Args:
        name: of the table.
        gpu: `torch.cuda.get_device_name` of the card.

    Returns:
        Those of the card in :data:`TWINS` where it has no table; none where neither has one.
    """
    by_card = dict(map(_of_card_file, sorted(_DIRECTORY.glob("*.json"))))
    cards = (by_card.get(card, {}) for card in (gpu, TWINS.get(gpu, "")))
    tables = itertools.chain.from_iterable([tables[name]] for tables in cards if name in tables)
    rows: list[dict[str, Any]] = next(tables, {"rows": []})["rows"]
    return rows


def of_card(
    tables: Mapping[str, Table[KeyT, ValueT]], gpu: str | None
) -> Table[KeyT, ValueT] | None:
    """Return a card's table, or that of the card in :data:`TWINS`.

    Args:
        tables: of :meth:`Reader.tables`.
        gpu: `torch.cuda.get_device_name` of the card, None outside CUDA.

    Returns:
        None where neither has one.
    """
    name = gpu or ""
    return tables.get(name) or tables.get(TWINS.get(name, ""))


def measured(
    tables: Mapping[str, Table[KeyT, ValueT]], gpu: str | None, key: KeyT
) -> ValueT | None:
    """Return what a card's table, or its twin's, has for a key; None without one.

    Args:
        tables: of :meth:`Reader.tables`.
        gpu: as for :func:`of_card`.
        key: of the table's rows.
    """
    table = of_card(tables, gpu)
    return table.choices.get(key) if table else None
