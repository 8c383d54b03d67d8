"""`taut::w4a16_gemm_cpu` (ATen's int4 kernel) held to the specification of `taut::w4a16_gemm`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taut_bench import testing
from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16.cpu import w4a16_gemm_cpu, why_not_supported

BF16 = torch.bfloat16


def _layout(case: testing.W4A16Case) -> tuple[torch.Tensor, torch.Tensor]:
    K = case.values.shape[1]
    return formats.repack_for_cpu(case.weight_packed, case.weight_scale, case.weight_zero_point, K)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("M", [1, 3, 17, 63])
@pytest.mark.parametrize(
    ("N", "K", "group_size"),
    [(16, 32, 32), (48, 576, 64), (80, 256, 128), (112, 96, -1), (576, 1536, -1)],
)
def test_matches_reference(M: int, N: int, K: int, group_size: int, asymmetric: bool) -> None:
    case = testing.make_w4a16_case(
        M, N, K, group_size, dtype=BF16, asymmetric=asymmetric, with_bias=asymmetric
    )
    actual = w4a16_gemm_cpu(case.x, *_layout(case), bias=case.bias)
    reference = case.reference()
    testing.assert_within_budget(actual, case.gold(), reference)


def test_strided_inputs() -> None:
    case = testing.make_w4a16_case(6, 32, 64, 32, dtype=BF16)
    layout = _layout(case)
    expected = w4a16_gemm_cpu(case.x, *layout)
    wide = torch.full((13, 99), float("nan"), dtype=BF16)
    wide[1:13:2, 5:69] = case.x
    assert torch.equal(w4a16_gemm_cpu(wide[1:13:2, 5:69], *layout), expected)
    assert torch.equal(w4a16_gemm_cpu(case.x.t().contiguous().t(), *layout), expected)
    assert torch.equal(w4a16_gemm_cpu(case.x.view(2, 3, 64), *layout).view(6, 32), expected)


def test_empty_batch() -> None:
    case = testing.make_w4a16_case(0, 32, 64, 32, dtype=BF16)
    assert w4a16_gemm_cpu(case.x, *_layout(case)).shape == (0, 32)


def test_adversarial_values() -> None:
    case = testing.make_w4a16_case(4, 32, 128, 32, dtype=BF16)
    case.x[0] = 0
    case.x[1] = -0.0
    case.x[2, 7] = 1e20
    actual = w4a16_gemm_cpu(case.x, *_layout(case))
    gold, reference = case.gold(), case.reference()
    for row in range(4):
        testing.assert_within_budget(actual[row], gold[row], reference[row])
    assert not actual[:2].any()


@pytest.mark.parametrize("with_bias", [False, True])
def test_op_contract(with_bias: bool) -> None:
    case = testing.make_w4a16_case(3, 32, 64, 32, dtype=BF16, with_bias=with_bias)
    op = torch.ops.taut.w4a16_gemm_cpu.default
    torch.library.opcheck(op, (case.x, *_layout(case), case.bias, 32))
    torch.library.opcheck(op, (case.x.t().contiguous().t(), *_layout(case), case.bias, 32))


def test_compiles_without_graph_breaks() -> None:
    case = testing.make_w4a16_case(3, 32, 64, 32, dtype=BF16)
    layout = _layout(case)
    compiled = torch.compile(
        lambda x: w4a16_gemm_cpu(x, *layout), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for M in (3, 7):
        x = torch.randn(M, 64).to(BF16)
        assert torch.equal(compiled(x), w4a16_gemm_cpu(x, *layout))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64)}, "x must be"),
        ({"x": torch.zeros(2, 60, dtype=BF16)}, "scales_and_zeros: on CPU no group"),
        ({"x": torch.zeros(2, 64, dtype=BF16, requires_grad=True)}, "forward only"),
        ({"scales_and_zeros": torch.zeros(2, 32, 2)}, r"must be \[K/G, N, 2\] bfloat16"),
        ({"scales_and_zeros": torch.zeros(2, 40, 2, dtype=BF16)}, "multiple of 16, got 40"),
        ({"qweight_cpu": torch.zeros(32, 64, dtype=torch.uint8)}, r"uint8 \(32, 32\)"),
        ({"bias": torch.zeros(31, dtype=BF16)}, r"bias must be bfloat16 \(32,\)"),
        (
            {"qweight_cpu": torch.zeros(32, 32, dtype=torch.uint8, device="meta")},
            "qweight_cpu must be on cpu, got meta",
        ),
        ({"bias": torch.zeros(32, dtype=BF16, device="meta")}, "bias must be on cpu, got meta"),
        (
            {"qweight_cpu": torch.zeros(32, 32, dtype=torch.uint8).t()},
            "qweight_cpu must be contiguous",
        ),
        (
            {"scales_and_zeros": torch.zeros(2, 2, 32, dtype=BF16).transpose(1, 2)},
            "scales_and_zeros must be contiguous",
        ),
    ],
)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    case = testing.make_w4a16_case(2, 32, 64, 32, dtype=BF16)
    qweight_cpu, scales_and_zeros = _layout(case)
    arguments = {"x": case.x, "qweight_cpu": qweight_cpu, "scales_and_zeros": scales_and_zeros}
    assert w4a16_gemm_cpu(**arguments).shape == (2, 32)
    with pytest.raises(ValueError, match=message):
        w4a16_gemm_cpu(**arguments | change)


def test_why_not_supported_names_the_reason() -> None:
    assert why_not_supported(576, 1536, 64, BF16) is None
    assert why_not_supported(576, 1536, -1, BF16) is None
    assert "bfloat16, got float16" in str(why_not_supported(576, 1536, 64, torch.float16))
    assert "multiple of 16, got 24" in str(why_not_supported(24, 1536, 64, BF16))
    assert "80 input features" in str(why_not_supported(32, 80, -1, BF16))
