"""Tiles of the fused kernels: what is looked up, the rule, what a broken table is told."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from taut_kernels.launch import early_start
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tile_options import launch_options
from taut_kernels.rowwise.tiles import FusedTile

SMALL = {"rows": 1, "block": 1024, "num_warps": 4, "pdl": False}
LARGE = {"rows": 2, "block": 2048, "num_warps": 8, "pdl": True}


def _row(max_m: int | None, tile: dict[str, Any], op: str = "rms_norm") -> dict[str, Any]:
    return {"op": op, "N": 4096, "max_m": max_m, "tile": tile, "us": [1.0]}


def _table(*rows: dict[str, Any]) -> str:
    return json.dumps({"gpu": "card", "source": "test", "rows": rows})


def test_limits_are_inclusive_and_the_last_row_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tiles_fused.parse(_table(_row(16, SMALL), _row(None, LARGE)), "t.json")
    monkeypatch.setattr(tiles_fused, "tables", lambda: {"card": table})
    tiles_fused.lookup.cache_clear()
    found = [tiles_fused.lookup("card", "rms_norm", 4096, M) for M in (1, 16, 17, 10**6)]
    tiles_fused.lookup.cache_clear()
    assert found == [FusedTile(**SMALL)] * 2 + [FusedTile(**LARGE)] * 2


def test_beyond_a_bounded_table_and_on_other_cards_the_rule_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = SMALL | {"num_warps": 32}
    table = tiles_fused.parse(_table(_row(16, odd)), "t.json")
    monkeypatch.setattr(tiles_fused, "tables", lambda: {"card": table})
    tiles_fused.lookup.cache_clear()
    cases = [("card", 4096, 17), ("card", 8192, 1), ("other", 4096, 1), (None, 4096, 1)]
    found = [tiles_fused.lookup(gpu, "rms_norm", N, M) for gpu, N, M in cases]
    tiles_fused.lookup.cache_clear()
    assert found == [tiles_fused.rule("rms_norm", N, M) for _, N, M in cases]


@pytest.mark.parametrize("op", tiles_fused.OPS)
@pytest.mark.parametrize("gpu", [None, "NVIDIA H200"])
def test_few_rows_start_early_on_hopper_only(gpu: str | None, op: str) -> None:
    for N in (40, 4096, 14336):
        for M in (1, 64, 65, 256, 4096):
            alone = tiles_fused.lookup(gpu, op, N, M)
            early = tiles_fused.lookup(gpu, op, N, M, True)
            assert alone.pdl is False
            assert early.pdl is (M <= early_start.EARLY_TOKENS == 64)
            assert dataclasses.replace(early, pdl=False) == alone


@pytest.mark.parametrize("most", [0, 1, 100, 256, 300])
def test_every_tile_has_the_forms_of_every_number_of_rows(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_start, "EARLY_TOKENS", most)
    tiles_fused.lookup.cache_clear()
    for gpu in (None, "NVIDIA H200"):
        for op in tiles_fused.OPS:
            for N in (40, 128, 4096, 14336):
                listed = tiles_fused.every_tile(gpu, op, N, True)
                assert {tile.pdl for tile in listed} == ({False, True} if most else {False})
                used = {tiles_fused.lookup(gpu, op, N, M, True) for M in range(1, 1100)}
                assert used <= set(listed)
                assert not any(tile.pdl for tile in tiles_fused.every_tile(gpu, op, N))
    tiles_fused.lookup.cache_clear()


@pytest.mark.parametrize("op", tiles_fused.OPS)
def test_rule_keeps_rows_within_the_registers(op: str) -> None:
    for N in (1, 2, 40, 128, 1000, 4096, 5120, 14336, 28672, 32768, 32769, 262144):
        for M in (1, 3, 64, 264, 265, 4096, 10**6):
            tile = tiles_fused.rule(op, N, M)
            assert tile.pdl is False
            if op in ("rope", "silu_mul"):
                continue
            held = tile.rows * -(-N // tile.block) * tile.block // (32 * tile.num_warps)
            assert held <= 64 or N > tiles_fused.RESIDENT_LIMIT
            assert tile.rows == 1 or N <= 1024
            if tile.num_warps == 32:  # 64 registers a thread
                assert held <= 32


def test_few_long_rows_are_quantised_by_32_warps() -> None:
    for N, warps in ((4096, 8), (16384, 16), (16385, 32), (28672, 32), (32769, 8)):
        assert tiles_fused.rule("row_quant", N, 1).num_warps == warps
        assert tiles_fused.rule("row_quant", N, 264).num_warps == warps
        assert tiles_fused.rule("row_quant", N, 265).num_warps <= 16


def test_shipped_tables_have_a_tile_for_any_number_of_rows() -> None:
    tables = tiles_fused.tables()
    assert "NVIDIA H200" in tables
    for table in tables.values():
        assert all(rows[-1][0] is None for rows in table.choices.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rows": []}', "t.json: expected exactly gpu, source and rows"),
        (_table(_row(16, SMALL, op="norm")), "t.json: op=norm N=4096 max_m=16: op must be one of"),
        (_table({"op": "rms_norm", "N": 1}), "t.json: a row needs exactly"),
        (_table(_row(16, SMALL), _row(16, LARGE)), "N=4096 max_m=16: max_m must rise"),
        (
            _table(_row(None, SMALL), _row(16, LARGE)),
            "N=4096 max_m=16: max_m must rise",
        ),
        (_table(_row(16, SMALL | {"rows": 3})), "rows must be a power of two, got 3"),
        (_table(_row(16, SMALL | {"block": 0})), "block must be a power of two, got 0"),
        (_table(_row(16, SMALL | {"num_warps": 3})), "num_warps must be 1, 2, 4, 8, 16 or 32"),
        (_table(_row(16, SMALL | {"registers": 20})), "registers must be 0 or lie in 32..255"),
    ],
)
def test_broken_tables_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiles_fused.parse(text, "t.json")


def test_a_register_cap_may_be_left_out_and_is_part_of_the_name() -> None:
    assert dataclasses.asdict(FusedTile(**SMALL)) == SMALL | {"registers": 0}
    capped = FusedTile(**SMALL | {"registers": 64})
    assert str(capped) == "1x1024/4w/r64"
    assert launch_options(capped)["maxnreg"] == 64
    assert "maxnreg" not in launch_options(FusedTile(**SMALL))
    assert launch_options(FusedTile(**LARGE))["launch_pdl"] is True
