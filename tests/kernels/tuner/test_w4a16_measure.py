"""What is timed of a product, what is believed, and what a table gets of it; no card, no clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_kernels.gemm.w4a16 import decode_tile, dispatch, lookup, rule, verdict
from taut_kernels.gemm.w4a16.op import w4a16_gemm_ref
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import launcher
from taut_kernels.tuner import timing, w4a16_stock
from taut_kernels.tuner.w4a16_candidates import Product, Tried, candidates
from taut_kernels.tuner.w4a16_compile import jobs_of
from taut_kernels.tuner.w4a16_layer import Layer, make_layer
from taut_kernels.tuner.w4a16_measure import Figures, measure
from tuning import cover_products, measured_table

CPU = torch.device("cpu")
PRODUCT = Product(64, 256, WeightFormat.G128)
TILES = decode_tile.ranked(4096, 4096)[:3]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with `wgmma` that no table is of."""
    monkeypatch.setattr(launcher, "is_hopper", lambda device: True)
    monkeypatch.setattr(launcher, "gpu_name", lambda device: "a card of its own")


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    """A small layer, and the specification in place of every tile's kernel."""
    monkeypatch.setattr(dispatch, "launch", lambda tile, x, *given: w4a16_gemm_ref(x, *given))
    return make_layer(64, 256, 128, 64, torch.bfloat16, device="cpu")


def _clock(times: dict[str, float]) -> Any:
    """Return a clock that knows the times by what a subject's name holds."""

    def clock(subjects: Sequence[timing.Subject], M: int) -> list[float]:
        return [next(us for key, us in times.items() if key in s.name) for s in subjects]

    return clock


def _stock(*names: str) -> dict[str, w4a16_stock.Prepare]:
    return dict.fromkeys(names, w4a16_stock.taut)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("M", [1, 16, 64, 256, 1024, 4096])
def test_what_runs_now_is_tried_first_and_each_tile_once(M: int) -> None:
    product = Product(3072, 8192, WeightFormat.G128)
    tried = candidates(product, M, 3, CPU)
    alone = candidates(product, M, 0, CPU)
    assert alone == tried[:1]
    assert len(tried) == len(set(tried))
    if M == 1:
        assert tried[0] == decode_tile.rule(3072, 8192, hopper=True)
        assert len(tried) == 3
    else:
        bucket = lookup.bucket_of(M)
        assert tried[0] == lookup.rule(3072, 8192, bucket, hopper=True)
    assert ("dense" in tried) == (M >= 512)
    assert "decode" not in tried, "it won nowhere for more than 8 tokens"


@pytest.mark.usefixtures("hopper")
def test_the_model_ranks_and_the_rule_takes_the_first() -> None:
    for N, K in ((3072, 8192), (2560, 2432), (896, 4864)):
        for tokens in (16, 64, 256, 1024):
            assert rule.ranked(N, K, tokens)[0] == rule.rule(N, K, tokens)
        assert decode_tile.ranked(N, K)[0] == decode_tile.rule(N, K, hopper=True)


@pytest.mark.usefixtures("hopper")
def test_products_of_one_depth_share_what_is_compiled() -> None:
    wide, narrow = (Product(N, 4096, WeightFormat.G128) for N in (8192, 4096))
    tile = TILES[0]
    keys = {job.key for p in (wide, narrow) for job in jobs_of(p, 1, [tile], CPU)}
    assert len(keys) == 1
    other = Product(4096, 4096, WeightFormat.G32_ZP)
    assert {job.key for job in jobs_of(other, 1, [tile], CPU)}.isdisjoint(keys)
    assert not jobs_of(wide, 1024, ["dense"], CPU)


@pytest.mark.parametrize(
    ("times", "taken", "us"),
    [
        ((10.0, 9.0, 8.0), 2, 8.0),
        ((10.0, 9.9, 9.85), None, 10.0),  # within what two runs of one tile differ by
        ((10.0, 11.0, 12.0), None, 10.0),
    ],
)
def test_another_tile_is_taken_where_it_is_faster_than_two_runs_differ(
    layer: Layer, times: tuple[float, ...], taken: int | None, us: float
) -> None:
    known = {repr(tile): time for tile, time in zip(TILES, times, strict=True)}
    found = measure(layer, PRODUCT, {1: TILES}, _stock("Machete"), _clock(known | {"Mach": 16.0}))
    assert found.us == {"Machete": {1: 16.0}, "taut": {1: us}}
    assert found.tiles == ({} if taken is None else {1: (TILES[taken], us)})
    rows = found.tile_rows(8)
    assert len(rows) == len(found.tiles)
    text = json.dumps({"gpu": "card", "source": "s", "rows": rows})
    parsed = decode_tile.parse(text, "t.json").choices
    assert parsed == ({} if taken is None else {(64, 256, WeightFormat.G128): TILES[taken]})


def test_what_is_wrong_or_missing_is_noted_and_never_timed(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(tile: Tried, x: torch.Tensor, *given: Any) -> torch.Tensor:
        if tile == TILES[1]:
            raise RuntimeError("out of resources\nand so on")
        y = w4a16_gemm_ref(x, *given)
        return y + 1 if tile == TILES[0] else y

    def absent(layer: Layer) -> w4a16_stock.Prepared:
        raise w4a16_stock.UnavailableError("vLLM: not here")

    def wrong(layer: Layer) -> w4a16_stock.Prepared:
        return w4a16_stock.Prepared((), lambda x, own: torch.zeros(len(x), layer.N))

    monkeypatch.setattr(dispatch, "launch", launch)
    stock = {"Machete": absent, "Marlin": wrong} | _stock("Humming")
    found = measure(layer, PRODUCT, {1: TILES}, stock, _clock({"Humm": 4.0, "taut": 2.0}))
    assert found.us == {"Humming": {1: 4.0}, "taut": {1: 2.0}}
    assert found.tiles == {1: (TILES[2], 2.0)}
    assert found.notes[0] == "Machete: vLLM: not here"
    assert found.notes[1].startswith("Marlin: WRONG, not timed: error ")
    assert found.notes[2].startswith(f"taut {TILES[0]!r} at 1: WRONG, not timed: ")
    assert found.notes[3] == f"taut {TILES[1]!r} at 1: not run: out of resources"


def test_a_row_has_the_faster_of_vllms_and_is_judged_by_the_verdicts_rule(layer: Layer) -> None:
    figures = Figures(PRODUCT)
    figures.us = {
        "taut": {1: 5.0, 64: 8.0, 1024: 100.0},
        "Machete": {1: 12.0, 64: 8.0, 1024: 90.0},
        "Marlin": {1: 10.0, 64: 16.0},
    }
    row = figures.row()
    assert row == {
        "N": 64,
        "K": 256,
        "M": [1, 64, 1024],
        "us": [5.0, 8.0, 100.0],
        "vllm_us": [10.0, 8.0, 90.0],
    }
    text = json.dumps({"gpu": "card", "source": "s", "rows": [row]})
    measured = verdict.parse(text, "t.json").choices[64, 256, WeightFormat.G128]
    # decode √(2 · 1), prefill 0.9: overall √(1.414 · 0.9) = 1.128
    assert measured.overall == pytest.approx(1.128, abs=1e-3)
    assert Figures(PRODUCT, {"taut": {1: 5.0}, "Marlin": {16: 5.0}}).row() is None


# --- covering all models -------------------------------------------------------------------------


def _line(us: dict[str, dict[int, float]], kernels: Sequence[str]) -> str:
    return json.dumps(cover_products.as_line(Figures(PRODUCT, us), 3, kernels)) + "\n"


def test_products_come_in_the_order_of_their_models_and_once(tmp_path: Path) -> None:
    listed = cover_products.wanted(WeightFormat.G128, ["Machete"], [])
    counts = [count for _, count in listed]
    assert counts == sorted(counts, reverse=True)
    first = listed[0][0]
    path = tmp_path / "products.jsonl"
    figures = Figures(first, {"taut": {1: 1.0}, "Machete": {1: 2.0}})
    path.write_text(json.dumps(cover_products.as_line(figures, 9, ["Machete", "Marlin"])) + "\n")
    seen = cover_products.read(path)
    rest = cover_products.wanted(WeightFormat.G128, ["Machete"], seen)
    assert [product for product, _ in rest] == [product for product, _ in listed[1:]]
    # A kernel that was not timed, or another format, is still to come.
    assert cover_products.wanted(WeightFormat.G128, ["Humming"], seen) == listed
    assert len(cover_products.wanted(WeightFormat.G32, ["Machete"], seen)) >= len(listed)


def test_a_damaged_file_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "products.jsonl"
    assert cover_products.read(path) == []
    path.write_text('{"environment": {}}\n{"N": 1}\n')
    with pytest.raises(ValueError, match=r"products\.jsonl:2: no product's figures"):
        cover_products.read(path)


def test_a_table_of_verdicts_is_made_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "products.jsonl"
    first = {"taut": {1: 5.0, 256: 50.0}, "Machete": {1: 10.0, 256: 40.0}}
    # Timed again beside another kernel, on a card that ran at half the speed.
    second = {"taut": {1: 10.0, 256: 100.0}, "Humming": {1: 18.0, 256: 90.0}}
    path.write_text(_line(first, ["Machete"]) + _line(second, ["Humming"]))
    cells = measured_table.read([path])
    table = json.loads(measured_table.table(cells, "card", "s"))
    assert table["rows"] == [
        {"N": 64, "K": 256, "M": [1, 256], "us": [5.0, 50.0], "vllm_us": [9.0, 40.0]}
    ]
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file"):
        measured_table.read([tmp_path / "none.jsonl"])


def test_a_tables_rows_stay_and_the_lines_add_what_it_lacks(tmp_path: Path) -> None:
    old = {"N": 64, "K": 256, "M": [1, 4, 256], "us": [1.0] * 3, "vllm_us": [2.0] * 3}
    kept = tmp_path / "old.json"
    kept.write_text(json.dumps({"gpu": "card", "source": "before", "rows": [old]}))
    lines = tmp_path / "products.jsonl"
    other = Figures(Product(128, 256, WeightFormat.G32), {"taut": {1: 1.0, 256: 1.0}})
    other.us["Marlin"] = {1: 3.0, 256: 3.0}
    us = {"taut": {1: 5.0, 256: 5.0}, "Marlin": {1: 1.0, 256: 1.0}}
    text = _line(us, ["Marlin"]) + json.dumps(cover_products.as_line(other, 1, ["Marlin"]))
    lines.write_text(text + "\n")
    output = tmp_path / "new.json"
    words = [str(lines), "--source", "now", "--output", str(output), "--keep", str(kept)]
    assert measured_table.main([*words, "--gpu", "another"]) == 2
    assert not output.exists()
    assert measured_table.main([*words, "--gpu", "card"]) == 0
    made = json.loads(output.read_text())
    assert made["source"] == "before; now"
    assert made["rows"][0] == old
    assert [(row["N"], row.get("format")) for row in made["rows"]] == [(64, None), (128, "g32")]
