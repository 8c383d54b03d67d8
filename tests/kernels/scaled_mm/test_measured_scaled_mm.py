"""Verdicts on 8-bit products on a card that takes another's tiles."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import verdict as measured_scaled_mm
from taut_kernels.launch import tile_tables
from tuning import measured_scaled_mm_table

RESULTS = Path(__file__).parents[1] / "runs"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
OF_BLOCKS = {
    H100: tuple(
        f"2026-11-26-h100-11h/scaled_mm_fp8-block-quantised{late}.csv" for late in ("-late", "")
    ),
    H200: ("2026-11-26-h200-07h/scaled_mm_fp8-block-quantised.csv",),
}
ROW: dict[str, Any] = {
    "op": "fp8_gemm",
    "N": 64,
    "K": 128,
    "M": [16, 64, 256],
    "us": [1.0, 1.0, 1.0],
    "vllm_us": [1.5, 0.9, 1.0],
}


def _text(*rows: dict[str, Any]) -> str:
    return json.dumps({"gpu": "card", "source": "a test", "rows": rows})


@pytest.mark.parametrize(
    ("first", "last", "ours"),
    [
        (1, 16, True),
        (1, 8, True),  # nothing inside or below: what is next above
        (17, 32, False),  # nothing inside: both neighbours, one of which lost
        (1, 32, True),  # what lies inside decides alone
        (17, 64, False),
        (65, 128, False),  # nothing inside, and the next below lost
        (65, 256, True),
        (256, None, True),
        (257, None, True),  # nothing inside or above: what is next below
        (64, None, False),
    ],
)
def test_a_range_wins_where_it_and_its_neighbours_won(
    monkeypatch: pytest.MonkeyPatch, first: int, last: int | None, ours: bool
) -> None:
    table = measured_scaled_mm.parse(_text(ROW), "t.json")
    monkeypatch.setattr(measured_scaled_mm, "tables", lambda: {"card": table})
    assert measured_scaled_mm.wins("card", "fp8_gemm", 64, 128, first, last) is ours
    assert not measured_scaled_mm.wins("card", "w8a8_gemm", 64, 128, first, last)
    assert not measured_scaled_mm.wins("other", "fp8_gemm", 64, 128, first, last)


def test_whole_layers_decide_where_they_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = {"M": [64, 128], "us": [9.0, 9.0], "vllm_us": [10.0, 8.0]}
    table = measured_scaled_mm.parse(_text(ROW | {"layer": layer}), "t.json")
    monkeypatch.setattr(measured_scaled_mm, "tables", lambda: {"card": table})

    def wins(first: int, last: int | None, *, in_layer: bool) -> bool:
        return measured_scaled_mm.wins("card", "fp8_gemm", 64, 128, first, last, in_layer=in_layer)

    assert not wins(33, 64, in_layer=False)  # alone it lost at 64
    assert wins(33, 64, in_layer=True)
    assert not wins(65, 256, in_layer=True)  # alone it won at 256, the layer lost at 128
    assert wins(65, 256, in_layer=False)
    assert wins(1, 32, in_layer=True)  # no layer was timed: 16 alone
    assert not wins(17, 32, in_layer=True)
    with pytest.raises(ValueError, match=r"t\.json: .*M, us and vllm_us must be of one"):
        measured_scaled_mm.parse(_text(ROW | {"layer": {"M": [1], "us": [1.0]}}), "t.json")
    with pytest.raises(ValueError, match=r"t\.json: .*layer: unknown \['prefetch'\]"):
        measured_scaled_mm.parse(_text(ROW | {"layer": layer | {"prefetch": 2}}), "t.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extra": 1}, "a row needs exactly"),
        ({"op": "w4a16"}, "op must be one of"),
        ({"M": [16, 64]}, "of one length, at least 1"),
        ({"M": [], "us": [], "vllm_us": []}, "of one length, at least 1"),
        ({"M": [16, 16, 256]}, "M must be different numbers of tokens"),
        ({"M": ["16", "64", "256"]}, "M must be different numbers of tokens"),
        ({"us": [1.0, 0.0, 1.0]}, "times must be positive"),
        ({"vllm_us": [1.0, -1.0, 1.0]}, "times must be positive"),
        ({"vllm_us": [1.0, math.nan, 1.0]}, "times must be positive"),
    ],
)
def test_a_table_that_cannot_be_judged_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"t\.json: .*{reason}"):
        measured_scaled_mm.parse(_text(ROW | change), "t.json")


def test_a_product_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"t\.json: .* is there twice"):
        measured_scaled_mm.parse(_text(ROW, ROW), "t.json")


LENT = ("w8a8_gemm", 6144, 4096)


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 without a table of its own takes the H200's."""
    only = {H200: tiles_scaled_mm.tables()[H200]}
    monkeypatch.setattr(tiles_scaled_mm, "tables", lambda: only)
    monkeypatch.setattr(tiles_scaled_mm, "buckets", tiles_scaled_mm.buckets.__wrapped__)


@pytest.mark.usefixtures("lending")
def test_a_verdict_without_a_lent_tile_or_a_served_kernel_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What nobody tuned runs on the rule's tile, which no verdict is of."""
    row = ROW | {"vllm_us": [2.0, 2.0, 2.0]}
    lent = row | dict(zip(("op", "N", "K"), LENT, strict=True))
    table = measured_scaled_mm.parse(_text(row, lent), "t.json")
    monkeypatch.setattr(measured_scaled_mm, "tables", lambda: {H100: table})
    reason = tiles_scaled_mm.why_not_preferred("fp8_gemm", H100, 64, 128)
    assert reason == f"64×128 not measured on {H100}"
    ask, op, size = tiles_scaled_mm.buckets, LENT[0], LENT[1:]
    assert all(bucket.wins for bucket in ask(op, H100, *size))
    monkeypatch.setattr(tiles_scaled_mm, "SERVED", ())
    assert not any(bucket.wins for bucket in ask(op, H100, *size))


@pytest.mark.usefixtures("lending")
@pytest.mark.parametrize("in_layer", [False, True])
def test_a_twin_takes_tiles_but_no_verdicts(
    monkeypatch: pytest.MonkeyPatch, in_layer: bool
) -> None:
    op, size = LENT[0], LENT[1:]
    row = ROW | dict(zip(("op", "N", "K"), LENT, strict=True)) | {"vllm_us": [2.0, 0.5, 2.0]}
    table = measured_scaled_mm.parse(_text(row), "t.json")
    monkeypatch.setattr(measured_scaled_mm, "tables", lambda: {H100: table})
    ours, lent = (
        tiles_scaled_mm.buckets(op, gpu, *size, in_layer=in_layer) for gpu in (H100, H200)
    )
    assert [(b.max_m, b.tile) for b in ours] == [(b.max_m, b.tile) for b in lent]
    reason = tiles_scaled_mm.why_not_preferred(op, H100, *size, in_layer=in_layer)
    assert reason == "not measured to be as fast as vLLM's at 17–128 tokens"


def test_an_h100_has_tiles_and_verdicts_of_its_own() -> None:
    """On Llama-3-8B's products ours is ahead of CUTLASS there at every number of tokens."""
    for op in ("fp8_gemm", "w8a8_gemm"):
        for name in ("gate_up", "down", "qkv", "o"):
            size = PRODUCTS[name]
            assert tiles_scaled_mm.why_not_preferred(op, H100, *size, in_layer=True) is None
            assert tiles_scaled_mm.lookup(op, H100, *size, 64).tile.kernel == "pairs"
    elsewhere = tiles_scaled_mm.why_not_preferred("fp8_gemm", H100, 2048, 2048)
    assert elsewhere == f"2048×2048 not measured on {H100}"
    assert not any(b.wins for b in tiles_scaled_mm.buckets("fp8_gemm", H100, 2048, 2048))


@pytest.mark.parametrize(("gpu", "names"), OF_BLOCKS.items(), ids=["H100", "H200"])
def test_verdicts_on_blocks_are_what_the_quantised_benchmark_says(
    tmp_path: Path, gpu: str, names: tuple[str, ...]
) -> None:
    output = tmp_path / "t.json"
    paths = [str(RESULTS / name) for name in names]
    arguments = ["--fp8-block", *paths, "--gpu", gpu, "--source", "x", "--output", str(output)]
    assert measured_scaled_mm_table.main(arguments) == 0
    rows = json.loads(output.read_text())["rows"]
    assert rows == tile_tables.shipped_rows("scaled_mm_measured", gpu)
    assert {row["op"] for row in rows} == {"fp8_block"}
    assert set(measured_scaled_mm.tables()) == {H100, H200}


def test_both_rivals_of_blocks_count(tmp_path: Path) -> None:
    """CUTLASS is the faster one at one token of qkv on an H200, DeepGEMM at 16."""
    path = RESULTS / OF_BLOCKS[H200][0]
    qkv = next(
        row
        for row in measured_scaled_mm_table.rows(
            "fp8_block", [path], measured_scaled_mm_table.BLOCK_VLLM
        )
        if row["N"] == 6144
    )
    with path.open(newline="") as file:
        us = {(r["N"], r["M"], r["kernel"]): float(r["us"]) for r in csv.DictReader(file)}
    assert qkv["vllm_us"][0] == us["6144", "1", "CUTLASS"] < us["6144", "1", "DeepGEMM"]
    assert qkv["vllm_us"][2] == us["6144", "16", "DeepGEMM"] < us["6144", "16", "CUTLASS"]


def test_blocks_are_judged_apart_on_a_card_with_tiles_of_its_own() -> None:
    """The tuner's figures beside CUTLASS would have ours win at 64 and 128 tokens, too."""
    for gpu, last in ((H200, 32), (H100, 64)):
        rows = tiles_scaled_mm.tables()[gpu].choices["fp8_block", 4096, 4096]
        assert all(alone.wins for max_m, (alone, _) in rows if max_m and max_m <= 128)
        for M in (1, last, last + 1):
            bucket = tiles_scaled_mm.lookup("fp8_block", gpu, 4096, 4096, M)
            assert bucket.wins is (last >= M)
        reason = f"not measured to be as fast as vLLM's at {last + 1}– tokens"
        assert tiles_scaled_mm.why_not_preferred("fp8_block", gpu, 4096, 4096) == reason


def test_blocks_start_early_on_an_h100() -> None:
    """Behind vLLM's quantisation, where a layer has them, that gains 0.5 to 2.6 µs."""
    for name in ("gate_up", "down", "qkv", "o"):
        for M in (1, 16, 32, 64):
            tile = tiles_scaled_mm.lookup("fp8_block", H100, *PRODUCTS[name], M).tile
            assert (tile.kernel, tile.early, tile.prefetch) == ("pairs", True, 2)


def test_a_table_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "t.json"
    arguments = ["--gpu", "card", "--source", "x", "--output", str(output)]
    assert measured_scaled_mm_table.main(arguments) == 2
    assert "error: no CSV given: --fp8, --int8, --fp8-block" in capsys.readouterr().err
    assert not output.exists()


def test_blocks_without_one_of_the_rivals_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.csv"
    path.write_text("N,K,M,kernel,us\n64,128,1,taut,2.0\n64,128,1,CUTLASS,3.0\n")
    arguments = ["--fp8-block", str(path), "--gpu", "card", "--source", "x"]
    assert measured_scaled_mm_table.main([*arguments, "--output", str(tmp_path / "t.json")]) == 2
    said = capsys.readouterr().err
    assert f"error: {path}: no cell with times of taut and CUTLASS and DeepGEMM" in said


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["fp8,1,qkv table (o late),2.0"], "not every layer was timed with ours and with CUTLASS"),
        (["fp8,1,as shipped,2.0"], "not every layer was timed with ours and with CUTLASS"),
        (["fp8,1,qkv table,2.0", "fp8,1,qkv table,3.0"], "qkv table is there twice"),
        (["fp8,1,qkv table,fast"], "not a CSV of decode_chain"),
        (["w4a16,1,qkv table,2.0"], "not a CSV of decode_chain: 'w4a16'"),
    ],
)
def test_a_csv_of_layers_that_says_nothing_is_refused(
    tmp_path: Path, lines: list[str], reason: str
) -> None:
    path = tmp_path / "chain.csv"
    path.write_text("\n".join(["scheme,tokens,kernels,us", *lines]))
    with pytest.raises(ValueError, match=f"{path}: .*{reason}"):
        measured_scaled_mm_table.layers(path)


def test_a_csv_of_layers_is_read_by_product(tmp_path: Path) -> None:
    path = tmp_path / "chain.csv"
    lines = ["fp8,16,o table (x),3.0", "fp8,16,o late (x),9.0", "fp8,16,o CUTLASS (x),4.0"]
    lines += ["fp8,1,o table (x),1.0", "fp8,1,o CUTLASS (x),2.0"]
    path.write_text("\n".join(["scheme,tokens,kernels,us", *lines]))
    figures = {"M": [1, 16], "us": [1.0, 3.0], "vllm_us": [2.0, 4.0]}
    assert measured_scaled_mm_table.layers(path) == {("fp8_gemm", 4096, 4096): figures}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("N,K,M,kernel,us\n64,128,1,taut,2.0\n", "no cell with times of taut and CUTLASS"),
        ("N,K,M,kernel,us\n", "no cell with times of taut and CUTLASS"),
        ("N,K,M,us\n64,128,1,2.0\n", "not a CSV of a benchmark"),
        ("N,K,M,kernel,us\n64,128,1,taut,fast\n", "not a CSV of a benchmark"),
    ],
)
def test_a_csv_without_both_times_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    path = tmp_path / "c.csv"
    path.write_text(text)
    arguments = ["--fp8", str(path), "--int8", str(path), "--gpu", "card", "--source", "x"]
    assert measured_scaled_mm_table.main([*arguments, "--output", str(tmp_path / "t.json")]) == 2
    assert f"error: {path}: {reason}" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()
