"""`taut::w4a16_gemm`: specification, jit kernel under the interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_kernels import testing
from taut_kernels.gemm import w4a16
from taut_kernels.gemm.w4a16 import w4a16_gemm, w4a16_gemm_ref

INTERPRET = Path(__file__).with_name("interpret_w4a16.py")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DTYPES = (torch.float16, torch.bfloat16)
SHAPES = [(1, 64, 128, 32), (3, 40, 576, 64), (17, 72, 256, 128), (63, 104, 288, -1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("M", "N", "K", "group_size"), SHAPES)
def test_reference_matches_the_formula(
    M: int, N: int, K: int, group_size: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    case = testing.make_w4a16_case(
        M, N, K, group_size, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric
    )
    gold = case.gold()
    actual = w4a16_gemm_ref(*case.operands())  # type: ignore[arg-type]
    # fp32 accumulation leaves one rounding to the activation dtype and nothing else to speak of.
    assert testing.max_error(actual, gold) <= torch.finfo(dtype).eps * gold.abs().max().item()


def test_reference_on_fp64_is_gold() -> None:
    case = testing.make_w4a16_case(3, 24, 64, 32, dtype=torch.float64, asymmetric=True)
    actual = w4a16_gemm_ref(*case.operands())  # type: ignore[arg-type]
    assert testing.max_error(actual, case.gold()) < 1e-13


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
@pytest.mark.parametrize(
    ("check", "count"),
    [
        ("awkward_shapes", 32),
        ("strided_and_offset_inputs", 2),
        ("adversarial_values", 5),
        ("empty_batch", 1),
    ],
)
def test_interpreted_kernel(check: str, count: int, run_python: Any) -> None:
    process = run_python(str(INTERPRET), check, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


@pytest.mark.parametrize("asymmetric", [False, True])
def test_op_contract(asymmetric: bool) -> None:
    case = testing.make_w4a16_case(
        3, 40, 64, 32, dtype=torch.bfloat16, asymmetric=asymmetric, with_bias=asymmetric
    )
    op = torch.ops.taut.w4a16_gemm.default
    torch.library.opcheck(op, case.operands())
    torch.library.opcheck(op, (case.x.t().contiguous().t(), *case.operands()[1:]))


def test_compiles_without_graph_breaks_for_every_number_of_tokens() -> None:
    case = testing.make_w4a16_case(3, 40, 64, 32, dtype=torch.bfloat16, asymmetric=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return w4a16_gemm(x, case.qweight, case.scales, case.zero_points, group_size=32) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5, 9):
        x = torch.randn(M, 64).to(torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


def test_keeps_leading_dimensions() -> None:
    case = testing.make_w4a16_case(6, 40, 64, -1, dtype=torch.float16)
    flat = w4a16_gemm(case.x, case.qweight, case.scales, group_size=-1)
    folded = w4a16_gemm(case.x.view(2, 3, 64), case.qweight, case.scales, group_size=64)
    assert folded.shape == (2, 3, 40)
    assert torch.equal(folded.view(6, 40), flat)


BAD = [
    ({"x": torch.zeros(2, 64)}, "float16 or bfloat16"),
    ({"x": torch.tensor(1.0)}, "at least one dimension"),
    ({"x": torch.zeros(2, 72, dtype=torch.float16)}, "multiple of 16, got 72"),
    ({"group_size": 16}, "32, 64, 128"),
    ({"group_size": 128}, "does not divide"),
    ({"qweight": torch.zeros(8, 40, dtype=torch.int32)}, r"qweight must have shape \(16, 40\)"),
    ({"qweight": torch.zeros(16, 40, dtype=torch.int64)}, "qweight must be torch.int32"),
    ({"qweight": torch.zeros(40, 16, dtype=torch.int32).t()}, "qweight must be contiguous"),
    ({"scales": torch.zeros(40, dtype=torch.float16)}, "two dimensions"),
    ({"scales": torch.zeros(3, 40, dtype=torch.float16)}, r"scales must have shape \(2, 40\)"),
    ({"scales": torch.zeros(2, 40)}, "scales must be torch.float16"),
    ({"zero_points": torch.zeros(2, 40, dtype=torch.int32)}, "zero_points must be torch.uint8"),
    ({"bias": torch.zeros(39, dtype=torch.float16)}, r"bias must have shape \(40,\)"),
    ({"bias": torch.zeros(40, dtype=torch.float16, device="meta")}, "bias must be on cpu"),
    ({"x": torch.zeros(2, 64, dtype=torch.float16, requires_grad=True)}, "forward only"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    case = testing.make_w4a16_case(2, 40, 64, 32, dtype=torch.float16, asymmetric=True)
    arguments = {
        "x": case.x,
        "qweight": case.qweight,
        "scales": case.scales,
        "zero_points": case.zero_points,
        "group_size": 32,
    }
    assert w4a16_gemm(**arguments).shape == (2, 40)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        w4a16_gemm(**arguments | change)


def test_error_budget_rejects_a_wrong_kernel() -> None:
    case = testing.make_w4a16_case(8, 40, 64, 32, dtype=torch.float16)
    gold, reference = case.gold(), w4a16_gemm_ref(*case.operands())  # type: ignore[arg-type]
    testing.assert_within_budget(reference, gold, reference)
    for wrong in (reference * 1.01, reference.roll(1, dims=1), reference * float("nan")):
        with pytest.raises(AssertionError):
            testing.assert_within_budget(wrong, gold, reference)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("M", [1, 3, 17, 63, 64, 65, 300])
@pytest.mark.parametrize(
    ("N", "K", "group_size"), [(64, 128, 32), (1000, 576, 64), (4096, 4096, 128), (96, 576, -1)]
)
def test_gpu_kernel_matches_reference(
    M: int, N: int, K: int, group_size: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    case = testing.make_w4a16_case(
        M, N, K, group_size, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device="cuda"
    )
    with testing.nan_poison():
        actual = torch.ops.taut.w4a16_gemm(*case.operands())
    reference = w4a16_gemm_ref(*case.operands())  # type: ignore[arg-type]
    testing.assert_within_budget(actual, case.gold(), reference)


@gpu
@needs_gpu
def test_gpu_graph_replays_on_new_activations() -> None:
    case = testing.make_w4a16_case(4, 256, 256, 64, dtype=torch.bfloat16, device="cuda")
    torch.ops.taut.w4a16_gemm(*case.operands())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.taut.w4a16_gemm(*case.operands())
    case.x.copy_(torch.randn_like(case.x))
    graph.replay()
    assert torch.equal(y, torch.ops.taut.w4a16_gemm(*case.operands()))


@gpu
@needs_gpu
def test_gpu_addresses_beyond_31_bits() -> None:
    case = testing.make_w4a16_case(2, 32, 128, 32, dtype=torch.float16, device="cuda")
    rows = torch.empty(2, 2**31 // 2 + 4096, dtype=torch.float16, device="cuda")
    x = rows[:, -128:]
    x.copy_(case.x)
    actual = w4a16_gemm(x, case.qweight, case.scales, group_size=32)
    testing.assert_within_budget(actual, case.gold(), w4a16_gemm_ref(*case.operands()))  # type: ignore[arg-type]


def test_kernel_variants_cover_every_tile_dtype_and_group() -> None:
    variants = list(w4a16.kernel_variants())
    assert len(variants) == len({(v.label, v.tile) for v in variants}) == 3 * 2 * 2 * 3
