"""Kernel ``pairs`` of FP8 with 128 × 128 blocks of weights: its body on NumPy, and the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulator import gluon, hopper

from taut_bench.instruments.forms import scaled_mm as scaled_mm_forms
from taut_bench.testing.scaled_mm import (
    EXTREMES,
    ScaledMmCase,
    cut_results,
    extreme_case,
    make_scaled_mm_case,
)
from taut_bench.testing.scaled_mm import launch_block_case as run
from taut_kernels.gemm.scaled_mm import blocks_pairs as fp8_block_pairs
from taut_kernels.gemm.scaled_mm.blocks_pairs_kernel import fp8_block_pairs_kernel
from taut_kernels.gemm.scaled_mm.dispatch import launch_block
from taut_kernels.gemm.scaled_mm.tile import OPS, ScaledMmTile, why_not_for
from taut_kernels.launch import launcher
from tuning.scaled_mm_candidates import block_candidates

WHOLE, HALF, WIDE, SHALLOW, SPLIT, SPLIT_WIDE = LATE = tuple(
    ScaledMmTile("pairs", block_m, 64, 256, 4, stages, split_k)
    for block_m, stages, split_k in (
        (16, 4, 1), (32, 6, 1), (64, 6, 1), (32, 2, 1), (16, 3, 4), (64, 4, 3),
    )
)  # fmt: skip
BROAD = ScaledMmTile("pairs", 32, 128, 256, 4, 3)
TILES = (*LATE, BROAD, replace(HALF, early=True, prefetch=4), replace(SPLIT, early=True))
FP8_EXTREMES = [name for name, (op, *_) in EXTREMES.items() if op == "fp8_gemm"]


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> gluon.OnNumPy:
    kernel = gluon.OnNumPy(fp8_block_pairs_kernel, hopper.run)
    monkeypatch.setattr(fp8_block_pairs, "_pairs", launcher.Launcher(kernel))
    return kernel


def case_of(M: int, N: int, K: int, **options: Any) -> ScaledMmCase:
    return make_scaled_mm_case("fp8_gemm", M, N, K, scaling="block", **options)


def check(tile: ScaledMmTile, case: ScaledMmCase, times: int = 1) -> torch.Tensor:
    """Hold a result to the reference, and further ones to its bits."""
    actual = run(tile, case)
    reason = case.why_wrong(actual)
    assert reason is None, reason
    for _ in range(times):
        assert torch.equal(run(tile, case), actual), "the same bits from run to run"
    return actual


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(1, 8, 16), (7, 136, 272), (16, 72, 2048), (33, 264, 1168), (50, 200, 1408), (129, 64, 384)],
)
def test_body_on_numpy_is_the_reference(tile: ScaledMmTile, M: int, N: int, K: int) -> None:
    tokens = min(M, tile.block_m) if tile.split_k > 1 else M
    out_dtype = torch.float16 if M % 2 else torch.bfloat16
    check(tile, case_of(tokens, N, K, with_bias=M % 2 == 1, out_dtype=out_dtype))


@pytest.mark.usefixtures("on_numpy")
def test_parts_without_a_step_add_nothing() -> None:
    check(SPLIT, case_of(9, 128, 384))


@pytest.mark.usefixtures("on_numpy")
def test_scales_and_rows_may_lie_as_they_like() -> None:
    case = case_of(20, 136, 400)
    expected = run(HALF, case)
    by_group = case.x_scale.t().contiguous().t()
    apart = torch.full((20, 9), torch.nan)[:, 1::2]
    apart.copy_(case.x_scale)
    for scales in (by_group, apart):
        assert torch.equal(run(HALF, replace(case, x_scale=scales)), expected)
    rows = torch.zeros(20, 448, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, 16:416]
    rows.copy_(case.x)
    assert torch.equal(run(HALF, replace(case, x=rows)), expected)


def test_nothing_is_compiled_by_the_number_of_tokens(on_numpy: gluon.OnNumPy) -> None:
    for M in (1, 16, 17, 32, 40):
        check(HALF, case_of(M, 64, 256))
        assert on_numpy.grid == (1, 1, -(-M // 32))
    assert len(fp8_block_pairs._pairs._forms) == 1


def test_tiles_fit() -> None:
    for tile in TILES:
        for op in OPS:
            assert why_not_for(tile, op, 4096) is None
            assert "N % 8 == 0" in str(why_not_for(tile, op, 4100))
    size = "pairs needs block_m of at most 64, block_n 64, 128 or 256 and block_k 256"
    for other in ({"block_m": 128, "num_stages": 4}, {"block_n": 32}, {"block_k": 128}):
        with pytest.raises(ValueError, match=size):
            replace(HALF, **other)
    with pytest.raises(ValueError, match="pairs splits K with block_n 64 only, got 128"):
        replace(BROAD, split_k=2)
    assert "no room for the sums" in str(why_not_for(replace(BROAD, block_m=64), "fp8_block", 4096))
    with pytest.raises(ValueError, match="pairs needs num_warps 4"):
        replace(HALF, num_warps=8)
    with pytest.raises(ValueError, match="pairs needs num_stages of at least 2"):
        replace(HALF, num_stages=1)
    with pytest.raises(ValueError, match="pairs has room for 9 stages of 32×64×256, got 10"):
        replace(HALF, num_stages=10)
    with pytest.raises(ValueError, match="arrivals must hold 2 elements"):
        case = case_of(1, 128, 256)
        run(SPLIT, replace(case, arrivals=case.arrivals[:1]))


def test_tiles_are_tried_and_compiled() -> None:
    tried = {tile for tile in block_candidates(4096, 4096, 32) if tile.kernel == "pairs"}
    assert {tile.block_m for tile in tried} == {16, 32}
    compiled = {v.tile for v in scaled_mm_forms.kernel_variants() if "block pairs" in v.label}
    assert {tile.block_m for tile in compiled} == {16, 32, 64}


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gpu_matches_the_reference(tile: ScaledMmTile) -> None:
    shapes = ((1, 8, 16), (7, 1104, 400), (16, 4096, 4096), (50, 3000, 14336), (64, 136, 2064))
    for M, N, K in shapes:
        tokens = min(M, tile.block_m) if tile.split_k > 1 else M
        out_dtype = torch.bfloat16 if M == 7 else torch.float16
        case = case_of(tokens, N, K, with_bias=M == 7, out_dtype=out_dtype, device="cuda")
        actual = check(tile, case, times=10)
        by_group = replace(case, x_scale=case.x_scale.t().contiguous().t())
        assert torch.equal(run(tile, by_group), actual)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("extreme", FP8_EXTREMES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gpu_extreme_values(tile: ScaledMmTile, extreme: str) -> None:
    case = extreme_case(extreme, 14, 1104, 2064, scaling="block", device="cuda")
    # Rows are equal, and every second feature. What the tensor cores lose is no error of ours.
    expected = cut_results(case).repeat(len(case.x), len(case.weight) // 2)
    torch.testing.assert_close(run(tile, case), expected, rtol=2**-10, atol=0)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", [HALF, SPLIT], ids=str)
def test_gpu_graph_replay_follows_the_operands(tile: ScaledMmTile) -> None:
    case = case_of(13, 328, 2000, device="cuda")
    run(tile, case)
    operands = (case.x, case.weight, case.x_scale, case.weight_scale, None, case.arrivals)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch_block(tile, *operands, case.out_dtype)
    for seed in (1, 2):
        other = case_of(13, 328, 2000, device="cuda", seed=seed)
        for name in ("x", "weight", "x_scale", "weight_scale"):
            getattr(case, name).copy_(getattr(other, name))
        graph.replay()
        assert other.why_wrong(y) is None
