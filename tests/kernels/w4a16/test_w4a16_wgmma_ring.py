"""The `wgmma` ring kernel of `taut::w4a16_gemm`: tile, launcher, NumPy, variants, GPU.

Layouts, barriers and waits are Triton's to compile (test_aot.py) and a GPU's to run (marker `gpu`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from emulator import gluon, wgmma

from taut_bench import testing
from taut_bench.instruments.forms import w4a16 as w4a16_forms
from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import ring
from taut_kernels.gemm.w4a16.lookup import BUCKETS
from taut_kernels.gemm.w4a16.ring_kernel import w4a16_wgmma_ring_kernel
from taut_kernels.gemm.w4a16.ring_tile import SHARED_BYTES, WgmmaRingTile
from taut_kernels.gemm.w4a16.weight_format import DEFAULT
from taut_kernels.launch import launcher
from tuning import tune_w4a16_wgmma
from tuning.wgmma_ring_candidates import wgmma_ring_candidates

DTYPES = (torch.float16, torch.bfloat16)
TILES = {
    "one": WgmmaRingTile(32, 1, 1, 2, 1, 4),
    "two": WgmmaRingTile(64, 2, 1, 2, 1, 5, parts=2, running=2),
    "wide": WgmmaRingTile(64, 2, 2, 2, 1, 6, parts=4, running=3),
    "split": WgmmaRingTile(32, 2, 1, 4, 2, 4, parts=4, running=1),
    "three": WgmmaRingTile(16, 1, 4, 2, 3, 3),
    "many": WgmmaRingTile(256, 1, 2, 2, 1, 3, parts=2, running=1),
    "short": WgmmaRingTile(128, 1, 2, 2, 1, 5, parts=4, running=3),
    "short_split": WgmmaRingTile(128, 1, 2, 2, 3, 5, parts=2, running=1),
}


def make_case(
    M: int, N: int, K: int, G: int, dtype: torch.dtype, asymmetric: bool, device: str = "cpu"
) -> testing.W4A16Case:
    return testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device=device
    )


def fields(**change: Any) -> dict[str, Any]:
    return {
        "block_m": 64,
        "group_tiles": 2,
        "warp_groups": 2,
        "chunks_per_step": 2,
        "split_k": 1,
        "stages": 5,
    } | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 48}, "block_m must be one of"),
        ({"group_tiles": 3}, r"group_tiles must be one of \(1, 2\), got 3"),
        ({"warp_groups": 3}, r"warp_groups must be one of \(1, 2, 4\), got 3"),
        ({"chunks_per_step": 1}, r"chunks_per_step must be one of \(2, 4\), got 1"),
        ({"split_k": 17}, "split_k must be one of"),
        ({"stages": 2}, "stages must be one of"),
        ({"parts": 3}, r"parts must be one of \(1, 2, 4\), got 3"),
        ({"running": 4}, r"running must be one of \(1, 2, 3\), got 4"),
        ({"running": 2}, "running must be below parts × chunks_per_step, got 2"),
        (
            {"chunks_per_step": 1, "tma": True},
            "running must be below parts × chunks_per_step, got 1",
        ),
        ({"registers": 300}, "registers must be 0 or lie in 32..255, got 300"),
    ],
)
def test_tile_refuses_what_the_kernel_cannot_do(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WgmmaRingTile(**fields(**change))


def test_ring_takes_the_stages_that_fit() -> None:
    tile = WgmmaRingTile(64, 2, 2, 2, 1, 12)
    # Weights 256 x 128 / 2, activations 64 x 128 x 2, a line of scales and 8 zero words a row tile.
    assert tile.stage_bytes(128, has_zeros=False) == 16384 + 16384 + 2048
    assert tile.stage_bytes(32, has_zeros=True) == 16384 + 16384 + 2048 + 512
    assert tile.stages_that_fit(128, has_zeros=False) == 6
    for group in (0, 32, 64, 128):
        stages = tile.stages_that_fit(group, has_zeros=True)
        assert stages >= 3
        assert stages * tile.stage_bytes(group, has_zeros=True) < SHARED_BYTES
    with pytest.raises(ValueError, match="three stages of 98304 bytes do not fit"):
        WgmmaRingTile(128, 2, 2, 4, 1, 3).stages_that_fit(0, has_zeros=False)


def test_every_measured_tile_fits_every_format() -> None:
    for table in tiles_wgmma.tables().values():
        for tile in table.choices.values():
            for group in (0, 32, 64, 128):
                if isinstance(tile, WgmmaRingTile):
                    assert tile.stages_that_fit(group, has_zeros=True) >= 3


def test_table_has_tiles_of_the_ring_for_up_to_1024_tokens() -> None:
    def table(**change: Any) -> str:
        named = tiles_wgmma.as_fields(WgmmaRingTile(**fields()))
        row = {"N": 64, "K": 128, "max_m": 128, "us": 1.5} | named | change
        return json.dumps({"gpu": "card", "source": "test", "rows": [row]})

    for max_m in (128, 1024):
        parsed = tiles_wgmma.parse(table(max_m=max_m), "t.json")
        assert parsed.choices[64, 128, BUCKETS.index(max_m), DEFAULT] == WgmmaRingTile(**fields())
    with pytest.raises(ValueError, match=r"t.json: .*: ring takes up to 1024 tokens"):
        tiles_wgmma.parse(table(max_m=None), "t.json")


@pytest.mark.parametrize(
    ("tile", "M", "N", "K", "G", "dtype", "asymmetric", "grid"),
    [
        ("one", 32, 80, 640, 128, torch.bfloat16, False, (2, 1, 1)),
        ("one", 40, 64, 576, 64, torch.float16, True, (1, 1, 2)),
        ("two", 50, 272, 1088, 32, torch.float16, True, (3, 1, 1)),
        ("wide", 64, 272, 1024, 128, torch.bfloat16, False, (2, 1, 1)),
        ("wide", 17, 16, 704, -1, torch.bfloat16, True, (1, 1, 1)),
        ("split", 33, 144, 1088, 32, torch.bfloat16, True, (2, 2, 2)),
        ("three", 16, 80, 576, 64, torch.float16, False, (1, 3, 1)),
        ("three", 1, 16, 64, -1, torch.float16, False, (1, 3, 1)),
        ("many", 200, 144, 1152, 128, torch.bfloat16, False, (2, 1, 1)),
        ("many", 270, 64, 576, 32, torch.float16, True, (1, 1, 2)),
        ("short", 129, 144, 704, 64, torch.bfloat16, True, (2, 1, 2)),
        ("short", 70, 128, 1152, 128, torch.float16, False, (1, 1, 1)),
        ("short_split", 128, 128, 896, 128, torch.bfloat16, True, (1, 3, 1)),
        ("short_split", 30, 80, 576, 32, torch.float16, True, (1, 3, 1)),
    ],
)
def test_kernel_computes_the_product_on_numpy(
    tile: str,
    M: int,
    N: int,
    K: int,
    G: int,
    dtype: torch.dtype,
    asymmetric: bool,
    grid: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = gluon.OnNumPy(w4a16_wgmma_ring_kernel, wgmma.run)
    monkeypatch.setattr(ring, "_KERNEL", launcher.Launcher(kernel))
    case = make_case(M, N, K, G, dtype, asymmetric)
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(TILES[tile], *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert kernel.grid == grid
    assert not operands[5].any(), "arrivals must be 0 again"


def test_launch_refuses_more_meeting_places_than_arrivals_counts() -> None:
    operands = make_case(33, 16, 512, 64, torch.bfloat16, False).operands()
    with pytest.raises(ValueError, match="split_k: 3 tiles meet, arrivals counts 1"):
        w4a16_launch.launch(TILES["three"], *operands)


def test_kernel_variants_cover_every_measured_tile_and_every_format() -> None:
    variants = list(w4a16_forms.wgmma_variants())
    assert len(variants) == len({(v.label, v.tile) for v in variants})
    tables = tiles_wgmma.tables().values()
    measured = {
        t for table in tables for t in table.choices.values() if isinstance(t, WgmmaRingTile)
    }
    assert measured <= {v.tile for v in variants}
    labels = " ".join(v.label for v in variants)
    for word in ("bf16", "fp16", " asym", " sym", "group=32", "group=64", "group=128", "channel"):
        assert word in labels


def test_candidates_fit_the_card() -> None:
    for N, K in PRODUCTS.values():
        for M in (16, 32, 64, 128):
            found = list(wgmma_ring_candidates(N, K, M))
            assert len(found) == len(set(found))
            for tile in found:
                assert tile.stages_that_fit(128, has_zeros=False) == tile.stages
                assert 32 * tile.num_warps * tile.registers <= 65536
                assert tile.split_k == 1 or -(-N // tile.rows) * -(-M // tile.block_m) <= N // 16
    kinds = tune_w4a16_wgmma.all_candidates(28672, 4096, 64, tune_w4a16_wgmma.REGIMES)
    assert {type(t).__name__ for t in kinds} == {"RingTile", "WgmmaRingTile"}


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(
    ("tile", "M"),
    [
        ("one", 32),
        ("two", 50),
        ("wide", 64),
        ("split", 40),
        ("three", 9),
        ("many", 257),
        ("short", 129),
        ("short_split", 100),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("K", "G"), [(1088, 32), (576, 64), (1152, 128), (704, -1), (2048, 128)])
def test_gpu_every_cut_and_format(
    tile: str, M: int, K: int, G: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    for N in (272, 1040):
        case = make_case(M, N, K, G, dtype, asymmetric, "cuda")
        operands = case.operands()
        with testing.nan_poison():
            actual = w4a16_launch.launch(TILES[tile], *operands)
        testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
        for _ in range(5):
            again = w4a16_launch.launch(TILES[tile], *operands)
            assert torch.equal(again, actual), "bits differ between runs"
        assert not operands[5].any(), "arrivals must be 0 again"


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_graph_replay_follows_the_activations() -> None:
    case = make_case(64, 512, 4096, 128, torch.bfloat16, False, "cuda")
    operands = list(case.operands())
    tile = TILES["split"]
    w4a16_launch.launch(tile, *operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = w4a16_launch.launch(tile, *operands)
        second = w4a16_launch.launch(tile, first[:, :512].repeat(1, 8), *operands[1:])
    for seed in (1, 2):
        fresh = torch.randn(operands[0].shape, generator=torch.Generator().manual_seed(seed))
        operands[0].copy_(fresh)
        graph.replay()
        expected = w4a16_launch.launch(tile, *operands)
        assert torch.equal(first, expected)
        again = w4a16_launch.launch(tile, expected[:, :512].repeat(1, 8), *operands[1:])
        assert torch.equal(second, again)
