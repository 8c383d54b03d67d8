"""Kernel ``pairs`` of FP8 and int8 products of few tokens: its body on NumPy, and the GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from emulator import gluon, hopper

from taut_bench import testing
from taut_bench.instruments.forms import scaled_mm as scaled_mm_forms
from taut_bench.testing.scaled_mm import ScaledMmCase, make_scaled_mm_case
from taut_bench.testing.scaled_mm import launch_case as run
from taut_kernels.gemm.scaled_mm import pairs as scaled_mm_pairs
from taut_kernels.gemm.scaled_mm.pairs_kernel import scaled_mm_pairs_kernel
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile, tiles_of_pairs
from taut_kernels.launch import launcher
from tuning.scaled_mm_candidates import candidates

TILES = (
    *tiles_of_pairs(),
    ScaledMmTile("pairs", 16, 64, 256, 4, 8),
    ScaledMmTile("pairs", 16, 256, 256, 4, 3),
    ScaledMmTile("pairs", 32, 64, 256, 4, 2),
    ScaledMmTile("pairs", 16, 64, 256, 4, 3, 4),
    ScaledMmTile("pairs", 64, 64, 256, 4, 6, 2),
    ScaledMmTile("pairs", 32, 64, 256, 4, 6, early=True, prefetch=4),
)
SPLIT = TILES[-3]


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> gluon.OnNumPy:
    kernel = gluon.OnNumPy(scaled_mm_pairs_kernel, hopper.run)
    monkeypatch.setattr(scaled_mm_pairs, "_pairs", launcher.Launcher(kernel))
    return kernel


def check(tile: ScaledMmTile, case: ScaledMmCase, times: int = 1) -> None:
    """Hold a result to the reference, int8 to its bits, and further ones to the first."""
    with testing.nan_poison():
        actual = run(tile, case)
    reason = case.why_wrong(actual)
    assert reason is None, reason
    # With a bias a GPU rounds once, the reference twice.
    if case.op == "w8a8_gemm" and (case.bias is None or not actual.is_cuda):
        assert torch.equal(actual, case.reference()), "int8 sums are exact: same bits"
    assert not case.arrivals.any(), "for the next call"
    for _ in range(times):
        assert torch.equal(actual, run(tile, case)), "the same bits from run to run"


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("op", "M", "N", "K", "scaling", "zero_points"),
    [
        ("fp8_gemm", 50, 136, 1040, "row", "none"),
        ("fp8_gemm", 1, 8, 16, "tensor", "none"),
        ("fp8_gemm", 16, 72, 2048, "row", "none"),
        ("w8a8_gemm", 7, 328, 784, "row", "token"),
        ("w8a8_gemm", 33, 200, 272, "tensor", "static"),
        ("w8a8_gemm", 129, 64, 1536, "row", "none"),
    ],
)
def test_body_on_numpy_is_the_reference(
    tile: ScaledMmTile, op: str, M: int, N: int, K: int, scaling: str, zero_points: str
) -> None:
    tokens = min(M, tile.block_m) if tile.split_k > 1 else M
    case = make_scaled_mm_case(
        op,
        tokens,
        N,
        K,
        scaling=scaling,
        zero_points=zero_points,
        with_bias=M % 2 == 1,
        out_dtype=torch.float16 if M % 2 else torch.bfloat16,
    )
    check(tile, case)


@pytest.mark.usefixtures("on_numpy")
def test_parts_without_a_step_add_nothing() -> None:
    check(SPLIT, make_scaled_mm_case("w8a8_gemm", 9, 128, 384))


def test_nothing_is_compiled_by_the_number_of_tokens(on_numpy: gluon.OnNumPy) -> None:
    tile = TILES[1]
    for M in (1, 16, 17, 32, 40):
        check(tile, make_scaled_mm_case("fp8_gemm", M, 64, 256))
        assert on_numpy.grid == (1, 1, -(-M // 32))
    assert len(scaled_mm_pairs._pairs._forms) == 1


@pytest.mark.usefixtures("on_numpy")
def test_rows_apart_are_read_in_place() -> None:
    case = make_scaled_mm_case("w8a8_gemm", 20, 136, 400)
    rows = torch.zeros(20, 448, dtype=torch.int8)[:, 16:416]
    rows.copy_(case.x)
    assert torch.equal(run(TILES[1], dataclasses.replace(case, x=rows)), case.reference())


@pytest.mark.parametrize("fp8", [False, True])
def test_tiles_are_tried_and_compiled(fp8: bool) -> None:
    def tried(M: int) -> set[int]:
        found = candidates(4096, 4096, M, fp8=fp8)
        return {tile.block_m for tile in found if tile.kernel == "pairs"}

    assert [tried(M) for M in (1, 32, 64, 128, 256)] == [{16}, {16, 32}, {32, 64}, {64}, set()]
    assert not any(tile.kernel == "pairs" for tile in candidates(4100, 4096, 16, fp8=fp8))
    label = f"{'fp8_gemm' if fp8 else 'w8a8_gemm'} pairs"
    compiled = {v.tile for v in scaled_mm_forms.kernel_variants() if v.label.startswith(label)}
    assert set(tiles_of_pairs()) <= compiled


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("op", ["fp8_gemm", "w8a8_gemm"])
def test_gpu_matches_the_reference(op: str, tile: ScaledMmTile) -> None:
    shapes: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
        (1, 8, 16, {}),
        (7, 1104, 400, {"with_bias": True}),
        (16, 4096, 4096, {}),
        (50, 3000, 14336, {"scaling": "tensor"}),
        (64, 136, 2064, {"out_dtype": torch.float16}),
    )
    for M, N, K, options in shapes:
        tokens = min(M, tile.block_m) if tile.split_k > 1 else M
        check(tile, make_scaled_mm_case(op, tokens, N, K, device="cuda", **options), times=10)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("zero_points", ["static", "token"])
def test_gpu_zero_points(zero_points: str, tile: ScaledMmTile) -> None:
    options: dict[str, Any] = {"zero_points": zero_points, "with_bias": True, "device": "cuda"}
    check(tile, make_scaled_mm_case("w8a8_gemm", 13, 1104, 2064, **options), times=3)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("op", ["fp8_gemm", "w8a8_gemm"])
@pytest.mark.parametrize("tile", [TILES[1], SPLIT], ids=str)
def test_gpu_graph_replay_follows_the_operands(tile: ScaledMmTile, op: str) -> None:
    case = make_scaled_mm_case(op, 13, 328, 2000, device="cuda")
    run(tile, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(tile, case)
    for seed in (1, 2):
        other = make_scaled_mm_case(op, 13, 328, 2000, device="cuda", seed=seed)
        for name in ("x", "weight", "x_scale", "weight_scale"):
            getattr(case, name).copy_(getattr(other, name))
        graph.replay()
        assert other.why_wrong(y) is None
