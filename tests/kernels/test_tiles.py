"""Tile tables: what is looked up, and what a broken table is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from taut_kernels import tiles

SMALL = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3}
LARGE = {"block_m": 64, "block_n": 128, "num_warps": 8, "num_stages": 2}


def _bucket(max_m: int | None, tile: dict[str, int]) -> dict[str, Any]:
    return {"max_m": max_m, "tile": tile, "source": "test"}


def _table(**gpus: list[dict[str, Any]]) -> str:
    return json.dumps({"default": [_bucket(16, SMALL), _bucket(None, LARGE)], "gpus": gpus})


def test_bucket_limits_are_inclusive() -> None:
    first, last = (tiles.lookup("w4a16_gemm", None, M) for M in (1, 10**6))
    limit = tiles.load("w4a16_gemm").default[0].max_m
    assert limit is not None
    assert tiles.lookup("w4a16_gemm", None, limit) == first
    assert tiles.lookup("w4a16_gemm", None, limit + 1) != first
    assert first.block_m < last.block_m


def test_a_card_nobody_measured_takes_the_default() -> None:
    table = tiles.parse(_table(H100=[_bucket(None, LARGE)]), "t.json")
    assert table.buckets("H100")[0].tile == tiles.TileConfig(**LARGE)
    assert table.buckets("A10") == table.buckets(None) == table.default


def test_every_tile_lists_each_once() -> None:
    table = tiles.parse(_table(H100=[_bucket(None, LARGE)]), "t.json")
    assert table.every_tile() == (tiles.TileConfig(**SMALL), tiles.TileConfig(**LARGE))


def test_bucket_sizes_reach_every_bucket() -> None:
    sizes = tiles.bucket_sizes("w4a16_gemm", None)
    reached = [tiles.lookup("w4a16_gemm", None, M) for M in sizes]
    assert reached == [bucket.tile for bucket in tiles.load("w4a16_gemm").default]


@pytest.mark.parametrize(
    "path",
    sorted(Path(tiles.__file__).with_name("tiles").glob("*_gemm.json")),
    ids=lambda p: p.name,
)
def test_shipped_tables_parse(path: Path) -> None:
    assert tiles.load(path.stem).every_tile()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"default": []}', "expected exactly the keys default and gpus"),
        ('{"default": [], "gpus": {}}', "only the last bucket"),
        (json.dumps({"default": [_bucket(16, SMALL)], "gpus": {}}), "only the last bucket"),
        (_table(A=[_bucket(None, SMALL), _bucket(None, SMALL)]), "t.json: A: only the last"),
        (_table(A=[_bucket(64, SMALL), _bucket(8, SMALL), _bucket(None, SMALL)]), "must rise"),
        (_table(A=[{"max_m": None, "tile": SMALL}]), "needs exactly"),
        (_table(A=[_bucket(None, SMALL | {"block_n": 48})]), "power of two"),
        (_table(A=[_bucket(None, SMALL | {"block_m": 8})]), "at least 16"),
        (_table(A=[_bucket(None, SMALL | {"num_warps": 3})]), "num_warps"),
        (_table(A=[_bucket(None, SMALL | {"num_stages": 0})]), "num_stages"),
    ],
)
def test_broken_tables_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiles.parse(text, "t.json")
