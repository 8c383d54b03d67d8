"""Two tiles for one product of `taut::w4a16_gemm`: how rows are cut, table, launches, GPU."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import pytest
import torch
from emulator import gluon
from emulator import wgmma as emulator_wgmma

from taut_bench.shapes import PRODUCTS
from taut_kernels import _launch, testing, tiles_wgmma
from taut_kernels.gemm import w4a16, w4a16_launch, w4a16_wgmma_tma, w4a16_wgmma_variants
from taut_kernels.gemm import w4a16_wgmma as wgmma
from taut_kernels.gemm import w4a16_wgmma_ring as ring
from taut_kernels.gemm import w4a16_wgmma_waves as waves
from taut_kernels.gemm._w4a16_wgmma_jit import w4a16_wgmma_kernel
from taut_kernels.gemm._w4a16_wgmma_ring_jit import w4a16_wgmma_ring_kernel
from taut_kernels.gemm._w4a16_wgmma_tma_jit import w4a16_wgmma_tma_kernel
from taut_kernels.tiles_wgmma import BUCKETS, WgmmaTile
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile
from taut_kernels.tiles_wgmma_waves import WavesTile
from taut_kernels.weight_format import DEFAULT
from tuning import tune_w4a16_wgmma
from tuning.wgmma_waves_candidates import (
    fed_waves_candidates,
    grouped_candidates,
    uneven_candidates,
    waves_candidates,
)

OLD = WgmmaTile(128, 1, 8, 1, 1, 3, reordered=True, early_wait=True)
HALF = WgmmaTile(128, 1, 4, 1, 1, 3, reordered=True, early_wait=False)
SPLIT = dataclasses.replace(OLD, split_k=2)
RING = WgmmaRingTile(32, 1, 2, 2, 1, 4, reordered=True, parts=2, running=2)
SMALL = WgmmaRingTile(16, 1, 1, 2, 2, 4, reordered=True)
MANY = WgmmaRingTile(256, 1, 2, 1, 1, 6, reordered=True, parts=2)
FED = WgmmaRingTile(32, 2, 1, 2, 1, 3, False, parts=2, running=2, tma=True)
FED_TAIL = WgmmaRingTile(16, 1, 1, 2, 2, 4, False, parts=2, running=2, tma=True)
MODULES = {w4a16_wgmma_kernel: (wgmma, "_PRODUCT"), w4a16_wgmma_ring_kernel: (ring, "_KERNEL")}


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
        ({"tail": dataclasses.replace(HALF, reordered=False)}, "need reordered, or tma"),
        ({"tail": FED_TAIL}, "need reordered, or tma"),
        ({"head": FED}, "need reordered, or tma"),
        ({"head": dataclasses.replace(RING, reordered=False)}, "head and tail need reordered"),
        ({"places": 0}, "places must be at least 1, got 0"),
    ],
)
def test_tile_refuses_what_the_launches_cannot_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WavesTile(**({"head": OLD, "tail": HALF, "places": 264} | change))


def table(tile: Any, N: int = 6144, max_m: int | None = 1024) -> str:
    row = {"N": N, "K": 4096, "max_m": max_m, "tile": tile, "us": 1.5}
    return json.dumps({"gpu": "card", "source": "test", "rows": [row]})


def test_table_refuses_a_tail_that_makes_too_many_sums_meet() -> None:
    # 6272 rows: 32 tokens a tile leave one wave of 40 of 49 row tiles to 4 tiles of tokens.
    tile = WavesTile(FED, FED_TAIL, 160)
    assert tile.why_not(6272, 128) is None
    assert tile.head_rows(128, 6272) == 40 * 128
    # From 161 tokens on 23 · 2 tiles of 64 rows are left to 11 tiles of tokens; 392 are counted.
    assert tile.why_not(6272, 176) == "split_k: 506 tiles meet, arrivals counts 392"
    with pytest.raises(ValueError, match=r"t.json: N=6272 K=4096 max_m=256: split_k: "):
        tiles_wgmma.parse(table(dataclasses.asdict(tile), 6272, 256), "t.json")
    # Some number of tokens below the most may leave more than the most does.
    assert tile.why_not(6272, 10_000) == tile.why_not(6272, 176)


def test_table_reads_two_tiles() -> None:
    tile = WavesTile(OLD, SPLIT, 264)
    parsed = tiles_wgmma.parse(table(dataclasses.asdict(tile)), "t.json")
    assert parsed.choices[6144, 4096, BUCKETS.index(1024), DEFAULT] == tile
    tile = WavesTile(MANY, HALF, 132)
    parsed = tiles_wgmma.parse(table(dataclasses.asdict(tile)), "t.json")
    assert parsed.choices[6144, 4096, BUCKETS.index(1024), DEFAULT] == tile


@pytest.mark.parametrize(
    ("tile", "N", "max_m", "message"),
    [
        (WavesTile(OLD, HALF, 264), 6144, None, "is no regime for max_m=None"),
        (WavesTile(OLD, HALF, 264), 4224, 1024, "the tail has no rows at max_m=1024"),
        (WavesTile(OLD, HALF, 264), 4096, 1024, "the tail has no rows at max_m=1024"),
    ],
)
def test_table_refuses_two_tiles_where_one_has_nothing_to_do(
    tile: WavesTile, N: int, max_m: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiles_wgmma.parse(table(dataclasses.asdict(tile), N, max_m), "t.json")


def fragment_order(x: torch.Tensor) -> torch.Tensor:
    """Reorder columns as the kernel's `reorder` does: positions count (h, i, j, t, b)."""
    M, K = x.shape
    return x.view(M, K // 64, 2, 4, 2, 2, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(M, K).contiguous()


class OnNumPy:
    """Stands in for a jit kernel: remembers how it was launched, and runs a ring on NumPy."""

    def __init__(self, kernel: Any, launches: list[tuple[str, int, tuple[int, ...]]]) -> None:
        self.kernel, self.launches = kernel, launches
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            named = dict(zip(self.arg_names, arguments, strict=False)) | constants
            self.launches.append((named["ROLE"], named["y_ptr"].storage_offset(), grid))
            if self.kernel is w4a16_wgmma_ring_kernel:
                named = {name: named[name] for name in self.arg_names}
                emulator_wgmma.run(self.kernel, grid, named)

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, tuple[int, ...]]]:
    found: list[tuple[str, int, tuple[int, ...]]] = []
    for kernel, (module, name) in MODULES.items():
        monkeypatch.setattr(module, name, _launch.Launcher(OnNumPy(kernel, found)))
    monkeypatch.setattr(waves, "reorder", fragment_order)
    return found


@pytest.mark.parametrize("asymmetric", [False, True])
def test_two_launches_fill_the_result_on_numpy(
    asymmetric: bool, launches: list[tuple[str, int, tuple[int, ...]]]
) -> None:
    case = testing.make_w4a16_case(
        33, 448, 640, 64, dtype=torch.bfloat16, asymmetric=asymmetric, with_bias=asymmetric
    )
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(WavesTile(RING, SMALL, 2), *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    # Two tiles of tokens: three waves of one tile of rows each; then one of 64 rows, K in two.
    assert launches == [("head", 0, (3, 1, 2)), ("tail", 384, (1, 2, 3))]
    assert not operands[5].any(), "arrivals must be 0 again"


@pytest.mark.parametrize("asymmetric", [False, True])
def test_two_tiles_fed_by_tma_fill_the_result_on_numpy(
    asymmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, ...]] = []

    def run(kernel: Any, grid: tuple[int, int, int], named: dict[str, Any]) -> None:
        grids.append(grid)
        emulator_wgmma.run_fed(kernel, grid, named)

    kernel = gluon.OnNumPy(w4a16_wgmma_tma_kernel, run)
    monkeypatch.setattr(w4a16_wgmma_tma, "_KERNEL", _launch.Launcher(kernel))
    case = testing.make_w4a16_case(
        40, 640, 512, 64, dtype=torch.bfloat16, asymmetric=asymmetric, with_bias=asymmetric
    )
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(WavesTile(FED, FED_TAIL, 4), *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert grids == [(4, 1, 2), (2, 2, 3)]
    assert not operands[5].any(), "arrivals must be 0 again"


def test_without_a_tail_the_head_takes_all(
    launches: list[tuple[str, int, tuple[int, ...]]],
) -> None:
    case = testing.make_w4a16_case(20, 256, 640, 64, dtype=torch.bfloat16)
    with testing.nan_poison():
        actual = w4a16_launch.launch(WavesTile(RING, SMALL, 2), *case.operands())
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert launches == [("head", 0, (2, 1, 1))]


def test_rows_of_other_kernels_are_cut_alike(
    launches: list[tuple[str, int, tuple[int, ...]]],
) -> None:
    operands = testing.make_w4a16_case(300, 640, 256, 64, dtype=torch.float16).operands()
    w4a16_launch.launch(WavesTile(OLD, HALF, 4), *operands)
    assert launches == [("head", 0, (4, 1, 3)), ("tail", 512, (2, 1, 3))]


def test_variants_name_the_roles_of_both_tiles() -> None:
    found = list(w4a16_wgmma_variants.products_of(WavesTile(OLD, MANY, 264)))
    assert found == [(OLD, "head"), (MANY, "tail")]
    assert list(w4a16_wgmma_variants.products_of(OLD)) == [(OLD, "alone")]
    fed = list(w4a16_wgmma_variants.products_of(WavesTile(FED, FED_TAIL, 264)))
    assert fed == [(FED, "alone"), (FED_TAIL, "alone")]
    assert list(w4a16_wgmma_variants.products_of("dense")) == []


@pytest.mark.parametrize("M", [256, 1024])
def test_candidates_could_stand_in_a_table(M: int) -> None:
    for N, K in PRODUCTS.values():
        found = list(waves_candidates(N, K, M))
        assert len(found) == len(set(found)) > 1
        for tile in found:
            row = {"N": N, "K": K, "max_m": M, "tile": dataclasses.asdict(tile), "us": 1.0}
            text = json.dumps({"gpu": "card", "source": "test", "rows": [row]})
            parsed = tiles_wgmma.parse(text, "t.json")
            assert parsed.choices[N, K, BUCKETS.index(M), DEFAULT] == tile
            for part, _ in w4a16_wgmma_variants.products_of(tile):
                if isinstance(part, WgmmaRingTile):
                    assert part.stages_that_fit(32, has_zeros=True) >= 3
    kinds = tune_w4a16_wgmma.all_candidates(6144, 4096, 1024, tune_w4a16_wgmma.REGIMES)
    assert {type(t).__name__ for t in kinds} == {"WgmmaTile", "WgmmaRingTile", "WavesTile"}


@pytest.mark.parametrize("M", [512, 1024, 1664, 2048])
def test_candidates_fed_by_tma_could_stand_in_a_table(M: int) -> None:
    tried = 0
    for N, K in PRODUCTS.values():
        found = list(fed_waves_candidates(N, K, M))
        assert len(found) == len(set(found))
        tried += len(found)
        for tile in found:
            row = {"N": N, "K": K, "max_m": M, "tile": dataclasses.asdict(tile), "us": 1.0}
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
    WavesTile(MANY, dataclasses.replace(RING, block_m=128, split_k=3, summed=True), 2),
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
        (SPLIT, wgmma),
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
