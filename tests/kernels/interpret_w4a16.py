"""Run by test_w4a16_gemm.py with TRITON_INTERPRET=1: the jit kernel and launcher on CPU tensors.

In its own process, since Triton reads the variable when it is imported. Only fp16 and fp32: under
the interpreter of Triton 3.9 bf16 arithmetic is silently garbage (bit patterns multiplied as
integers); bf16 runs on a GPU.
"""

import sys

import torch

from taut_kernels import testing
from taut_kernels.gemm import w4a16

DTYPES = (torch.float16, torch.float32)
AWKWARD = [
    # M, N, K, group size: M off every tile, N off a tile and not a multiple of 8, K with a partial
    # last block
    (1, 64, 128, 32),
    (1, 16, 16, -1),
    (3, 40, 576, 64),
    (17, 72, 256, 128),
    (63, 100, 288, 32),
    (70, 65, 96, 32),
    (2, 20, 576, -1),
    (130, 24, 128, 64),
]


def check(case: testing.W4A16Case) -> None:
    with testing.nan_poison():
        actual = w4a16._launch_w4a16_gemm(*case.operands())
    testing.assert_within_budget(actual, case.gold(), w4a16.w4a16_gemm_ref(*case.operands()))


def awkward_shapes() -> int:
    count = 0
    for dtype in DTYPES:
        for shape in AWKWARD:
            for asymmetric in (False, True):
                check(
                    testing.make_w4a16_case(
                        *shape, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric
                    )
                )
                count += 1
    return count


def strided_and_offset_inputs() -> int:
    case = testing.make_w4a16_case(5, 48, 160, 32, dtype=torch.float16, asymmetric=True)
    wide = torch.full((11, 200), float("nan"), dtype=torch.float16)
    wide[1:11:2, 7:167] = case.x
    views = [wide[1:11:2, 7:167], case.x.t().contiguous().t()]
    for view in views:
        assert view.stride() != case.x.stride()
        operands = (view, *case.operands()[1:])
        with testing.nan_poison():
            actual = w4a16._launch_w4a16_gemm(*operands)
        testing.assert_within_budget(actual, case.gold(), w4a16.w4a16_gemm_ref(*operands))
    return len(views)


def adversarial_values() -> int:
    base = testing.make_w4a16_case(4, 32, 128, 32, dtype=torch.float16, asymmetric=True)
    tiny = torch.finfo(torch.float16).smallest_normal / 4
    edits = (
        lambda: base.x.zero_(),
        lambda: base.x.fill_(-0.0),
        lambda: base.x[:, 5].fill_(20000.0),
        lambda: base.x.fill_(8.0),
        lambda: (base.scales.fill_(tiny), base.weight_scale.fill_(tiny)),
    )
    for edit in edits:
        edit()
        check(base)
    return len(edits)


def empty_batch() -> int:
    case = testing.make_w4a16_case(0, 32, 64, 32, dtype=torch.float16)
    assert w4a16._launch_w4a16_gemm(*case.operands()).shape == (0, 32)
    return 1


CHECKS = {
    check.__name__: check
    for check in (awkward_shapes, strided_and_offset_inputs, adversarial_values, empty_batch)
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(f"{name} {CHECKS[name]()}\n")
