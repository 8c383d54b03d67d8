"""What all files of measured tiles share: ``tiles/<name>-<card>.json``: gpu, source and rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from taut_kernels.launch import measured_here

_DIRECTORY = Path(__file__).parents[1] / "tiles"

TWINS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}
"""Card → the card whose tiles it takes where it has no table of its own.

Both are a GH100 of 132 multiprocessors; the H100's memory is slower, which moves all tiles of a
shape alike. A table of its own replaces the twin's whole. Which products are faster than vLLM's is
measured on each card (:mod:`.measured_w4a16`, :mod:`.measured_scaled_mm`); norms, activations and
decode attention count as measured where their tiles are lent.
"""


class Table(Protocol):
    """A parsed file."""

    @property
    def gpu(self) -> str:
        """`torch.cuda.get_device_name` of the card it was measured on."""


TableT = TypeVar("TableT", bound=Table)


def rows_of(text: str, where: str) -> tuple[str, list[dict[str, Any]]]:
    """Read a file's frame.

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


def shipped_rows(name: str, gpu: str) -> list[dict[str, Any]]:
    """Return the rows a card's table has now, for tuning to keep those it does not replace.

    Args:
        name: what the file's name begins with.
        gpu: `torch.cuda.get_device_name` of the card.

    Returns:
        Those of the card in :data:`TWINS` where it has no table; none where neither has one.
    """
    paths = sorted(_DIRECTORY.glob(f"{name}-*.json"))
    by_card = dict(rows_of(path.read_text(encoding="utf-8"), path.name) for path in paths)
    return by_card.get(gpu) or by_card.get(TWINS.get(gpu, ""), [])


def load_all(name: str, parse: Callable[[str, str], TableT]) -> dict[str, TableT]:
    """Read every card's table.

    Args:
        name: what the files' names begin with.
        parse: reads one, from its text and its file name.

    Returns:
        Card → table.
    """
    paths = sorted(_DIRECTORY.glob(f"{name}-*.json"))
    tables = [parse(path.read_text(encoding="utf-8"), path.name) for path in paths]
    return {table.gpu: table for table in tables}


def with_measured_here(
    tables: Mapping[str, TableT],
    name: str,
    parse: Callable[[str, str], TableT],
    merged: Callable[[TableT, TableT], TableT],
) -> dict[str, TableT]:
    """Put what was measured on this machine's card in front of what is shipped.

    Args:
        tables: of :func:`load_all`.
        name: of the table in :mod:`.measured_here`'s file.
        parse: reads one, from its text and its file name.
        merged: the rows of the shipped table, or of its twin, and this machine's → both, where this
            machine's count.

    Returns:
        Card → table.

    Raises:
        ValueError: the file is damaged; names it.
    """
    own: TableT | None = measured_here.frame(name, parse)
    if own is None:
        return dict(tables)
    shipped = of_card(tables, own.gpu)
    return {**tables, own.gpu: own if shipped is None else merged(shipped, own)}


def of_card(tables: Mapping[str, TableT], gpu: str | None) -> TableT | None:
    """Return a card's table, or that of the card in :data:`TWINS`.

    Args:
        tables: of :func:`load_all`.
        gpu: `torch.cuda.get_device_name` of the card, None outside CUDA.

    Returns:
        None where neither has one.
    """
    name = gpu or ""
    return tables.get(name) or tables.get(TWINS.get(name, ""))
