"""Tiles of shapes nobody measured, on cards with `wgmma`: legal everywhere, sensibly ranked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from taut_bench.instruments.aot import SHARED_MEMORY_BYTES
from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import rule as tiles_wgmma_rule
from taut_kernels.gemm.w4a16.cost import Cost, Cut, by_estimate, dense_estimate, estimate
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile, token_tiles
from taut_kernels.gemm.w4a16.lookup import BUCKETS, WgmmaTile
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.rule import LEAST_K, cut, rule
from taut_kernels.launch import tile_tables

DRAW = random.Random(0)
ODD = [(16 * DRAW.randint(1, 4000), 64 * DRAW.randint(8, 480)) for _ in range(60)]
NARROW = [(N, K) for N in (64, 80, 96, 112, 128, 144, 272) for K in (512, 576, 4160, 29568)]
SIZES = sorted({*PRODUCTS.values(), *ODD, *NARROW, (80, 576), (151936, 896), (128, 53248)})
FORMATS = [(group, zeros) for group in (32, 64, 128, 0) for zeros in (False, True)]
H200 = "NVIDIA H200"


@pytest.mark.parametrize("tokens", BUCKETS)
def test_every_tile_fits_every_shape_and_format(tokens: int) -> None:
    for N, K in SIZES:
        tile = rule(N, K, tokens)
        for group, zeros in FORMATS:
            if isinstance(tile, RingTile):
                tile.stages_that_fit(token_tiles(tokens), group, has_zeros=zeros)
            elif isinstance(tile, WgmmaRingTile):
                tile.cut(group, has_zeros=zeros)
        if isinstance(tile, WgmmaRingTile):
            assert tile.why_not(N, tokens) is None
        if isinstance(tile, RingTile | WgmmaTile | WgmmaRingTile) and tile.split_k > 1:
            blocks = 1 if isinstance(tile, RingTile) else -(-tokens // tile.block_m)
            meetings = -(-N // tile.rows) * blocks
            assert meetings <= N // 16, f"{N} x {K}: arrivals counts N/16"


@pytest.mark.parametrize("tokens", BUCKETS)
@pytest.mark.parametrize("N", [16, 48])
def test_the_narrowest_layers_take_what_every_card_runs(N: int, tokens: int) -> None:
    bucket = tiles_wgmma.bucket_of(tokens)
    choice = tiles_wgmma.rule(N, 4096, bucket, hopper=True)
    assert choice == tiles_wgmma.plain_rule(N, 4096, tokens)
    wider = tiles_wgmma.rule(64, 4096, bucket, hopper=True)
    assert wider == tiles_wgmma_rule.rule(64, 4096, tokens)


@pytest.mark.parametrize("tokens", [32, 64, 128, 256, 384])
def test_tma_feeds_a_layer_as_wide_as_its_tile_and_none_narrower(tokens: int) -> None:
    for N, K in PRODUCTS.values():
        choice = rule(N, K, tokens)
        assert isinstance(choice, WgmmaRingTile) and choice.tma
    narrow = rule(80, 4096, tokens)
    assert not isinstance(narrow, WgmmaRingTile) or narrow.rows <= 80


def test_a_table_would_take_what_the_rule_chooses() -> None:
    for tokens in BUCKETS:
        for N, K in SIZES:
            tile = rule(N, K, tokens)
            assert not isinstance(tile, RingTile) or tokens <= 64
            assert not isinstance(tile, WgmmaRingTile) or tile.tma or tokens <= 1024


def test_cards_without_wgmma_and_short_rows_keep_the_plain_rule() -> None:
    for bucket, tokens in enumerate(BUCKETS):
        for N, K in SIZES:
            plain = tiles_wgmma.plain_rule(N, K, tokens)
            assert isinstance(plain, str | WgmmaTile)
            assert tiles_wgmma.rule(N, K, bucket, hopper=False) == plain
        short = LEAST_K - 64
        plain = tiles_wgmma.plain_rule(4096, short, tokens)
        assert tiles_wgmma.rule(4096, short, bucket, hopper=True) == plain
    assert tiles_wgmma.rule(4096, 4096, len(BUCKETS), hopper=True) == "dense"


def test_lookup_asks_the_rule_where_no_table_knows_the_shape() -> None:
    for bucket, tokens in enumerate(BUCKETS):
        found = tiles_wgmma.lookup(H200, 80, 640, bucket, hopper=True)
        assert found == rule(80, 640, tokens)


def test_estimates_are_what_the_table_measured() -> None:
    """Of every row whose tile the model knows, within a third; half of them within a tenth."""
    costs = {
        str(tile): cost
        for candidates in tiles_wgmma_rule.CANDIDATES.values()
        for whole, cost in candidates
        for tile in (
            whole,
            *(
                tiles_wgmma_rule._in_splits(whole, i)
                for i in range(2, 1 + tiles_wgmma_rule._most_splits(whole))
            ),
        )
    }
    ratios = []
    for N, K, max_m, tile, us in measured_rows():
        if str(tile) in costs:
            ratios.append(estimate(cut(tile, N, K, max_m), costs[str(tile)]) / us)
    assert len(ratios) >= 20
    assert 0.67 < min(ratios) < max(ratios) < 1.5
    close = sum(0.9 < ratio < 1.1 for ratio in ratios)
    assert close >= len(ratios) / 2, sorted(ratios)


def measured_rows() -> list[tuple[int, int, int, tiles_wgmma_rule.Fused, float]]:
    found = []
    for row in tile_tables.shipped_rows("w4a16_wgmma", "NVIDIA H200"):
        tile = tiles_wgmma._choice(row["kernel"], row["tile"])
        if "format" in row:
            continue  # the model is of symmetric groups of 128
        if isinstance(tile, RingTile | WgmmaTile | WgmmaRingTile) and row["max_m"]:
            found.append((row["N"], row["K"], row["max_m"], tile, row["us"]))
    return found


@pytest.mark.parametrize(("N", "K"), [(1280, 8192), (3584, 3584), (3584, 18944), (5120, 27648)])
@pytest.mark.parametrize("tokens", [16, 32, 64, 128, 256])
def test_few_rows_still_fill_the_card(N: int, K: int, tokens: int) -> None:
    # One tile of 256 tokens whatever N is made ten programs of N = 1280: 82 us, where 18 do.
    tile = rule(N, K, tokens)
    assert isinstance(tile, RingTile | WgmmaTile | WgmmaRingTile)
    work = cut(tile, N, K, tokens)
    assert work.programs * work.splits >= 56


def test_model_counts_rounds_splits_and_launches() -> None:
    cost = Cost(2, 0.1, 0.3)
    one = estimate(Cut(264, 1, 64, 0), cost)
    assert estimate(Cut(265, 1, 64, 0), cost) > 1.3 * one, "a second round"
    assert estimate(Cut(132, 1, 64, 0), cost) < one, "half the shared work"
    whole = Cut(33, 1, 64, 4 * 128 * 64)
    split = Cut(33, 4, 16, 4 * 128 * 64)
    assert estimate(split, cost) < estimate(whole, cost), "K split where programs are few"
    tiny = Cut(132, 8, 1, 4 * 256 * 128)
    assert estimate(tiny, cost) > estimate(Cut(132, 1, 8, 0), cost), "but sums are not free"
    assert dense_estimate(4096, 4096, 4096) == pytest.approx(183, rel=0.15)  # measured
    assert by_estimate([(2.0, "b"), (1.0, "a"), (1.0, "c")]) == ["a", "c", "b"]
    assert by_estimate([]) == []


def test_model_counts_the_busiest_multiprocessor() -> None:
    memory = Cost(4, 0.1, 0.0)
    even, uneven = (estimate(Cut(programs, 1, 64, 0), memory) for programs in (264, 265))
    assert uneven > 1.15 * even, "three programs on one multiprocessor, two on the others"
    # 37888 x 3584 at 16 tokens: 296 programs took 32.8 us, twice as many with half of K 25.4.
    choice = rule(37888, 3584, 16)
    assert isinstance(choice, RingTile)
    assert choice.split_k > 1


def test_few_features_split_k_at_256_tokens() -> None:
    # 128 x 64 with K whole has 40 programs; in three it took 12.5 us, the best without TMA 18.0.
    choice = rule(1280, 8192, 256)
    assert isinstance(choice, WgmmaRingTile)
    assert (choice.tma, choice.block_m, choice.rows, choice.split_k) == (True, 128, 64, 3)


def test_tma_tiles_are_split_only_where_all_programs_run_at_once() -> None:
    for tokens in BUCKETS:
        resident = {str(tile): cost.resident for tile, cost in tiles_wgmma_rule.CANDIDATES[tokens]}
        for N, K in SIZES:
            choice = rule(N, K, tokens)
            if isinstance(choice, WgmmaRingTile) and choice.tma and choice.split_k > 1:
                work = cut(choice, N, K, tokens)
                places = 132 * resident[str(replace(choice, split_k=1))]
                assert work.programs * work.splits <= places, f"{N} x {K}: {choice}"


def test_typical_numbers_of_tokens_lie_in_their_bucket() -> None:
    for largest, Ms in tiles_wgmma_rule._TYPICAL.items():
        assert Ms[-1] == largest
        assert {tiles_wgmma.bucket_of(M) for M in Ms} == {BUCKETS.index(largest)}
        fewer, most = (-(-M // 128) for M in Ms)
        assert fewer == most - 1, "five and six blocks of 128 tokens, seven and eight"
        assert len({-(-M // 256) for M in Ms}) == 1, "as many of 256"


def test_rule_at_768_tokens_finds_what_won_there() -> None:
    """The row of 1024, which served these before, won on three of fourteen."""
    rows = [row for row in measured_rows() if row[2] == 768]
    pairs = 5  # of two tiles, which no rule chooses
    assert len(rows) == len(set(PRODUCTS.values())) - pairs
    found = sum(rule(N, K, 768) == _rules_form(tile) for N, K, _, tile, _ in rows)
    assert found >= 10, found


def test_rule_at_192_and_384_tokens_takes_tiles_of_192_where_they_won() -> None:
    for tokens, least in ((192, 3), (384, 7)):
        won = [row for row in measured_rows() if row[2] == tokens]
        won = [row for row in won if isinstance(row[3], WgmmaRingTile) and row[3].block_m == 192]
        assert len(won) >= least
        found = [_rules_form(rule(N, K, tokens)) for N, K, *_ in won]
        taken = sum(isinstance(tile, WgmmaRingTile) and tile.block_m == 192 for tile in found)
        assert taken >= len(won) - 1, found


def _rules_form(tile: object) -> object:
    """Return a tile in the rule's form of it: of 192 tokens and 256 rows what spills least."""
    if isinstance(tile, WgmmaRingTile) and tile.block_m == 192 and tile.group_tiles == 2:
        return replace(tile, running=1)
    return tile


def test_rule_at_1024_tokens_leaves_dense_to_few_features() -> None:
    assert rule(1280, 8192, 1024) == "dense"
    choice = rule(8192, 8192, 1024)
    assert isinstance(choice, WgmmaRingTile) and choice.tma


def test_every_tile_of_the_rule_is_compiled_ahead_of_time() -> None:
    from taut_bench.instruments.forms import w4a16 as w4a16_forms

    for kind, every_variant in (
        (RingTile, w4a16_forms.decode_ring_variants),
        (WgmmaRingTile, w4a16_forms.wgmma_variants),
    ):
        compiled = {
            (variant.tile, variant.constants["HAS_ZEROS"], variant.constants["GROUP_SIZE"])
            for variant in every_variant()
            if "HAS_ZEROS" in variant.constants and "GROUP_SIZE" in variant.constants
        }
        tiles = tiles_wgmma_rule.every_tile(kind)
        assert tiles
        assert {(tile, True, 32) for tile in tiles} <= compiled
        chosen = {rule(N, K, M) for N, K in SIZES for M in BUCKETS}
        # Of more splits the most stand for the others.
        few = {tile for tile in chosen if isinstance(tile, kind) and tile.split_k <= 2}
        assert {(tile, True, 32) for tile in few} <= compiled
    assert SHARED_MEMORY_BYTES["sm_90"] == 227 * 1024
