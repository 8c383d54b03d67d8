"""Tuned tiles in a card's file: what they replace, what stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.launch import tile_tables
from tuning import merge_tiles

W4A16, EIGHT_BITS = "w4a16_wgmma", "scaled_mm"
CARDS = ("h200.json", "h100.json")


def _row(**change: Any) -> dict[str, Any]:
    row = {"N": 64, "K": 128, "max_m": 16, "kernel": "decode", "tile": None, "us": 1.0}
    return row | change


def _card(name: str, *rows: dict[str, Any], gpu: str = "card") -> str:
    return json.dumps({"gpu": gpu, "tables": {name: {"sources": ["s"], "rows": list(rows)}}})


def _tuned(*rows: dict[str, Any], source: str = "s", gpu: str = "card") -> str:
    return json.dumps({"gpu": gpu, "source": source, "rows": list(rows)})


def _merged(shipped: str, *tuned: str, name: str = W4A16) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(merge_tiles.merged(shipped, name, tuned))
    return found


def test_a_row_replaces_the_one_of_its_place_and_format() -> None:
    shipped = _card(W4A16, _row(), _row(max_m=None, kernel="dense"))
    small = {"format": "g32-zp"}
    first = _tuned(_row(us=3.0) | small, _row(max_m=32, kernel="dense"), source="one")
    card = _merged(shipped, first, _tuned(_row(us=2.0) | small, source="two"))
    table = card["tables"][W4A16]
    assert [(row["max_m"], row.get("format"), row["us"]) for row in table["rows"]] == [
        (16, None, 1.0),
        (None, None, 1.0),
        (16, "g32-zp", 2.0),
        (32, None, 1.0),
    ]
    assert table["sources"] == ["s", "one", "two"]
    again = _merged(json.dumps(card), first)["tables"][W4A16]
    assert again["sources"] == table["sources"]
    assert [row["us"] for row in again["rows"]] == [1.0, 1.0, 3.0, 1.0]


def test_rows_of_a_card_that_takes_the_table_s_tiles_are_its_own() -> None:
    h100, h200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    card = _merged(_card(W4A16, gpu=h200), _tuned(_row(), source="tuned there", gpu=h100))
    table = card["tables"][W4A16]
    assert (card["gpu"], len(table["rows"])) == (h200, 1)
    assert table["sources"] == ["s", "tuned there"]
    with pytest.raises(ValueError, match=f"tiles of {h200} are none of {h100}"):
        _merged(_card(W4A16, gpu=h100), _tuned(_row(), gpu=h200))


def test_tables_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="tiles of other are none of card"):
        _merged(_card(W4A16), _tuned(gpu="other"))
    with pytest.raises(ValueError, match=r"a tuned table: .* format must be one of"):
        _merged(_card(W4A16), _tuned(_row(format="g16")))
    with pytest.raises(ValueError, match="no table 'w4a16'"):
        _merged(_card(W4A16), _tuned(_row()), name="w4a16")


@pytest.mark.parametrize("card", CARDS)
def test_every_shipped_table_stays_as_it_is_written(card: str, tmp_path: Path) -> None:
    before = (tile_tables._DIRECTORY / card).read_text(encoding="utf-8")
    shipped, tuned = tmp_path / card, tmp_path / "tuned.json"
    shipped.write_text(before, encoding="utf-8")
    names = list(json.loads(before)["tables"])
    assert set(names) <= set(merge_tiles.FAMILIES)
    for name in names:
        tuned.write_text(merge_tiles.alone(before, name, card), encoding="utf-8")
        assert merge_tiles.main([str(shipped), name, str(tuned)]) == 0
    assert shipped.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("name", [W4A16, "w4a16_decode", EIGHT_BITS])
def test_one_row_more_is_one_line_more(name: str, tmp_path: Path) -> None:
    before = (tile_tables._DIRECTORY / CARDS[0]).read_text(encoding="utf-8")
    gpu, tables = tile_tables.card_file(before, CARDS[0])
    row = tables[name]["rows"][0] | {"N": 16} | ({"max_m": None} if name == EIGHT_BITS else {})
    after = merge_tiles.merged(before, name, [_tuned(row, source="new", gpu=gpu)])
    lines = set(after.splitlines()) - set(before.splitlines())
    assert {f"   {json.dumps(row)}", '   "new"'} <= {line.removesuffix(",") for line in lines}
    assert len(after.splitlines()) == len(before.splitlines()) + 2


def test_an_eight_bit_products_buckets_give_way_from_the_first_tuned_one_on() -> None:
    tile = {"num_warps": 4, "num_stages": 3, "block_m": 64, "block_n": 64, "block_k": 128}

    def bucket(max_m: int | None, us: float, N: int = 256) -> dict[str, Any]:
        figures = {"M": [max_m or 4096], "us": [us], "vllm_us": [2.0], "rival_us": [2.0]}
        named = {"op": "fp8_gemm", "N": N, "K": 128, "max_m": max_m}
        return named | {"kernel": "ring", "tile": tile} | figures

    shipped = [bucket(limit, 1.0, N) for N in (256, 512) for limit in (16, 64, 256, None)]
    tuned = [bucket(limit, 3.0) for limit in (64, 512, None)] + [bucket(None, 3.0, 1024)]
    card = _merged(_card(EIGHT_BITS, *shipped), _tuned(*tuned, source="new"), name=EIGHT_BITS)
    rows = card["tables"][EIGHT_BITS]["rows"]
    assert [(row["N"], row["max_m"], row["us"][0]) for row in rows] == [
        (256, 16, 1.0),
        *((256, limit, 3.0) for limit in (64, 512, None)),
        *((512, limit, 1.0) for limit in (16, 64, 256, None)),
        (1024, None, 3.0),
    ]


def test_any_other_table_is_replaced_whole() -> None:
    row = {"op": "divergence", "V": 64, "us": 1.0}
    row["tile"] = {"block": 64, "num_warps": 4, "stages": 1}
    card = _merged(_card("loss", row), _tuned(row | {"V": 128}, source="new"), name="loss")
    assert card["tables"]["loss"] == {"sources": ["new"], "rows": [row | {"V": 128}]}


def test_a_merged_format_is_what_a_layer_of_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    name, gpu = tiles_decode.TABLE, "NVIDIA H200"
    before = [row for row in tile_tables.shipped_rows(name, gpu) if "format" not in row]
    row = before[0]
    tile = row["tile"] | {"depth": 4, "x_depth": 4, "batch": 4}
    new = _tuned(row | {"format": "g32-zp", "tile": tile}, source="new", gpu=gpu)
    text = merge_tiles.merged(_card(name, *before, gpu=gpu), name, [new])
    table = tiles_decode.parse(merge_tiles.alone(text, name, "t.json"), "t.json")
    monkeypatch.setattr(tiles_decode, "tables", lambda: {table.gpu: table})
    shape = (row["N"], row["K"])
    ask = tiles_decode.lookup.__wrapped__
    found = {kind: ask(table.gpu, *shape, kind, hopper=True) for kind in WeightFormat}
    assert found[WeightFormat.G32_ZP] == found[WeightFormat.G32] == DecodeTile(**tile)
    assert found[DEFAULT] == found[WeightFormat.G64_ZP] == DecodeTile(**row["tile"])


def test_a_wrong_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "card.json"
    other.write_text("{}")
    assert merge_tiles.main([str(other), "loss", str(other)]) == 2
    assert "the shipped file: expected exactly gpu and tables" in capsys.readouterr().err
    other.write_text(_card(W4A16))
    assert merge_tiles.main([str(other), W4A16, str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert other.read_text() == _card(W4A16)
