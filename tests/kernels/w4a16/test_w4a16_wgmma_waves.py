"""Two tiles for one product of `taut::w4a16_gemm`: how rows are cut, table, launches, GPU."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import pytest
import torch
from emulator import gluon
from emulator import wgmma as emulator_wgmma

from taut_bench import testing
from taut_bench.instruments.forms import w4a16 as w4a16_forms
from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.gemm.w4a16 import pair as waves
from taut_kernels.gemm.w4a16 import portable as wgmma
from taut_kernels.gemm.w4a16 import ring
from taut_kernels.gemm.w4a16 import tma as w4a16_wgmma_tma
from taut_kernels.gemm.w4a16.lookup import BUCKETS, WgmmaTile
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.tma_kernel import w4a16_wgmma_tma_kernel
from taut_kernels.gemm.w4a16.weight_format import DEFAULT
from taut_kernels.launch import launcher
from tuning import tune_w4a16_wgmma
from tuning.wgmma_waves_candidates import (
    fed_waves_candidates,
    grouped_candidates,
    uneven_candidates,
)


def fed(block_m: int, group_tiles: int, warp_groups: int, split_k: int = 1) -> WgmmaRingTile:
    return WgmmaRingTile(
        block_m, group_tiles, warp_groups, 2, split_k, 3, parts=2, running=2, tma=True
    )


OLD = fed(128, 1, 2)
HALF = fed(128, 1, 1)
SPLIT = fed(128, 1, 2, 2)
MANY = fed(256, 1, 2)
FED = fed(32, 2, 1)
FED_TAIL = fed(16, 1, 1, 2)
BY_COPIES = WgmmaRingTile(32, 1, 2, 2, 1, 4, parts=2, running=2)


@pytest.mark.parametrize(
    ("head", "tail", "places", "M", "N", "rows"),
    [
        (OLD, OLD, 264, 1024, 6144, 33 * 128),  # 384 tiles: 264 and 120
        (OLD, HALF, 264, 2048, 6144, 2 * 264 // 16 * 128),
        (MANY, HALF, 132, 256, 28672, 132 * 128),
        (MANY, HALF, 132, 1024, 28672, 6 * 132 // 4 * 128),
        (OLD, OLD, 264, 512, 6144, 6144),  # 192 tiles: no whole wave
        (MANY, HALF, 132, 257, 8448, 8448),  # one whole wave and nothing behind it
        (HALF, OLD, 132, 128, 8512, 8512),  # the tail's tile does not divide 64 rows
        (MANY, HALF, 100, 768, 8448, 33 * 128),  # three tiles of tokens: 99 of the places
        (MANY, HALF, 132, 257, 28672, 3 * 132 // 2 * 128),  # from 257 to 512: two tiles of tokens
        (MANY, HALF, 132, 512, 28672, 3 * 132 // 2 * 128),
        (MANY, HALF, 132, 513, 6144, 132 // 3 * 128),  # from 513 to 768: three
        (MANY, HALF, 132, 1024, 6144, 132 // 4 * 128),
        (FED, FED_TAIL, 4, 40, 640, 512),  # five tiles of rows, two of tokens: two waves
        (FED, FED_TAIL, 132, 1664, 4096, 12 * 132 // 52 * 128),
    ],
)
def test_head_takes_whole_waves(
    head: Any, tail: Any, places: int, M: int, N: int, rows: int
) -> None:
    tile = WavesTile(head, tail, places)
    assert tile.head_rows(M, N) == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": SPLIT}, "split_k of the head must be 1, got 2"),
        ({"tail": BY_COPIES}, "head and tail need tma"),
        ({"head": BY_COPIES}, "head and tail need tma"),
        ({"places": 0}, "places must be at least 1, got 0"),
    ],
)
def test_tile_refuses_what_the_launches_cannot_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WavesTile(**({"head": OLD, "tail": HALF, "places": 264} | change))


def table(tile: WavesTile, N: int = 6144, max_m: int | None = 1024) -> str:
    row = {"N": N, "K": 4096, "max_m": max_m, "us": 1.5} | tiles_wgmma.as_fields(tile)
    return json.dumps({"gpu": "card", "source": "test", "rows": [row]})


def test_table_refuses_a_tail_that_makes_too_many_sums_meet() -> None:
    # 6272 rows: 32 tokens a tile leave one wave of 40 of 49 row tiles to 4 tiles of tokens.
    tile = WavesTile(FED, FED_TAIL, 160)
    assert tile.why_not(6272, 128) is None
    assert tile.head_rows(128, 6272) == 40 * 128
    # From 161 tokens on 23 · 2 tiles of 64 rows are left to 11 tiles of tokens; 392 are counted.
    assert tile.why_not(6272, 176) == "split_k: 506 tiles meet, arrivals counts 392"
    with pytest.raises(ValueError, match=r"t.json: kernel=pair N=6272 K=4096 max_m=256: split_k: "):
        tiles_wgmma.parse(table(tile, 6272, 256), "t.json")
    # Some number of tokens below the most may leave more than the most does.
    assert tile.why_not(6272, 10_000) == tile.why_not(6272, 176)


def test_table_reads_two_tiles() -> None:
    tile = WavesTile(OLD, SPLIT, 264)
    parsed = tiles_wgmma.parse(table(tile), "t.json")
    assert parsed.choices[6144, 4096, BUCKETS.index(1024), DEFAULT] == tile
    tile = WavesTile(MANY, HALF, 132)
    parsed = tiles_wgmma.parse(table(tile), "t.json")
    assert parsed.choices[6144, 4096, BUCKETS.index(1024), DEFAULT] == tile


@pytest.mark.parametrize(
    ("tile", "N", "max_m", "message"),
    [
        (WavesTile(OLD, HALF, 264), 6144, None, "pair takes up to 2048 tokens"),
        (WavesTile(OLD, HALF, 264), 4224, 1024, "max_m=1024: the tail has no rows"),
        (WavesTile(OLD, HALF, 264), 4096, 1024, "max_m=1024: the tail has no rows"),
    ],
)
def test_table_refuses_two_tiles_where_one_has_nothing_to_do(
    tile: WavesTile, N: int, max_m: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiles_wgmma.parse(table(tile, N, max_m), "t.json")


@pytest.mark.parametrize("asymmetric", [False, True])
def test_two_tiles_fed_by_tma_fill_the_result_on_numpy(
    asymmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, ...]] = []

    def run(kernel: Any, grid: tuple[int, int, int], named: dict[str, Any]) -> None:
        grids.append(grid)
        emulator_wgmma.run_fed(kernel, grid, named)

    kernel = gluon.OnNumPy(w4a16_wgmma_tma_kernel, run)
    monkeypatch.setattr(w4a16_wgmma_tma, "_KERNEL", launcher.Launcher(kernel))
    case = testing.make_w4a16_case(
        40, 640, 512, 64, dtype=torch.bfloat16, asymmetric=asymmetric, with_bias=asymmetric
    )
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(WavesTile(FED, FED_TAIL, 4), *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert grids == [(4, 1, 2), (2, 2, 3)]
    assert not operands[5].any(), "arrivals must be 0 again"


def test_without_a_tail_the_head_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gluon.OnNumPy(w4a16_wgmma_tma_kernel, emulator_wgmma.run_fed)
    monkeypatch.setattr(w4a16_wgmma_tma, "_KERNEL", launcher.Launcher(kernel))
    case = testing.make_w4a16_case(20, 256, 640, 64, dtype=torch.bfloat16)
    with testing.nan_poison():
        actual = w4a16_launch.launch(WavesTile(FED, FED_TAIL, 4), *case.operands())
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert kernel.grid == (2, 1, 1)


def test_variants_name_both_tiles() -> None:
    found = list(w4a16_forms.products_of(WavesTile(FED, FED_TAIL, 264)))
    assert found == [FED, FED_TAIL]
    assert list(w4a16_forms.products_of(OLD)) == [OLD]
    assert list(w4a16_forms.products_of("dense")) == []


def test_every_regime_has_candidates() -> None:
    kinds = tune_w4a16_wgmma.all_candidates(6144, 4096, 1024, tune_w4a16_wgmma.REGIMES)
    assert {type(t).__name__ for t in kinds} == {"WgmmaRingTile", "WavesTile"}


@pytest.mark.parametrize("M", [512, 1024, 1664, 2048])
def test_candidates_fed_by_tma_could_stand_in_a_table(M: int) -> None:
    tried = 0
    for N, K in PRODUCTS.values():
        found = list(fed_waves_candidates(N, K, M))
        assert len(found) == len(set(found))
        tried += len(found)
        for tile in found:
            row = {"N": N, "K": K, "max_m": M, "us": 1.0} | tiles_wgmma.as_fields(tile)
            text = json.dumps({"gpu": "card", "source": "test", "rows": [row]})
            parsed = tiles_wgmma.parse(text, "t.json")
            assert parsed.choices[N, K, BUCKETS.index(M), DEFAULT] == tile
            assert tune_w4a16_wgmma.regime_of(tile) == "tma-waves"
            for part in (tile.head, tile.tail):
                assert isinstance(part, WgmmaRingTile)
                assert part.stages_that_fit(32, has_zeros=True) >= 3
    assert tried
    assert not list(fed_waves_candidates(4096, 14336, 1024)), "one wave has nothing behind it"


EVEN = {(128, 8), (256, 4), (192, 4), (288, 2), (320, 2), (384, 2)}
"""Blocks and groups of some 1024 tokens."""


@pytest.mark.parametrize(
    ("M", "groups"),
    [
        (512, set()),
        (1024, EVEN | {(192, 8), (288, 4), (320, 4), (384, 4)}),
        # 11, 6, 7, 5, 5 and 4 blocks: groups of 8, 4 and 2 would leave a short one, or several.
        (1344, EVEN | {(128, 16), (256, 8), (192, 8), (288, 8), (320, 8), (384, 4)}),
        (4096, EVEN | {(256, 16), (288, 16), (320, 16), (384, 16)}),
    ],
)
def test_groups_are_of_equal_length_or_of_1024_tokens(M: int, groups: set[tuple[int, int]]) -> None:
    found = list(grouped_candidates(M))
    assert len(found) == len(set(found))
    assert {(tile.block_m, tile.group_m) for tile in found} == groups


def test_uneven_blocks_are_tried_where_half_of_them_is_used() -> None:
    assert not list(uneven_candidates(128))
    assert {tile.block_m for tile in uneven_candidates(129)} == {192}
    assert {tile.block_m for tile in uneven_candidates(160)} == {192, 288, 320}
    for tile in uneven_candidates(256):
        assert tile.stages_that_fit(32, has_zeros=True) == tile.stages
        assert tile in tune_w4a16_wgmma.all_candidates(4096, 4096, 256, ["tma-waves"])


CHAINED = (
    WavesTile(OLD, HALF, 2),
    WavesTile(OLD, SPLIT, 3),
    WavesTile(MANY, HALF, 2),
    WavesTile(MANY, fed(128, 1, 2, 3), 2),
    WavesTile(FED, dataclasses.replace(FED_TAIL, block_m=64, split_k=1), 20),
    WavesTile(
        dataclasses.replace(FED, block_m=256, group_tiles=1, warp_groups=2, registers=168),
        dataclasses.replace(FED_TAIL, block_m=128, split_k=3, registers=128),
        8,
    ),
)
CHAINED_CASES = (
    (530, 640, 1152, 128, torch.bfloat16, False),
    (513, 896, 704, 64, torch.float16, True),
    (513, 640, 1024, -1, torch.bfloat16, True),
)


CHAINED_FORMATS = (
    # Tile, M, N, K, G, dtype, zero points, bias: pairs of these that the cases above lack.
    (CHAINED[0], 530, 640, 1088, 32, torch.bfloat16, False, True),
    (CHAINED[0], 513, 896, 1152, 128, torch.float16, True, False),
    (CHAINED[1], 513, 640, 1088, 32, torch.float16, True, False),
    (CHAINED[2], 530, 896, 576, 64, torch.bfloat16, False, True),
    (CHAINED[3], 513, 640, 1088, 32, torch.float16, False, False),
    (CHAINED[3], 530, 640, 704, -1, torch.float16, True, False),
    (CHAINED[4], 513, 896, 1088, 32, torch.bfloat16, True, True),
    (CHAINED[4], 530, 640, 1152, 128, torch.float16, False, True),
    (CHAINED[5], 513, 640, 576, 64, torch.float16, False, True),
    (CHAINED[5], 530, 896, 1024, -1, torch.bfloat16, False, False),
)


@pytest.mark.parametrize(
    ("M", "N"),
    sorted({*(case[:2] for case in CHAINED_CASES), *(case[1:3] for case in CHAINED_FORMATS)}),
)
def test_what_is_chained_on_a_card_has_a_tail(M: int, N: int) -> None:
    assert all(tile.head_rows(M, N) < N for tile in CHAINED)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", CHAINED, ids=str)
@pytest.mark.parametrize(("M", "N", "K", "G", "dtype", "asymmetric"), CHAINED_CASES)
def test_gpu_every_cut_chained_in_a_graph(
    tile: WavesTile, M: int, N: int, K: int, G: int, dtype: torch.dtype, asymmetric: bool
) -> None:
    case = testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device="cuda"
    )
    check_chained(tile, case)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(
    ("tile", "M", "N", "K", "G", "dtype", "asymmetric", "with_bias"), CHAINED_FORMATS, ids=str
)
def test_gpu_more_formats_chained_in_a_graph(
    tile: WavesTile,
    M: int,
    N: int,
    K: int,
    G: int,
    dtype: torch.dtype,
    asymmetric: bool,
    with_bias: bool,
) -> None:
    case = testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=with_bias, device="cuda"
    )
    check_chained(tile, case)


def check_chained(tile: WavesTile, case: testing.W4A16Case) -> None:
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(tile, *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [w4a16_launch.launch(tile, *operands) for _ in range(4)]
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, actual) for y in found), "bits differ between runs"
    assert not operands[5].any(), "arrivals must be 0 again"


@pytest.mark.parametrize(
    ("choice", "module"),
    [
        (WavesTile(OLD, HALF, 2), waves),
        (MANY, ring),
        (WgmmaTile(128, 8, 1, 2, reordered=True, early_wait=True), wgmma),
    ],
)
def test_the_op_runs_what_the_table_chose(
    choice: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planned(NamedTuple):
        tile: Any
        call: Any

        def run(self, x: torch.Tensor, weight: Any) -> tuple[Any, ...]:
            return self, x, weight

    operands = testing.make_w4a16_case(300, 64, 128, 64, dtype=torch.bfloat16).operands()
    monkeypatch.setattr(tiles_wgmma, "lookup", lambda *_, **__: choice)
    monkeypatch.setattr(module, "plan", Planned)
    w4a16._plan.cache_clear()
    planned, x, weight = w4a16._launch_w4a16_gemm(*operands)
    w4a16._plan.cache_clear()
    assert planned.tile == choice
    assert planned.call[:4] == (300, 64, 128, 64)
    assert x is operands[0]
    assert tuple(weight) == operands[1:6]
