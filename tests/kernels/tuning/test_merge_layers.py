"""Whole layers' figures in a table of tiles: each bucket's fastest form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.launch import tile_tables
from tuning import merge_layers, merge_tiles

TILE = {"kernel": "pairs", "block_m": 16, "block_n": 64, "block_k": 256, "num_warps": 4}
RING = {"kernel": "ring", "block_m": 64, "block_n": 64, "block_k": 128, "num_warps": 4}
FORMS = ("table", "late", "early", "early+prefetch", "CUTLASS")
RESULTS = Path(__file__).parents[1] / "runs" / "2026-11-26-h100-11h"


def _row(max_m: int | None, M: list[int], tile: dict[str, Any]) -> dict[str, Any]:
    N, K = PRODUCTS["o"]
    times = [9.0] * len(M)
    figures = {"us": times, "vllm_us": times, "rival_us": times}
    fields = tile | {"num_stages": 4}
    named = {"op": "fp8_gemm", "N": N, "K": K, "max_m": max_m, "kernel": fields.pop("kernel")}
    return named | {"tile": fields, "M": M} | figures


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["tables"]["scaled_mm"]["rows"]
    return rows


def _files(tmp_path: Path, us: dict[int, tuple[float, ...]]) -> tuple[Path, Path]:
    table = tmp_path / "card.json"
    rows = [_row(16, [1, 16], TILE), _row(64, [64], RING), _row(None, [4096], RING)]
    tables = {"scaled_mm": {"sources": ["a test"], "rows": rows}}
    table.write_text(json.dumps({"gpu": "card", "tables": tables}))
    path = tmp_path / "decode_chain.csv"
    lines = ["scheme,tokens,context,bound,kernels,us,p20_us,p80_us", "fp8,1,192,1024,as shipped,9"]
    for tokens, times in us.items():
        for form, value in zip(FORMS, times, strict=True):
            lines.append(f'fp8,{tokens},192,1024,"o {form} (qkv late, down late)",{value},0,0')
    path.write_text("\n".join(lines) + "\n")
    return table, path


def test_a_bucket_gets_its_fastest_form_over_all_its_tokens(tmp_path: Path) -> None:
    table, path = _files(tmp_path, {1: (9.0, 8.0, 7.5, 7.0, 9.5), 16: (9.0, 8.0, 7.0, 7.2, 9.5)})
    assert merge_layers.main([str(table), str(path)]) == 0
    few, some, last = _rows(table)
    assert few["layer"] == {"prefetch": 2, "M": [1, 16], "us": [7.0, 7.2], "vllm_us": [9.5, 9.5]}
    assert "layer" not in some, "nobody timed 64 tokens"
    assert "layer" not in last
    read = tiles_scaled_mm.parse(merge_tiles.alone(table.read_text(), "scaled_mm", "t"), "t")
    within = [pair[1] for _, pair in read.choices["fp8_gemm", *PRODUCTS["o"]]]
    assert [bucket.tile.early for bucket in within] == [True, True, False], "the second by the rule"
    assert within[0].wins


@pytest.mark.parametrize(
    ("times", "prefetch"),
    [((9.0, 7.0, 7.1, 6.97, 9.5), None), ((9.0, 7.2, 7.0, 7.1, 9.5), 0)],
)
def test_late_and_early_without_a_prefetch_have_their_names(
    tmp_path: Path, times: tuple[float, ...], prefetch: int | None
) -> None:
    table, path = _files(tmp_path, {64: times})
    assert merge_layers.main([str(table), str(path)]) == 0
    layer = _rows(table)[1]["layer"]
    assert (layer["prefetch"], layer["us"], layer["vllm_us"]) == (prefetch, [7.0], [9.5])


def test_what_is_no_table_or_no_chain_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, path = _files(tmp_path, {1: (9.0,) * 5})
    before = table.read_text()
    assert merge_layers.main([str(path), str(path)]) == 2
    path.write_text("scheme,tokens\nfp8,1\n")
    assert merge_layers.main([str(table), str(path)]) == 2
    assert "not a CSV of decode_chain" in capsys.readouterr().err
    assert merge_layers.main([str(table), str(tmp_path / "nothing.csv")]) == 2
    assert table.read_text() == before


def test_the_h100s_layers_are_what_the_committed_chain_says() -> None:
    """But int8's o, whose one token wants an early start and whose 16 do not: two buckets."""
    path = tile_tables._DIRECTORY / "h100.json"
    shipped = path.read_text(encoding="utf-8")
    again = json.loads(merge_layers.merged(shipped, RESULTS / "decode_chain-forms.csv"))
    assert again == json.loads(shipped)
    assert sum("layer" in row for row in again["tables"]["scaled_mm"]["rows"]) == 25
