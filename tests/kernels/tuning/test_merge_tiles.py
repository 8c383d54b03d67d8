"""Tuned W4A16 tiles in a shipped table: what they replace, what stays as it was."""

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

NAMES = ("w4a16_decode-h200.json", "w4a16_wgmma-nvidia-h200.json")
EIGHT_BITS = "scaled_mm-h200.json"
W4A16 = merge_tiles.FAMILIES["w4a16_wgmma"]


def _row(**change: Any) -> dict[str, Any]:
    return {"N": 64, "K": 128, "max_m": 16, "tile": "decode", "us": 1.0} | change


def _table(*rows: dict[str, Any], source: str = "s", gpu: str = "card") -> str:
    return json.dumps({"gpu": gpu, "source": source, "rows": list(rows)})


def _merged(*texts: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(merge_tiles.merged(texts[0], texts[1:], W4A16))
    return found


def test_a_row_replaces_the_one_of_its_place_and_format() -> None:
    shipped = _table(_row(), _row(max_m=None, tile="dense"))
    small = {"format": "g32-zp"}
    first = _table(_row(us=3.0) | small, _row(max_m=32, tile="dense"), source="one")
    table = _merged(shipped, first, _table(_row(us=2.0) | small, source="two"))
    assert [(row["max_m"], row.get("format"), row["us"]) for row in table["rows"]] == [
        (16, None, 1.0),
        (None, None, 1.0),
        (16, "g32-zp", 2.0),
        (32, None, 1.0),
    ]
    assert table["source"] == "s; one; two"
    again = _merged(json.dumps(table), first)
    assert again["source"] == table["source"]
    assert [row["us"] for row in again["rows"]] == [1.0, 1.0, 3.0, 1.0]


def test_rows_of_a_card_that_takes_the_table_s_tiles_are_its_own() -> None:
    h100, h200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    table = _merged(_table(gpu=h200), _table(_row(), source="tuned there", gpu=h100))
    assert (table["gpu"], len(table["rows"])) == (h200, 1)
    assert table["source"].endswith("; tuned there")
    with pytest.raises(ValueError, match=f"tiles of {h200} are none of {h100}"):
        _merged(_table(gpu=h100), _table(_row(), gpu=h200))


def test_tables_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="tiles of other are none of card"):
        _merged(_table(), _table(gpu="other"))
    with pytest.raises(ValueError, match=r"a tuned table: .* format must be one of"):
        _merged(_table(), _table(_row(format="g16")))


@pytest.mark.parametrize("name", [*NAMES, EIGHT_BITS])
def test_a_shipped_table_stays_as_it_is_written(name: str, tmp_path: Path) -> None:
    before = (tile_tables._DIRECTORY / name).read_text(encoding="utf-8")
    shipped, tuned = tmp_path / name, tmp_path / "tuned.json"
    shipped.write_text(before, encoding="utf-8")
    table = json.loads(before)
    tuned.write_text(_table(source=table["source"], gpu=table["gpu"]), encoding="utf-8")
    assert merge_tiles.main([str(shipped), str(tuned)]) == 0
    assert shipped.read_text(encoding="utf-8") == before
    # One row more is that row and the comma in front of it.
    row = table["rows"][0] | {"N": 16} | ({"max_m": None} if name == EIGHT_BITS else {})
    tuned.write_text(_table(row, source=table["source"], gpu=table["gpu"]), encoding="utf-8")
    assert merge_tiles.main([str(shipped), str(tuned)]) == 0
    after = shipped.read_text(encoding="utf-8")
    assert after.startswith(before.removesuffix("\n ]\n}\n") + ",\n")


def test_an_eight_bit_products_buckets_give_way_from_the_first_tuned_one_on() -> None:
    tile = {"kernel": "ring", "num_warps": 4, "num_stages": 3}
    tile |= {"block_m": 64, "block_n": 64, "block_k": 128}

    def bucket(max_m: int | None, us: float, N: int = 256) -> dict[str, Any]:
        figures = {"M": [max_m or 4096], "us": [us], "vllm_us": [2.0], "rival_us": [2.0]}
        return {"op": "fp8_gemm", "N": N, "K": 128, "max_m": max_m, "tile": tile} | figures

    shipped = [bucket(limit, 1.0, N) for N in (256, 512) for limit in (16, 64, 256, None)]
    tuned = [bucket(limit, 3.0) for limit in (64, 512, None)] + [bucket(None, 3.0, 1024)]
    text = merge_tiles.merged(
        _table(*shipped), [_table(*tuned, source="new")], merge_tiles.FAMILIES["scaled_mm"]
    )
    rows = json.loads(text)["rows"]
    assert [(row["N"], row["max_m"], row["us"][0]) for row in rows] == [
        (256, 16, 1.0),
        *((256, limit, 3.0) for limit in (64, 512, None)),
        *((512, limit, 1.0) for limit in (16, 64, 256, None)),
        (1024, None, 3.0),
    ]


def test_a_merged_format_is_what_a_layer_of_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads((tile_tables._DIRECTORY / NAMES[0]).read_text(encoding="utf-8"))
    before["rows"] = [row for row in before["rows"] if "format" not in row]
    row = before["rows"][0]
    tile = row["tile"] | {"depth": 4, "x_depth": 4, "batch": 4}
    new = {"gpu": before["gpu"], "source": "new"}
    new["rows"] = [row | {"format": "g32-zp", "tile": tile}]
    text = merge_tiles.merged(
        json.dumps(before), [json.dumps(new)], merge_tiles.FAMILIES["w4a16_decode"]
    )
    table = tiles_decode.parse(text, "t.json")
    monkeypatch.setattr(tiles_decode, "tables", lambda: {table.gpu: table})
    shape = (row["N"], row["K"], row["max_m"] // 8)
    ask = tiles_decode.lookup.__wrapped__
    found = {kind: ask(table.gpu, *shape, kind, hopper=True) for kind in WeightFormat}
    assert found[WeightFormat.G32_ZP] == found[WeightFormat.G32] == DecodeTile(**tile)
    assert found[DEFAULT] == found[WeightFormat.G64_ZP] == DecodeTile(**row["tile"])


def test_a_wrong_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "fused-h200.json"
    other.write_text("{}")
    assert merge_tiles.main([str(other), str(other)]) == 2
    assert "no table of w4a16_decode or w4a16_wgmma" in capsys.readouterr().err
    shipped = tmp_path / NAMES[0]
    shipped.write_text(_table())
    assert merge_tiles.main([str(shipped), str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert shipped.read_text() == _table()
