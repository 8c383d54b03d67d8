"""Run by test_scaled_mm.py with TRITON_INTERPRET=1: the 8-bit kernels and launchers on CPU tensors.

In its own process, since Triton reads the variable when it is imported. Results are fp16: under the
interpreter of Triton 3.9 bf16 arithmetic is silently garbage. e4m3 is trusted here because
``e4m3_is_right`` checks every finite value's product first.
"""

import itertools
import sys
from collections.abc import Callable

import torch

from taut_bench import testing
from taut_bench.testing.scaled_mm import ScaledMmCase, make_scaled_mm_case
from taut_kernels.gemm.scaled_mm import dispatch as scaled_mm_launch
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile

RING = ScaledMmTile("ring", 16, 64, 64, 4, 3)
SPLIT = ScaledMmTile("ring", 32, 64, 64, 4, 3, split_k=3)
BLOCK = ScaledMmTile("ring", 16, 64, 128, 4, 3)
BLOCK_SPLIT = ScaledMmTile("ring", 32, 64, 128, 4, 3, split_k=2)
AWKWARD = [
    # M, N, K: M off every tile, N off a tile, K with a partial last step
    (1, 64, 128),
    (1, 8, 16),
    (17, 72, 272),
    (30, 200, 176),
]


def check(case: ScaledMmCase, tile: ScaledMmTile) -> None:
    launch = scaled_mm_launch.launch
    operands = case.operands()
    if case.op == "fp8_gemm" and fp8.is_block_wise(case.weight, case.weight_scale):
        launch = scaled_mm_launch.launch_block
    elif case.op == "fp8_gemm":
        operands = (*operands[:4], None, None, *operands[4:])
    with testing.nan_poison():
        actual = launch(tile, *operands)
    testing.assert_within_budget(actual, case.gold(), case.reference())
    if case.op == "w8a8_gemm":
        assert torch.equal(actual, case.reference()), "int8 sums are exact: same bits"
    assert not case.arrivals.any(), "arrivals must be 0 after a call"


def e4m3_is_right() -> int:
    """Every pair of finite e4m3 values: products are exact in fp32, so the bits must agree."""
    values = torch.arange(256, dtype=torch.uint8).view(fp8.DTYPE)
    values = values[torch.isfinite(values.float())]
    count = len(values)
    x = torch.zeros(count, 16, dtype=torch.uint8).view(fp8.DTYPE)
    weight = torch.zeros(count, 16, dtype=torch.uint8).view(fp8.DTYPE)
    x.view(torch.uint8)[:, 0] = values.view(torch.uint8)
    weight.view(torch.uint8)[:, 3] = values.view(torch.uint8)
    x.view(torch.uint8)[:, 3] = values.view(torch.uint8)
    one = torch.ones(1)
    # fp32 results, which only the interpreter's caller asks for: nothing is rounded.
    y = scaled_mm_launch.launch(RING, x, weight, one, one, None, None, None, None, torch.float32)
    assert torch.equal(y, values.float()[:, None] * values.float()[None, :])
    return count


def ring() -> int:
    count = 0
    for op, shape, tile in itertools.product(("w8a8_gemm", "fp8_gemm"), AWKWARD, (RING, SPLIT)):
        for scaling, with_bias in (("tensor", False), ("row", True)):
            check(make_scaled_mm_case(op, *shape, scaling=scaling, with_bias=with_bias), tile)
            count += 1
    return count


def zero_points() -> int:
    count = 0
    for kind, tile in itertools.product(("static", "token"), (RING, SPLIT)):
        case = make_scaled_mm_case("w8a8_gemm", 19, 72, 208, zero_points=kind, with_bias=True)
        check(case, tile)
        count += 1
    return count


def blocks() -> int:
    count = 0
    for shape, tile in itertools.product(AWKWARD, (BLOCK, BLOCK_SPLIT)):
        for N in (shape[1], shape[1] + 136):
            M, K = shape[0], shape[2] + 240
            check(make_scaled_mm_case("fp8_gemm", M, N, K, scaling="block", with_bias=True), tile)
            count += 1
    return count


def saturated() -> int:
    """Largest magnitudes along a long K, where int32 sums reach 2**30 and more."""
    K = 65520
    cases = [(-128, -128), (-128, 127), (127, 127)]
    for left, right in cases:
        case = make_scaled_mm_case("w8a8_gemm", 2, 8, K)
        case.x.fill_(left)
        case.weight.fill_(right)
        case.x_scale.fill_(2.0**-20)
        case.weight_scale.fill_(2.0**-8)
        check(case, ScaledMmTile("ring", 16, 64, 4096, 4, 1))
        check(case, ScaledMmTile("ring", 16, 64, 4096, 4, 1, split_k=4))
    return len(cases)


def fp8_adversarial_values() -> int:
    """Zeros of either sign, the largest and least magnitudes, an outlier, scales at the ends."""
    largest, least = 448.0, 2.0**-9

    def filled(value: float) -> Callable[[ScaledMmCase], object]:
        return lambda case: (case.x.fill_(value), case.weight.fill_(-value))

    def outlier(case: ScaledMmCase) -> None:
        case.x[:, 5] = largest
        case.weight[::2, 5] = -largest

    edits: tuple[tuple[Callable[[ScaledMmCase], object], float], ...] = (
        (filled(0.0), 1.0),
        (filled(-0.0), 1.0),
        (filled(largest), 2.0**-16),
        (filled(least), 2.0**8),
        (outlier, 2.0**-6),
        # Products of scales below fp32's normal range would be lost; one of them may be subnormal.
        (lambda case: case.x_scale.fill_(2.0**-130), 2.0**120),
    )
    for edit, scale in edits:
        for scaling, tile in (("row", RING), ("row", SPLIT), ("tensor", RING), ("block", BLOCK)):
            case = make_scaled_mm_case("fp8_gemm", 5, 72, 272, scaling=scaling)
            case.x_scale.fill_(1.0)
            edit(case)
            case.weight_scale.fill_(scale)
            check(case, tile)
    return len(edits)


def strided_and_offset_inputs() -> int:
    case = make_scaled_mm_case("w8a8_gemm", 5, 48, 160)
    wide = torch.full((11, 203), 99, dtype=torch.int8)
    wide[1:11:2, 7:167] = case.x
    rows = torch.full((48, 256), 99, dtype=torch.int8)
    rows[:, 32:192] = case.weight
    views = [
        (wide[1:11:2, 7:167], case.weight),
        (case.x.t().contiguous().t(), case.weight),
        (case.x, rows[:, 32:192]),
    ]
    for x, weight in views:
        for tile in (RING, SPLIT):
            with testing.nan_poison():
                actual = scaled_mm_launch.launch(tile, x, weight, *case.operands()[2:])
            assert torch.equal(actual, case.reference())
    return len(views)


def empty_batch() -> int:
    for op in ("w8a8_gemm", "fp8_gemm"):
        case = make_scaled_mm_case(op, 0, 32, 64)
        zeros = (None, None)
        operands = (*case.operands()[:4], *zeros, *case.operands()[-3:])
        assert scaled_mm_launch.launch(RING, *operands).shape == (0, 32)
    return 2


CHECKS = {
    check.__name__: check
    for check in (
        e4m3_is_right,
        ring,
        zero_points,
        blocks,
        saturated,
        fp8_adversarial_values,
        strided_and_offset_inputs,
        empty_batch,
    )
}


def main(names):
    for name in names:
        sys.stdout.write(f"{name} {CHECKS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
