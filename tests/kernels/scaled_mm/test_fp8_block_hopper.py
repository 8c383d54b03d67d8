"""Kernels ``blocks``, FP8 with 128 × 128 blocks of weights: their bodies on NumPy, and the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulator import gluon, hopper

from taut_bench import testing
from taut_bench.instruments.forms import scaled_mm as scaled_mm_forms
from taut_bench.testing.scaled_mm import (
    EXTREMES,
    ScaledMmCase,
    cut_results,
    extreme_case,
    make_scaled_mm_case,
)
from taut_bench.testing.scaled_mm import launch_block_case as run
from taut_kernels.gemm.scaled_mm import blocks_hopper as fp8_block_hopper
from taut_kernels.gemm.scaled_mm.blocks_hopper_kernel import fp8_block_hopper_kernel
from taut_kernels.gemm.scaled_mm.blocks_tall_kernel import fp8_block_tall_kernel
from taut_kernels.gemm.scaled_mm.dispatch import launch_block
from taut_kernels.gemm.scaled_mm.tile import (
    ScaledMmTile,
    most_shared_tokens,
    tiles_of_blocks,
    why_not_for,
)
from taut_kernels.launch import launcher
from tuning.scaled_mm_candidates import block_candidates

DEEP, SHALLOW, TALL, SHALLOW_TALL, HALF, QUARTER, SINGLE, TWICE = TILES = tuple(
    ScaledMmTile("blocks", block_m, block_n, 128, 4, stages, group_m=group_m)
    for block_m, block_n, stages, group_m in (
        (128, 128, 6, 3), (128, 128, 2, 1), (256, 128, 4, 3), (256, 128, 2, 1), (128, 64, 8, 8),
        (128, 32, 10, 8), (64, 128, 8, 3), (64, 128, 4, 8),
    )
)  # fmt: skip
SPLIT = (
    *(replace(DEEP, split_k=split_k) for split_k in (2, 3, 8)),
    *(replace(tile, split_k=2) for tile in (HALF, SINGLE)),
)
FP8_EXTREMES = [name for name, (op, *_) in EXTREMES.items() if op == "fp8_gemm"]


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> dict[int, gluon.OnNumPy]:
    """Let both kernels run on NumPy; return them by tokens a tile."""
    kernels = {
        tokens: gluon.OnNumPy(kernel, hopper.run)
        for tokens, kernel in ((128, fp8_block_hopper_kernel), (256, fp8_block_tall_kernel))
    }
    kernels[64] = kernels[128]
    for tokens, name in ((128, "_blocks"), (256, "_tall")):
        monkeypatch.setattr(fp8_block_hopper, name, launcher.Launcher(kernels[tokens]))
    return kernels


def case_of(M: int, N: int, K: int, **options: Any) -> ScaledMmCase:
    return make_scaled_mm_case("fp8_gemm", M, N, K, scaling="block", **options)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(333, 520, 400), (700, 264, 272), (129, 600, 128), (1, 8, 16), (300, 136, 640), (33, 72, 656)],
)
def test_body_on_numpy_is_the_reference(
    tile: ScaledMmTile, M: int, N: int, K: int, on_numpy: dict[int, gluon.OnNumPy]
) -> None:
    case = case_of(M, N, K, with_bias=M % 2 == 1)
    assert case.why_wrong(run(tile, case)) is None
    assert on_numpy[tile.block_m].constants["num_warps"] == 4


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("M", [64, 65, 200, 300, 449])
def test_no_token_is_asked_for_that_does_not_exist(
    tile: ScaledMmTile, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = hopper.load_within(M)
    monkeypatch.setattr(hopper, "load_block", load)
    case = case_of(M, 136, 144)
    assert case.why_wrong(run(tile, case)) is None


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("tile", SPLIT, ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K"), [(128, 512, 1408), (77, 344, 400), (1, 256, 128), (200, 384, 640)]
)
def test_programs_that_share_a_tile_on_numpy(tile: ScaledMmTile, M: int, N: int, K: int) -> None:
    """Steps of K need be no multiple of the programs that share them, nor be as many."""
    case = case_of(M, N, K, with_bias=M == 77)
    if most_shared_tokens(tile) < M:
        with pytest.raises(ValueError, match="arrivals must hold"):
            run(tile, case)
        return
    assert case.why_wrong(run(tile, case)) is None


@pytest.mark.usefixtures("on_numpy")
def test_scales_of_tokens_may_lie_as_they_like() -> None:
    case = case_of(200, 136, 400)
    by_group = case.x_scale.t().contiguous().t()
    apart = torch.full((200, 9), torch.nan)[:, 1::2]
    apart.copy_(case.x_scale)
    for tile in (DEEP, TALL, QUARTER):
        expected = run(tile, case)
        for scales in (by_group, apart):
            assert scales.stride() != case.x_scale.stride()
            assert torch.equal(run(tile, replace(case, x_scale=scales)), expected)


def test_tiles_are_for_blocks_alone_and_fit() -> None:
    for tile in (*TILES, *tiles_of_blocks()):
        assert why_not_for(tile, "fp8_block", 4096) is None
        assert "N % 8 == 0" in str(why_not_for(tile, "fp8_block", 4100))
        assert "fp8_block alone" in str(why_not_for(tile, "fp8_gemm", 4096))
    with pytest.raises(ValueError, match="blocks needs block_m × block_n 256×128 or 128×128 or"):
        replace(DEEP, block_n=256)
    with pytest.raises(ValueError, match="has room for 6 stages of 128×128, got 7"):
        replace(DEEP, num_stages=7)
    with pytest.raises(ValueError, match="has room for 4 stages of 256×128, got 5"):
        replace(TALL, num_stages=5)
    for unsplit in (replace(DEEP, kernel="turns"), TALL, QUARTER):
        with pytest.raises(ValueError, match=f"{unsplit.kernel} of .* needs split_k 1, got 2"):
            replace(unsplit, split_k=2)
    assert "over 64 features, got 4160" in str(why_not_for(SPLIT[0], "fp8_block", 4160))
    assert why_not_for(SPLIT[0], "fp8_block", 4168) is None
    case = case_of(1, 256, 128)
    with pytest.raises(ValueError, match="arrivals must hold 4 elements"):
        run(SPLIT[0], replace(case, arrivals=case.arrivals[:3]))


def test_every_tile_is_tried_and_compiled() -> None:
    assert set(tiles_of_blocks()) <= set(block_candidates(4096, 4096, 256))
    narrow = {tile for tile in tiles_of_blocks() if tile.block_n < 128 or tile.block_m < 128}
    assert narrow.isdisjoint(block_candidates(4096, 4096, 1024))
    assert set(tiles_of_blocks()).isdisjoint(block_candidates(4100, 4096, 1024))
    few = {tile for tile in tiles_of_blocks() if tile.block_m == 64}
    assert few == set(tiles_of_blocks()) & set(block_candidates(4096, 4096, 32))
    compiled = {
        v.tile for v in scaled_mm_forms.kernel_variants() if v.label.startswith("fp8_block block")
    }
    assert set(tiles_of_blocks()) <= compiled


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gpu_matches_the_reference(tile: ScaledMmTile) -> None:
    for M, N, K in ((333, 1104, 400), (1, 8, 16), (2100, 3000, 2064)):
        out_dtype = torch.bfloat16 if M == 333 else torch.float16
        case = case_of(M, N, K, with_bias=M == 333, out_dtype=out_dtype, device="cuda")
        actual = run(tile, case)
        assert case.why_wrong(actual) is None
        for _ in range(3):
            assert torch.equal(run(tile, case), actual), "bits differ between runs"
        by_group = replace(case, x_scale=case.x_scale.t().contiguous().t())
        assert torch.equal(run(tile, by_group), actual)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", SPLIT, ids=str)
def test_gpu_programs_that_share_a_tile(tile: ScaledMmTile) -> None:
    for M, N, K in ((128, 4096, 4096), (77, 1104, 2064), (1, 256, 128), (256, 4096, 14336)):
        if most_shared_tokens(tile) < M:
            continue
        case = case_of(M, N, K, with_bias=M == 77, device="cuda")
        actual = run(tile, case)
        assert case.why_wrong(actual) is None
        for _ in range(20):
            assert torch.equal(run(tile, case), actual), "bits differ between runs"


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("extreme", FP8_EXTREMES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gpu_extreme_values(tile: ScaledMmTile, extreme: str) -> None:
    case = extreme_case(extreme, 70, 1104, 2064, scaling="block", device="cuda")
    # Rows are equal, and every second feature. What the tensor cores lose is no error of ours.
    expected = cut_results(case).repeat(len(case.x), len(case.weight) // 2)
    torch.testing.assert_close(run(tile, case), expected, rtol=2**-10, atol=0)


def test_the_sums_of_an_h100() -> None:
    """The card's error on 2026-11-25, in fp16: the model of its sums has to make the same."""
    case = extreme_case("least e4m3", 70, 2, 2064, scaling="block")
    error = testing.max_error(cut_results(case), case.gold()[:1])
    assert error == pytest.approx(0.5586, rel=5e-4)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(("tile", "M"), [(DEEP, 300), (TALL, 300), (SPLIT[0], 100)], ids=str)
def test_gpu_graph_replay_follows_the_operands(tile: ScaledMmTile, M: int) -> None:
    case = case_of(M, 328, 400, device="cuda")
    run(tile, case)
    operands = (case.x, case.weight, case.x_scale, case.weight_scale, None, case.arrivals)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch_block(tile, *operands, case.out_dtype)
    for seed in (1, 2):
        other = case_of(M, 328, 400, device="cuda", seed=seed)
        for name in ("x", "weight", "x_scale", "weight_scale"):
            getattr(case, name).copy_(getattr(other, name))
        graph.replay()
        assert other.why_wrong(y) is None
