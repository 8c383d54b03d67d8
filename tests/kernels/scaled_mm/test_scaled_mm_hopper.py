"""The 8-bit products' kernels of sm_90: their bodies on NumPy, their tiles, and the GPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from emulator import hopper
from emulator.memory import Shared, block, floats
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taut_bench import testing
from taut_bench.testing.scaled_mm import (
    EXTREMES,
    ScaledMmCase,
    cut_results,
    extreme_case,
    make_scaled_mm_case,
)
from taut_kernels.gemm.scaled_mm import hopper as scaled_mm_hopper
from taut_kernels.gemm.scaled_mm.dispatch import launch
from taut_kernels.gemm.scaled_mm.hopper_kernel import scaled_mm_hopper_kernel
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.gemm.scaled_mm.turns_kernel import scaled_mm_turns_kernel
from taut_kernels.launch import launcher

WIDE, SQUARE = (
    ScaledMmTile("hopper", 128, block_n, 128, 4, stages, group_m=group_m)
    for block_n, stages, group_m in ((256, 4, 2), (128, 6, 3))
)
SHALLOW = ScaledMmTile("hopper", 128, 256, 128, 4, 2)
TURNS, TURNS_SHALLOW, TURNS_WIDE = (
    ScaledMmTile("turns", block_m, block_n, 128, 4, stages, group_m=group_m)
    for block_m, block_n, stages, group_m in ((128, 128, 6, 2), (128, 128, 2, 3), (64, 256, 5, 3))
)
PARTS = tuple(
    ScaledMmTile(kernel, block_m, block_n, 128, 4, stages, group_m=2)
    for kernel, block_m, block_n, stages in (
        ("hopper", 128, 160, 5),
        ("hopper", 128, 192, 2),
        ("turns", 128, 160, 2),
        ("turns", 64, 160, 6),
        ("turns", 64, 192, 6),
    )
)
TILES = (WIDE, SQUARE, SHALLOW, TURNS, TURNS_SHALLOW, TURNS_WIDE, *PARTS)


def each_tile(*cases: tuple[Any, ...]) -> list[Any]:
    """Return parameters: every tile with every case whose op, the first item, it is for."""
    return [
        pytest.param(tile, *case, id="-".join(map(str, (tile, *case))))
        for tile, case in itertools.product(TILES, cases)
        # Triton has no int8 product of 256 columns.
        if (tile.kernel, tile.block_n, case[0]) != ("turns", 256, "w8a8_gemm")
    ]


class OnNumPy:
    """Stands in for a jit kernel: runs it on NumPy."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            named = dict(zip(self.arg_names, arguments, strict=False)) | constants
            hopper.run(self.kernel, grid[0], named)

        return run


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kernel in (("_hopper", scaled_mm_hopper_kernel), ("_turns", scaled_mm_turns_kernel)):
        monkeypatch.setattr(scaled_mm_hopper, name, launcher.Launcher(OnNumPy(kernel)))


def run(tile: ScaledMmTile, case: ScaledMmCase) -> torch.Tensor:
    with testing.nan_poison():
        return launch(
            tile,
            case.x,
            case.weight,
            case.x_scale,
            case.weight_scale,
            case.azp_adj,
            case.azp,
            case.bias,
            None,
            case.out_dtype,
        )


def check(tile: ScaledMmTile, case: ScaledMmCase) -> None:
    actual = run(tile, case)
    reason = case.why_wrong(actual)
    assert reason is None, reason
    if case.op == "w8a8_gemm":
        assert torch.equal(actual, case.reference()), "int8 sums are exact: same bits"


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize(
    ("tile", "op", "M", "N", "K", "scaling", "zero_points"),
    each_tile(
        ("fp8_gemm", 333, 520, 400, "row", "none"),
        ("w8a8_gemm", 700, 264, 272, "row", "token"),
        ("w8a8_gemm", 129, 600, 128, "tensor", "static"),
        ("fp8_gemm", 1, 8, 16, "tensor", "none"),
    ),
)
def test_body_on_numpy_is_the_reference(
    tile: ScaledMmTile, op: str, M: int, N: int, K: int, scaling: str, zero_points: str
) -> None:
    case = make_scaled_mm_case(
        op, M, N, K, scaling=scaling, zero_points=zero_points, with_bias=M % 2 == 1
    )
    check(tile, case)


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("tile", [WIDE, TURNS, PARTS[0]], ids=str)
def test_extreme_values_on_numpy(tile: ScaledMmTile, extreme: str) -> None:
    check(tile, extreme_case(extreme, 70, 264, 400))


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("M", [128, 129, 200, 321])
def test_no_token_is_asked_for_that_does_not_exist(
    tile: ScaledMmTile, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = hopper.load_within(M)
    monkeypatch.setattr(hopper, "load_block", load)
    check(tile, make_scaled_mm_case("fp8_gemm", M, 136, 144))


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("tiles", range(1, 7))
def test_groups_in_turns_end_at_any_number_of_tiles(tiles: int) -> None:
    """One group may have a tile more than the other, or all, and programs none."""
    check(TURNS_SHALLOW, make_scaled_mm_case("w8a8_gemm", 24, 128 * tiles, 384))


def test_tma_is_told_of_no_rows_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(scaled_mm_hopper, "_hopper", lambda *arguments: asked.append(arguments))
    case = make_scaled_mm_case("w8a8_gemm", 1, 40, 64)
    wide = torch.zeros(5, 96, dtype=torch.int8)[:, :64]
    odd = case.x.as_strided((1, 64), (3, 1))
    for x in (case.x.expand(5, 64), wide, odd):
        launch(WIDE, x, case.weight, torch.ones(1), *case.operands()[3:])
    found = [arguments[3][0] for arguments in asked]
    assert [(d.shape, d.strides) for d in found] == [
        ([5, 64], [64, 1]),
        ([5, 64], [96, 1]),
        ([1, 64], [64, 1]),
    ]
    assert found[1].base is wide, "not copied"


def test_a_place_overwritten_while_its_block_is_stored_shows() -> None:
    y = torch.zeros(64, 64)
    descriptor = hopper.Descriptor(
        TensorDescriptor(y.half(), [64, 64], [64, 1], [64, 64], scaled_mm_hopper.RESULT_LAYOUT)
    )
    place = Shared(np.zeros((64, 64), np.float32))
    place.store(block(np.full((64, 64), 1.0)))
    hopper.store_block(descriptor, (32, 0), place)
    place.store(block(np.full((64, 64), 2.0)))
    hopper.wait_stores(0)
    written = floats(descriptor.memory, "f16")
    assert (written[32:] == 2.0).all(), "what was there when somebody waited"
    assert (written[:32] == 0.0).all()


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(
    ("tile", "op", "scaling", "zero_points"),
    each_tile(
        ("fp8_gemm", "tensor", "none"),
        ("fp8_gemm", "row", "none"),
        ("w8a8_gemm", "row", "none"),
        ("w8a8_gemm", "row", "static"),
        ("w8a8_gemm", "tensor", "token"),
    ),
)
def test_gpu_matches_the_reference(
    tile: ScaledMmTile, op: str, scaling: str, zero_points: str
) -> None:
    for M, N, K in ((333, 1104, 400), (1, 8, 16), (2100, 3000, 2064)):
        case = make_scaled_mm_case(
            op,
            M,
            N,
            K,
            scaling=scaling,
            zero_points=zero_points,
            with_bias=M == 333,
            out_dtype=torch.bfloat16 if M == 333 else torch.float16,
            device="cuda",
        )
        actual = run(tile, case)
        assert case.why_wrong(actual) is None
        # Exact sums; the bias may be fused into a multiplication.
        assert op == "fp8_gemm" or M == 333 or torch.equal(actual, case.reference())


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gpu_extreme_values(tile: ScaledMmTile, extreme: str) -> None:
    if (tile.kernel, tile.block_n, EXTREMES[extreme][0]) == ("turns", 256, "w8a8_gemm"):
        pytest.skip("Triton has no int8 product of 256 columns")
    case = extreme_case(extreme, 70, 1104, 2064, device="cuda")
    if case.op == "w8a8_gemm":
        check(tile, case)
        return
    # Rows are equal, and every second feature. What the tensor cores lose is no error of ours.
    expected = cut_results(case).repeat(len(case.x), len(case.weight) // 2)
    torch.testing.assert_close(run(tile, case), expected, rtol=2**-10, atol=0)


def test_the_sums_of_an_h200() -> None:
    """Errors the card made on 2026-11-23, in fp16: the model of its sums has to make the same."""
    for extreme, measured in (("largest e4m3", 109.3), ("least e4m3", 8.059)):
        case = extreme_case(extreme, 70, 2, 2064)
        error = testing.max_error(cut_results(case), case.gold()[:1])
        assert error == pytest.approx(measured, rel=5e-4)
