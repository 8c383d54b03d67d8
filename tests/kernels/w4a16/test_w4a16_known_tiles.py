"""Candidates of a short visit: few, all of them winners somewhere, all of them launchable."""

from __future__ import annotations

import pytest

from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile, token_tiles
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.weight_format import DEFAULT
from tuning import w4a16_known_tiles as known

SIZES = sorted(set(PRODUCTS.values()))


@pytest.mark.parametrize("M", [16, 64, 128, 256, 512, 1024, 2048, 4096])
def test_products_have_some_tiles_that_fit_them(M: int) -> None:
    for N, K in SIZES:
        tiles = known.product_tiles(N, K, M)
        assert 1 <= len(tiles) <= 80, (N, K)
        assert len(tiles) == len(set(tiles))
        fed = [tile for tile in tiles if isinstance(tile, WgmmaRingTile) and tile.tma]
        assert len(fed) <= 25
        assert bool(fed) == (M >= 32)
        for tile in tiles:
            if isinstance(tile, RingTile):
                tile.stages_that_fit(token_tiles(M), 128, has_zeros=False)
                continue
            if isinstance(tile, WgmmaRingTile):
                tile.cut(128, has_zeros=False)
            if tile.split_k > 1:
                meetings = -(-N // tile.rows) * -(-M // tile.block_m)
                assert meetings <= N // 16 and M <= 1024


def test_decode_has_some_tiles_that_fit_every_shape() -> None:
    for N, K in SIZES:
        tiles = known.decode_tiles(N, K)
        assert 2 <= len(tiles) <= 120, (N, K)
        rule = tiles_decode.rule(N, K, hopper=True)
        assert rule in tiles
        units = -(-K // tiles_decode.UNIT)
        for tile in tiles:
            assert tile == rule or known.idle_share(units, tile.k_warps * tile.split_k) <= 0.1


def test_idle_share_is_what_the_longest_part_has_too_much() -> None:
    assert known.idle_share(8, 4) == 0
    assert known.idle_share(37, 4) == pytest.approx(40 / 37 - 1)
    assert known.idle_share(3, 8) == pytest.approx(8 / 3 - 1)


def test_a_measured_shapes_own_winner_is_among_them() -> None:
    card = "NVIDIA H200"
    for (N, K, weights), tile in tiles_decode.tables()[card].choices.items():
        if weights is not DEFAULT:
            assert tile in known.lean_decode_tiles(N, K)
            continue
        even = -(-K // tiles_decode.UNIT) % (tile.k_warps * tile.split_k) == 0
        if even and tile.registers in (0, 96, 128):
            assert tile in known.decode_tiles(N, K)
    for (N, K, bucket, _), choice in tiles_wgmma.tables()[card].choices.items():
        if isinstance(choice, RingTile | WgmmaRingTile) and bucket < len(tiles_wgmma.BUCKETS):
            assert choice in known.product_tiles(N, K, tiles_wgmma.BUCKETS[bucket])
