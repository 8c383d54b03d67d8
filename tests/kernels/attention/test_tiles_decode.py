"""Tile tables of the decode kernel: parsing, look-up, the rule for shapes nobody measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.launch.tile_tables import Table

TILE = {
    "row_warps": 2,
    "k_warps": 2,
    "split_k": 1,
    "depth": 4,
    "x_depth": 2,
    "batch": 2,
    "fence": False,
    "registers": 0,
}


def table(**row: Any) -> str:
    rows = [{"N": 64, "K": 128, "max_m": 8, "tile": TILE, "us": [1.0]} | row]
    return json.dumps({"gpu": "card", "source": "test", "rows": rows})


def test_parse_reads_a_tile() -> None:
    parsed = tiles_decode.parse(table(), "t.json")
    assert parsed.gpu == "card"
    assert parsed.choices == {(64, 128, DEFAULT): DecodeTile(2, 2, 1, 4, 2, 2, False)}
    assert parsed.choices[64, 128, DEFAULT].num_warps == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"gpu": "card", "rows": []}), "t.json: expected exactly gpu, source and rows"),
        (table(max_m=16), "max_m must be 8"),
        (table(note="?"), "needs exactly"),
        (table(format="g16"), "format=g16 N=64 K=128 max_m=8: format must be one of .* got 'g16'"),
        (table(format="g128"), "or left out, got 'g128'"),
        (table(tile=TILE | {"batch": 3}), "batch must divide"),
        (table(tile=TILE | {"k_warps": 3}), "k_warps must be a power of two"),
        (table(tile=TILE | {"k_warps": 16}), "at most 16"),
        (table(tile=TILE | {"depth": 9}), "depth must lie in 1..8"),
        (table(tile=TILE | {"registers": 16}), "registers must be 0 or lie in"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiles_decode.parse(text, "t.json")


def test_parse_refuses_a_shape_named_twice() -> None:
    document = json.loads(table())
    document["rows"] *= 2
    with pytest.raises(ValueError, match="N=64 K=128 max_m=8 is there twice"):
        tiles_decode.parse(json.dumps(document), "t.json")


def test_a_row_of_each_format_may_stand_beside_the_others() -> None:
    document = json.loads(table())
    document["rows"] += [document["rows"][0] | {"format": "g32-zp"}]
    parsed = tiles_decode.parse(json.dumps(document), "t.json")
    assert list(parsed.choices) == [(64, 128, DEFAULT), (64, 128, WeightFormat.G32_ZP)]
    document["rows"] += [document["rows"][1]]
    with pytest.raises(ValueError, match="format=g32-zp N=64 K=128 max_m=8 is there twice"):
        tiles_decode.parse(json.dumps(document), "t.json")


def test_lookup_takes_the_nearest_format(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = tiles_decode.lookup.__wrapped__
    tiles = {kind: DecodeTile(2, 2, n, 4, 2, 2, False) for n, kind in enumerate(WeightFormat, 1)}
    rows = {(64, 128, kind): tiles[kind] for kind in ("g128", "g32-zp", "g64")}
    choices: dict[tuple[int, int, WeightFormat], DecodeTile] = {}
    card = Table("card", choices)
    monkeypatch.setattr(tiles_decode, "tables", lambda: {"card": card})
    assert ask("card", 64, 128, WeightFormat.G32, hopper=False) == tiles_decode.rule(
        64, 128, hopper=False
    )
    choices.update({(*key[:2], WeightFormat(key[2])): tile for key, tile in rows.items()})
    found = {kind: ask("card", 64, 128, kind, hopper=False).split_k for kind in WeightFormat}
    own = {kind.value: tile.split_k for kind, tile in tiles.items()}
    assert {kind.value: split for kind, split in found.items()} == {
        "g128": own["g128"],
        "g128-zp": own["g128"],
        "g64": own["g64"],
        "g64-zp": own["g64"],
        "g32": own["g32-zp"],
        "g32-zp": own["g32-zp"],
    }


def test_lookup_prefers_the_measured_tile() -> None:
    card = tiles_decode.tables()["NVIDIA H200"]
    (N, K, own), measured = next(iter(card.choices.items()))
    assert tiles_decode.lookup("NVIDIA H200", N, K, own, hopper=True) == measured
    for hopper in (False, True):
        unknown = tiles_decode.lookup("another card", N, K, hopper=hopper)
        assert unknown == tiles_decode.rule(N, K, hopper=hopper)


@pytest.mark.parametrize(("N", "K", "k_warps"), [(65536, 4096, 1), (4096, 4096, 8), (64, 64, 1)])
def test_rule_adds_warps_along_k_until_the_card_is_full(N: int, K: int, k_warps: int) -> None:
    assert tiles_decode.rule(N, K, hopper=False).k_warps == k_warps


@pytest.mark.parametrize("N", [16, 80, 1280, 3584, 4112, 10240, 37888, 151936])
@pytest.mark.parametrize("K", [64, 320, 512, 1088, 3584, 5120, 18944, 28672])
def test_rule_on_hopper_gives_every_warp_some_of_k(N: int, K: int) -> None:
    tile = tiles_decode.rule(N, K, hopper=True)
    units = -(-K // tiles_decode.UNIT)
    assert tile.k_warps * tile.split_k <= units
    looped = -(-units // (tile.k_warps * tile.split_k)) >= 3
    if looped:
        assert tile.registers == 0, "a cap spills where there is a loop"
    programs = -(-N // tile.rows) * tile.split_k
    if tile.registers:  # four schedulers of 512 registers a lane
        resident = 4 * (512 // tile.registers) // tile.num_warps
        assert -(-programs // 132) <= resident, "a cap is there to give every program a place"


@pytest.mark.parametrize(
    ("N", "K"), [(3584, 3584), (4608, 3584), (5120, 5120), (1280, 8192), (8192, 3584)]
)
def test_rule_on_hopper_splits_k_of_small_layers(N: int, K: int) -> None:
    tile = tiles_decode.rule(N, K, hopper=True)
    # At 700 warps and fewer such layers took up to twice as long (README, "Other models").
    assert 1200 <= -(-N // tile.rows) * tile.split_k * tile.num_warps <= 3700
