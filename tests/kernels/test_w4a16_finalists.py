"""How the fastest tiles of a bucket are compared inside it; that they are timed wants a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from taut_kernels.bench import timing, tune_w4a16_wgmma, w4a16_finalists
from taut_kernels.tiles_wgmma import BUCKETS, Choice, bucket_of

gpu = pytest.mark.gpu


def test_numbers_of_tokens_lie_in_their_bucket_and_reach_its_end() -> None:
    for before, most in itertools.pairwise((0, *BUCKETS)):
        found = w4a16_finalists.spread(before, most)
        assert found == sorted(set(found))
        assert found[-1] == most
        assert {bucket_of(M) for M in found} == {BUCKETS.index(most)}
    assert w4a16_finalists.spread(1024, 1664) == [1184, 1344, 1504, 1664]
    assert w4a16_finalists.spread(2048, 4096) == [2560, 3072, 3584, 4096]


def test_the_best_is_best_all_over_the_bucket() -> None:
    # Twice as fast at one number of tokens outweighs a third slower at another.
    assert w4a16_finalists.best([[100.0, 100.0], [50.0, 130.0], [99.0, 99.0]]) == 1
    assert w4a16_finalists.best([[100.0, 100.0], [50.0, 210.0]]) == 0


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_the_shorter_of_two_choices_wins() -> None:
    x = torch.zeros(1 << 22, device="cuda")

    def subject(choice: Choice, M: int) -> timing.Subject:
        times = M if choice == "dense" else 4 * M
        return timing.Subject(str(choice), lambda _: [x.add_(1) for _ in range(times)], 1)

    times = w4a16_finalists.meet(["decode", "dense"], [1, 2], subject, 3)
    assert [len(one) for one in times] == [2, 2]
    assert w4a16_finalists.best(times) == 1


def test_pairs_of_tiles_fed_by_tma_are_compiled_apart() -> None:
    found = tune_w4a16_wgmma.all_candidates(4096, 14336, 1664, ["tma-waves"])
    pairs = [tile for tile in found if tune_w4a16_wgmma.regime_of(tile) == "tma-waves"]
    assert pairs
    jobs = dict(
        tune_w4a16_wgmma._job(4096, 14336, 1664, part)
        for tile in found
        for part in tune_w4a16_wgmma._compiled_apart(tile)
    )
    assert len(jobs) < 2 * len(pairs)
    for (K, part, _), (_, _, M, tile) in jobs.items():
        assert (K, part) == (14336, tile)
        assert tile.why_not(4096, M) is None  # type: ignore[union-attr]
