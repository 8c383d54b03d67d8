"""How the fastest tiles of a bucket are compared inside it; that they are timed wants a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from taut_bench import w4a16_format
from taut_kernels.gemm.w4a16.lookup import BUCKETS, Choice, bucket_of
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.tuner import timing
from taut_kernels.tuner.w4a16_candidates import Product
from taut_kernels.tuner.w4a16_compile import jobs_of
from tuning import tune_w4a16_wgmma, w4a16_finalists, w4a16_rows


def test_numbers_of_tokens_lie_in_their_bucket_and_reach_its_end() -> None:
    for before, most in itertools.pairwise((0, *BUCKETS)):
        found = w4a16_finalists.spread(before, most)
        assert found == sorted(set(found))
        assert found[-1] == most
        assert {bucket_of(M) for M in found} == {BUCKETS.index(most)}
    assert w4a16_finalists.spread(1024, 1664) == [1184, 1344, 1504, 1664]
    assert w4a16_finalists.spread(2048, 4096) == [2560, 3072, 3584, 4096]


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([[98.9, 98.9]], 0),  # within noise
        ([[98.0, 98.0]], 1),
        ([[50.0, 103.0]], 0),  # loses somewhere
        ([[90.0, 102.0], [95.0, 95.0]], 2),
        ([], 0),
    ],
)
def test_a_row_is_worth_it_that_gains_all_over_the_bucket_and_loses_nowhere(
    others: list[list[float]], found: int
) -> None:
    assert w4a16_finalists.worth_taking([[100.0, 100.0], *others]) == found


WIDE, OTHER, THIRD = (
    WgmmaRingTile(block_m, 1, 2, 1, 1, 4, parts=4, running=2, tma=True)
    for block_m in (384, 192, 288)
)
AT = {M: BUCKETS.index(M) for M in (1152, 1280, 1664)}


def changed(
    decided: dict[int, tuple[Choice, Choice]], shipped: dict[int, Choice]
) -> dict[int, Choice]:
    rows = w4a16_rows.changed(
        {(4096, 4096, AT[M]): choices for M, choices in decided.items()},
        {(4096, 4096, AT[M], DEFAULT): choice for M, choice in shipped.items()},
        DEFAULT,
    )
    return {BUCKETS[bucket]: choice for (_, _, bucket), choice in rows.items()}


def test_a_change_of_a_wider_bucket_leaves_the_narrower_what_it_had() -> None:
    # 1152 and 1280 have no rows: 1664's serves them.
    decided = {1152: (WIDE, WIDE), 1280: (WIDE, OTHER), 1664: (WIDE, THIRD)}
    assert changed(decided, {1664: WIDE}) == {1152: WIDE, 1280: OTHER, 1664: THIRD}


def test_what_serves_already_gets_no_row() -> None:
    assert not changed({1152: (WIDE, WIDE), 1664: (WIDE, WIDE)}, {1664: WIDE})
    # Nor what the rule chose, and 1152 takes 1280's new one.
    assert not changed({1664: (WIDE, WIDE)}, {})
    assert changed({1152: (WIDE, OTHER), 1280: (WIDE, OTHER)}, {1664: WIDE}) == {1280: OTHER}


def test_a_wider_buckets_pair_without_a_tail_is_its_head() -> None:
    pair = WavesTile(OTHER, OTHER, 64)  # 32 · 6 programs are three waves, 32 · 9 four and a half
    assert pair.head_rows(1152, 4096) == 4096 != pair.head_rows(1664, 4096)
    decided = {1152: (pair, pair), 1664: (pair, THIRD)}
    assert changed(decided, {1664: pair}) == {1152: OTHER, 1664: THIRD}


def test_the_tuners_table_has_the_changed_rows_with_their_times_at_the_buckets_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no such card")
    met = [
        tune_w4a16_wgmma.Result("o", 4096, 4096, M, us, tile)
        for tile, times in ((WIDE, (9.0, 10.0)), (OTHER, (8.0, 8.5)))
        for M, us in zip((1600, 1664), times, strict=True)
    ]
    decided: dict[w4a16_rows.Place, tuple[Choice, Choice]] = {(4096, 4096, AT[1664]): (WIDE, OTHER)}
    rows = tune_w4a16_wgmma.table_rows(
        tune_w4a16_wgmma._changed(decided, met, w4a16_format.DEFAULT)
    )
    assert [(row["max_m"], row["us"], row["tile"]["block_m"]) for row in rows] == [(1664, 8.5, 192)]


@pytest.mark.gpu
def test_gpu_the_shorter_of_two_choices_wins() -> None:
    x = torch.zeros(1 << 22, device="cuda")

    def subject(choice: Choice, M: int) -> timing.Subject:
        times = M if choice == "dense" else 4 * M
        return timing.Subject(str(choice), lambda _: [x.add_(1) for _ in range(times)], 1)

    times = w4a16_finalists.meet(["decode", "dense"], [1, 2], subject, 3)
    assert [len(one) for one in times] == [2, 2]
    assert w4a16_finalists.worth_taking(times) == 1


def test_pairs_of_tiles_fed_by_tma_are_compiled_apart() -> None:
    found = tune_w4a16_wgmma.all_candidates(4096, 14336, 1664, ["tma-waves"])
    pairs = [tile for tile in found if tune_w4a16_wgmma.regime_of(tile) == "tma-waves"]
    assert pairs
    product = Product(4096, 14336, WeightFormat.G128)
    jobs = {job.key: job for job in jobs_of(product, 1664, found, torch.device("cuda"))}
    assert len(jobs) < 2 * len(pairs)
    for N, K, M, tile, _ in jobs.values():
        assert (N, K) == (4096, 14336)
        assert tile.why_not(4096, M) is None  # type: ignore[union-attr]
