"""Which tile a kernel runs with, looked up by (op, GPU, number of tokens) at call time.

The tables are JSON files, ``tiles/<op>.json``::

    {"default": [bucket, ...], "gpus": {"<torch.cuda.get_device_name>": [bucket, ...]}}

A bucket holds ``max_m`` (inclusive; null in the last one: no limit), a ``tile`` with exactly the
fields of :class:`TileConfig`, and ``source``: the command, card and date that measured it, or why
it was chosen. Nothing tunes in a serving process: a card without a table takes ``default``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

_DIRECTORY = Path(__file__).with_name("tiles")
_BUCKET_FIELDS = {"max_m", "tile", "source"}


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one launch is cut up.

    Args:
        block_m: tokens per program, a power of two ≥ 16 (the smallest `tl.dot` tile).
        block_n: output features per program, a power of two ≥ 16.
        num_warps: warps per program, 1, 2, 4, 8 or 16.
        num_stages: depth of the software pipeline over K, ≥ 1.

    Raises:
        ValueError: a field is out of its range.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for field in ("block_m", "block_n"):
            value = getattr(self, field)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{field} must be a power of two of at least 16, got {value}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {self.num_stages}")


@dataclass(frozen=True, slots=True)
class Bucket:
    """One row of a table: the tile for up to ``max_m`` tokens (None: any number)."""

    max_m: int | None
    tile: TileConfig


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one op: a default and one list of buckets per measured GPU."""

    default: tuple[Bucket, ...]
    gpus: dict[str, tuple[Bucket, ...]]

    def buckets(self, gpu: str | None) -> tuple[Bucket, ...]:
        """Return the buckets of ``gpu``, or the default ones for a card nobody measured."""
        return self.default if gpu is None else self.gpus.get(gpu, self.default)

    def every_tile(self) -> tuple[TileConfig, ...]:
        """Return each distinct tile of the table, in the order written."""
        lists = (self.default, *self.gpus.values())
        return tuple(dict.fromkeys(bucket.tile for buckets in lists for bucket in buckets))


def _parse_buckets(rows: list[dict[str, Any]], where: str) -> tuple[Bucket, ...]:
    buckets = []
    for row in rows:
        if set(row) != _BUCKET_FIELDS:
            fields = sorted(_BUCKET_FIELDS)
            raise ValueError(f"{where}: a bucket needs exactly {fields}, got {sorted(row)}")
        buckets.append(Bucket(row["max_m"], TileConfig(**row["tile"])))
    limits = [bucket.max_m for bucket in buckets]
    bounded = [limit for limit in limits[:-1] if limit is not None]
    if not limits or limits[-1] is not None or len(bounded) != len(limits) - 1:
        raise ValueError(f"{where}: only the last bucket has max_m null")
    if sorted(set(bounded)) != bounded:
        raise ValueError(f"{where}: max_m must rise from bucket to bucket")
    return tuple(buckets)


def parse(text: str, where: str) -> TileTable:
    """Read a table.

    Args:
        text: JSON in the form of the module's docstring.
        where: file name, for errors.

    Returns:
        The table.

    Raises:
        ValueError: an unknown key, a missing field, or buckets out of order; names ``where``.
    """
    data = json.loads(text)
    if set(data) != {"default", "gpus"}:
        raise ValueError(f"{where}: expected exactly the keys default and gpus, got {sorted(data)}")
    gpus = {gpu: _parse_buckets(rows, f"{where}: {gpu}") for gpu, rows in data["gpus"].items()}
    return TileTable(_parse_buckets(data["default"], f"{where}: default"), gpus)


@cache
def load(op: str) -> TileTable:
    """Load the table of ``op`` (for example ``"w4a16_gemm"``), once a process."""
    path = _DIRECTORY / f"{op}.json"
    return parse(path.read_text(encoding="utf-8"), path.name)


@lru_cache(maxsize=4096)
def lookup(op: str, gpu: str | None, M: int) -> TileConfig:
    """Choose the tile for one call.

    Args:
        op: table name.
        gpu: card name, None outside CUDA.
        M: number of tokens, ≥ 1.

    Returns:
        The tile of the first bucket that holds ``M``.
    """
    for bucket in load(op).buckets(gpu):
        if bucket.max_m is None or bucket.max_m >= M:
            return bucket.tile
    raise AssertionError("unreachable: parse() demands an unbounded last bucket")


def bucket_sizes(op: str, gpu: str | None) -> tuple[int, ...]:
    """Return one M for each bucket, for compiling every tile before serving starts."""
    sizes = []
    previous = 0
    for bucket in load(op).buckets(gpu):
        sizes.append(previous + 1 if bucket.max_m is None else bucket.max_m)
        previous = sizes[-1]
    return tuple(sizes)
