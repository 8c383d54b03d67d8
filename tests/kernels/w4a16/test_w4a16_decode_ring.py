"""The ring kernel of `taut::w4a16_gemm`: tile, launcher, arithmetic on NumPy, variants, GPU.

Layouts, barriers and waits are Triton's to compile (test_aot.py) and a GPU's to run (marker `gpu`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from emulator import gluon

from taut_bench import testing
from taut_bench.instruments.forms import w4a16 as w4a16_forms
from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.w4a16 import decode_ring as ring
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16.decode_ring_kernel import w4a16_decode_ring_kernel
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile, token_tiles
from taut_kernels.gemm.w4a16.lookup import BUCKETS
from taut_kernels.gemm.w4a16.ring_tile import (
    SHARED_BYTES,
    scale_bytes,
    scale_lines,
    whole_quads,
    zero_quads,
)
from taut_kernels.gemm.w4a16.weight_format import DEFAULT
from taut_kernels.launch import launcher
from tuning import tune_w4a16_wgmma
from tuning.decode_ring_candidates import decode_ring_candidates

DTYPES = (torch.float16, torch.bfloat16)
TILES = {
    "rows": RingTile(2, 8, 2, 1, 4),
    "deep": RingTile(2, 4, 2, 1, 6),
    "split": RingTile(1, 4, 2, 3, 4),
    "long": RingTile(1, 4, 4, 2, 2),
    "wide": RingTile(2, 16, 2, 2, 4, registers=128),
}


def make_case(
    M: int, N: int, K: int, G: int, dtype: torch.dtype, asymmetric: bool, device: str = "cpu"
) -> testing.W4A16Case:
    return testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device=device
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_tiles": 3}, r"row_tiles must be one of \(1, 2\), got 3"),
        ({"row_warps": 3}, "row_warps must be one of"),
        ({"chunks_per_step": 1}, r"chunks_per_step must be one of \(2, 4\), got 1"),
        ({"row_warps": 2}, r"row_warps must be one of \(4, 8, 16\), got 2"),
        ({"registers": 300}, "registers must be 0 or lie in 32..255, got 300"),
        ({"stages": 3}, r"stages must be one of \(2, 4, 6, 8, 10\), got 3"),
    ],
)
def test_tile_refuses_what_the_kernel_cannot_do(change: dict[str, int], message: str) -> None:
    fields: dict[str, Any] = {
        "row_tiles": 2,
        "row_warps": 8,
        "chunks_per_step": 2,
        "split_k": 1,
        "stages": 4,
    }
    with pytest.raises(ValueError, match=message):
        RingTile(**fields | change)


def test_token_tiles_are_the_next_power_of_two() -> None:
    assert [token_tiles(M) for M in (1, 8, 9, 16, 17, 32, 33, 64)] == [1, 1, 2, 2, 4, 4, 8, 8]


def test_ring_takes_the_stages_that_fit() -> None:
    tile = RingTile(2, 16, 2, 1, 6)
    assert tile.stage_bytes(2, 128, has_zeros=False) == 16 * 2 * 2 * 512 + 8 * 512 + 2 * 16 * 128
    assert tile.stages_that_fit(2, 128, has_zeros=False) == 4
    for group, lines in ((64, 2), (32, 1)):
        # A row tile's scales and one quad's zero points.
        scales = 2 * 16 * (128 * lines + 32)
        expected = 16 * 2 * 2 * 512 + 8 * 512 + scales
        assert tile.stage_bytes(2, group, has_zeros=True) == expected
    assert tile.stages_that_fit(2, 32, has_zeros=True) == 4
    for tokens in (1, 2, 4, 8):
        for group in (0, 32, 64, 128):
            stages = tile.stages_that_fit(tokens, group, has_zeros=True)
            assert 2 <= stages * tile.stage_bytes(tokens, group, has_zeros=True) < SHARED_BYTES
    assert RingTile(2, 16, 4, 1, 2).stages_that_fit(8, 32, has_zeros=True) == 2


@pytest.mark.parametrize(
    ("chunks", "group_size", "lines", "whole", "quads"),
    [
        (1, 32, 2, False, 1),
        (2, 32, 1, True, 1),
        (4, 32, 2, True, 2),
        (2, 64, 2, False, 1),
        (4, 64, 1, True, 1),
        (1, 128, 1, False, 1),
        (4, 128, 2, False, 1),
        (4, 0, 1, False, 1),
    ],
)
def test_a_stage_keeps_the_scales_of_whole_quads_once(
    chunks: int, group_size: int, lines: int, whole: bool, quads: int
) -> None:
    assert scale_lines(chunks, group_size) == lines
    assert whole_quads(chunks, group_size) is whole
    assert zero_quads(chunks, group_size) == quads
    zeros = scale_bytes(chunks, group_size, has_zeros=True)
    zeros -= scale_bytes(chunks, group_size, has_zeros=False)
    # A quarter of the scales where both are whole quads; a channel's wait in registers.
    assert zeros == (32 * quads if group_size else 0)


def test_table_has_ring_tiles_for_up_to_64_tokens() -> None:
    tile = {
        "row_tiles": 2,
        "row_warps": 8,
        "chunks_per_step": 2,
        "split_k": 1,
        "stages": 4,
    }
    row: dict[str, Any] = {"N": 64, "K": 128, "max_m": 32, "us": 1.5}
    row |= {"kernel": "decode_ring", "tile": tile}

    def table(**change: Any) -> str:
        return json.dumps({"gpu": "card", "source": "test", "rows": [row | change]})

    parsed = tiles_wgmma.parse(table(), "t.json")
    assert parsed.choices[64, 128, BUCKETS.index(32), DEFAULT] == RingTile(2, 8, 2, 1, 4)
    for max_m in (128, None):
        with pytest.raises(ValueError, match=r"t.json: .*: decode_ring takes up to 64 tokens"):
            tiles_wgmma.parse(table(max_m=max_m), "t.json")


@pytest.mark.parametrize(
    ("tile", "M", "N", "K", "G", "dtype", "asymmetric", "grid"),
    [
        ("rows", 16, 512, 640, 128, torch.bfloat16, False, (2, 1, 1)),
        ("rows", 9, 80, 576, 64, torch.float16, True, (1, 1, 1)),
        ("deep", 5, 272, 1088, 32, torch.float16, True, (3, 1, 1)),
        ("split", 33, 80, 576, 64, torch.bfloat16, True, (2, 3, 1)),
        ("split", 17, 64, 1024, 128, torch.float16, False, (1, 3, 1)),
        ("deep", 12, 144, 1408, 128, torch.bfloat16, True, (2, 1, 1)),
        ("wide", 13, 48, 832, 64, torch.float16, True, (1, 2, 1)),
        ("long", 29, 144, 1088, 32, torch.bfloat16, True, (3, 2, 1)),
        ("long", 9, 64, 2432, 128, torch.float16, True, (1, 2, 1)),
        ("long", 21, 32, 2112, 64, torch.bfloat16, True, (1, 2, 1)),
        ("deep", 24, 144, 640, 128, torch.bfloat16, False, (2, 1, 1)),
        ("deep", 11, 64, 1088, 32, torch.float16, True, (1, 1, 1)),
        ("deep", 9, 64, 704, -1, torch.bfloat16, True, (1, 1, 1)),
        ("wide", 64, 144, 704, -1, torch.float16, True, (1, 2, 1)),
        ("wide", 1, 16, 64, -1, torch.bfloat16, False, (1, 2, 1)),
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
    kernel = gluon.OnNumPy(
        w4a16_decode_ring_kernel, lambda body, grid, named: gluon.run(body, grid[:2], named)
    )
    monkeypatch.setattr(ring, "_KERNEL", launcher.Launcher(kernel))
    case = make_case(M, N, K, G, dtype, asymmetric)
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(TILES[tile], *operands)
    testing.assert_within_budget(actual, case.gold(), case.reference())
    assert kernel.grid == grid
    assert not operands[5].any(), "arrivals must be 0 again"
    assert kernel.constants["PDL"] is False, "a CPU has no dependent launch"


def test_launch_refuses_more_tokens_than_tiles() -> None:
    operands = make_case(65, 16, 128, 64, torch.bfloat16, False).operands()
    with pytest.raises(ValueError, match="x must have at most 64 rows for a ring tile, got 65"):
        w4a16_launch.launch(TILES["rows"], *operands)


def test_kernel_variants_cover_every_measured_tile_and_every_format() -> None:
    variants = list(w4a16_forms.decode_ring_variants())
    assert len(variants) == len({(v.label, v.tile) for v in variants})
    tables = tiles_wgmma.tables().values()
    measured = {t for table in tables for t in table.choices.values() if isinstance(t, RingTile)}
    assert measured <= {v.tile for v in variants}
    labels = " ".join(v.label for v in variants)
    for word in ("bf16", "fp16", " asym", " sym", "group=32", "group=64", "group=128", "channel"):
        assert word in labels or word == "group=128"


def test_candidates_fit_the_card() -> None:
    for N, K in PRODUCTS.values():
        for M in (16, 32, 64):
            for tile in decode_ring_candidates(N, K, M):
                assert tile.stages_that_fit(token_tiles(M), 128, has_zeros=False) == tile.stages
                ring = tile.stages * tile.stage_bytes(token_tiles(M), 128, has_zeros=False)
                assert 2 * ring < SHARED_BYTES
                assert 2 * 32 * tile.num_warps * tile.registers <= 65536
    both = tune_w4a16_wgmma.all_candidates(28672, 4096, 32, ("ring", "tma"))
    assert len(both) == len(set(both))
    assert {type(tile).__name__ for tile in both} == {"RingTile", "WgmmaRingTile"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tile", "M"),
    [("rows", 16), ("deep", 7), ("split", 64), ("long", 27), ("wide", 32), ("deep", 24)],
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
        testing.assert_within_budget(actual, case.gold(), case.reference())
        for _ in range(5):
            again = w4a16_launch.launch(TILES[tile], *operands)
            assert torch.equal(again, actual), "bits differ between runs"
        assert not operands[5].any(), "arrivals must be 0 again"


@pytest.mark.gpu
def test_gpu_graph_replay_follows_the_activations() -> None:
    case = make_case(32, 512, 4096, 128, torch.bfloat16, False, "cuda")
    operands = list(case.operands())
    tile = TILES["wide"]
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
