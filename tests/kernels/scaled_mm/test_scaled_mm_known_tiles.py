"""Candidates of a short visit: few, all of them winners somewhere, all of them launchable."""

from __future__ import annotations

import pytest

from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import tile as tiles_scaled_mm_tile
from tuning.scaled_mm_candidates import BUCKETS, SHARED_BYTES, candidates, ring_bytes, widths_of
from tuning.scaled_mm_known_tiles import known_tiles


@pytest.mark.parametrize("op", ["fp8_gemm", "w8a8_gemm"])
@pytest.mark.parametrize("M", [Ms[-1] for _, Ms in BUCKETS])
def test_every_product_has_some_tiles_that_fit_it(op: str, M: int) -> None:
    for N, K in sorted(set(PRODUCTS.values())):
        tiles = known_tiles(op, N, K, M)
        assert 2 <= len(tiles) <= 64, (N, K)
        assert len(tiles) == len(set(tiles))
        for tile in tiles:
            assert tiles_scaled_mm_tile.why_not_for(tile, op, N) is None
            assert tile.kernel != "ring" or ring_bytes(tile) <= SHARED_BYTES
            assert K % (tile.block_k * (1 if tile.kernel == "pairs" else tile.split_k)) == 0
            if tile.split_k > 1:
                assert tile.block_m >= M


def test_half_the_tokens_are_tried_where_whole_tiles_do_not_fill_a_wave() -> None:
    """o has 64 tiles of 64 features: two of 32 tokens each are a wave, without splitting K."""
    for at_64 in (known_tiles("fp8_gemm", *PRODUCTS["o"], 64), [*candidates(*PRODUCTS["o"], 64)]):
        halves = [t for t in at_64 if t.kernel == "ring" and t.block_m == 32]
        assert halves
        assert all(t.split_k == 1 for t in halves)
        assert all(t.block_m in (32, 64) for t in at_64 if t.kernel == "ring" and t.block_m <= 64)
    wide = known_tiles("fp8_gemm", *PRODUCTS["qwen2.5-32b/gate_up"], 64)
    assert all(tile.block_m >= 64 for tile in wide if tile.kernel == "ring")
    assert widths_of(16) == (16,)
    assert widths_of(17) == (32, 16)


@pytest.mark.parametrize("M", [64, 65, 96, 128, 129])
def test_few_is_tried_where_it_won_and_as_a_full_search_does(M: int) -> None:
    for N, K in sorted(set(PRODUCTS.values())):
        known, every = (
            [tile for tile in tiles if tile.kernel == "few"]
            for tiles in (known_tiles("fp8_gemm", N, K, M), candidates(N, K, M))
        )
        assert set(known) == set(every)
        assert len(every) == len(set(every))
        assert len(every) in (range(1, 11) if 64 < M <= 128 else (0,))
    down = list(map(str, candidates(*PRODUCTS["down"], M)))
    assert ("few 128x64x256/4w/4s/k2" in down) == (64 < M <= 128)


@pytest.mark.parametrize("op", ["fp8_gemm", "w8a8_gemm"])
def test_a_measured_shapes_own_winner_is_among_them(op: str) -> None:
    for (its_op, N, K), rows in tiles_scaled_mm.tables()["NVIDIA H200"].choices.items():
        buckets = [alone for _, (alone, _) in rows]
        for bucket in buckets if its_op == op else ():
            M = bucket.max_m or 4096
            found = known_tiles(op, N, K, M)
            blocks = -(-M // bucket.tile.block_m)
            same = [
                tile
                for tile in found
                if str(tile).split("/g")[0] == str(bucket.tile).split("/g")[0]
                and (tile.group_m == bucket.tile.group_m or blocks <= tile.group_m)
            ]
            assert same, (N, K, M, str(bucket.tile))


@pytest.mark.parametrize(
    ("shape", "M", "tile"),
    [
        # 130 tiles where 128 × 128 makes 160, and 260 where it makes 320: a wave less.
        ("down", 640, "turns 128x160x128/4w/5s/g16"),
        ("o", 1280, "turns 128x160x128/4w/5s/g16"),
        ("down", 320, "turns 64x160x128/4w/6s/g16"),
        ("qkv", 512, "hopper 128x192x128/4w/5s/g16"),
    ],
)
def test_what_promises_a_wave_less_is_tried(shape: str, M: int, tile: str) -> None:
    for op in ("fp8_gemm", "w8a8_gemm"):
        assert tile in map(str, known_tiles(op, *PRODUCTS[shape], M))


def test_what_promises_nothing_is_not() -> None:
    assert not [t for t in known_tiles("fp8_gemm", *PRODUCTS["down"], 1024) if t.block_n % 128]
