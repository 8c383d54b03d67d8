"""`taut::max_pool2d`, `taut::avg_pool2d`, `taut::reduce`: interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.primitives import avg_pool2d, max_pool2d, pooling, reduce, reduction
from taut_kernels.primitives.reduce_tiles import VERSIONS, tile_of

INTERPRET = Path(__file__).with_name("interpret_primitives.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@interpreter
@pytest.mark.parametrize(
    ("checks", "counts"),
    [
        (["pools", "pools_of_strange_values"], [30, 1]),
        (["reductions", "reductions_of_strange_values"], [116, 4]),
    ],
)
def test_interpreted_kernels(checks: list[str], counts: list[int], run_checks: Any) -> None:
    process = run_checks(INTERPRET, *checks, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    pairs = zip(checks, counts, strict=True)
    assert process.stdout.splitlines() == [f"{check} {count}" for check, count in pairs]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pools_are_those_of_torch(layout: torch.memory_format) -> None:
    x = draw(2, 3, 9, 8, dtype=torch.float32).to(memory_format=layout)
    functional = torch.nn.functional
    y = max_pool2d(x, 3, 2, 1)
    assert torch.equal(y, functional.max_pool2d(x, 3, 2, 1))
    assert y.is_contiguous(memory_format=layout)
    assert torch.equal(avg_pool2d(x, (2, 3)), functional.avg_pool2d(x, (2, 3)))
    found = avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    assert torch.equal(found, functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False))


def test_reductions_are_those_of_torch() -> None:
    x = draw(3, 4, 5, dtype=torch.float32)
    assert torch.equal(reduce(x), x.sum())
    assert torch.equal(reduce(x, "max", 1), x.amax(1))
    assert torch.equal(reduce(x, "mean", -1, keepdim=True), x.mean(-1, keepdim=True))
    assert reduce(x[:0], "sum", 0).tolist() == torch.zeros(4, 5).tolist()
    assert reduce(x[:0], "mean").isnan()


def test_op_contract() -> None:
    ops = torch.ops.taut
    x = draw(2, 3, 9, 8, dtype=torch.bfloat16)
    for image in (x, x.to(memory_format=torch.channels_last), x[:0], x[..., 1:]):
        sizes = (image, (3, 2), (2, 1), (1, 1))
        torch.library.opcheck(ops.max_pool2d.default, sizes)
        torch.library.opcheck(ops.avg_pool2d.default, (*sizes, False))
    for dim, keepdim in ((None, False), (1, False), (-1, True)):
        torch.library.opcheck(ops.reduce.default, (x, "mean", dim, keepdim, "v3"))
    one = torch.ones((), dtype=torch.float32)
    torch.library.opcheck(ops.reduce.default, (one, "sum", None, False, "v1"))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return reduce(max_pool2d(x + 1, 2), "max", 1) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


X = torch.zeros(1, 2, 6, 6)
BAD_POOLS: list[tuple[dict[str, Any], str]] = [
    ({"x": X.double()}, "x must be bfloat16, float16, float32, got float64"),
    ({"x": X[0]}, r"x must have shape \[N, C, H, W\]"),
    ({"x": torch.zeros(1, 2, 6, 6, requires_grad=True)}, "x requires grad"),
    ({"kernel_size": 0}, "kernel_size must be one or two integers of at least 1"),
    ({"kernel_size": 7}, r"kernel_size 7 is larger than x \(1, 2, 6, 6\)"),
    ({"stride": (1, 2, 3)}, "stride must be one or two integers"),
    ({"padding": 2}, "padding must be at most half the kernel, got 2"),
]


@pytest.mark.parametrize(("change", "message"), BAD_POOLS)
def test_pools_reject_bad_inputs(change: dict[str, Any], message: str) -> None:
    arguments = {"x": X, "kernel_size": 2}
    for pool in (max_pool2d, avg_pool2d):
        assert pool(**arguments).shape == (1, 2, 3, 3)
        with pytest.raises(ValueError, match=message):
            pool(**arguments | change)


BAD_REDUCTIONS: list[tuple[dict[str, Any], str]] = [
    ({"x": X.double()}, "x must be bfloat16, float16 or float32, got torch.float64"),
    ({"x": torch.zeros(2, requires_grad=True)}, "x requires grad"),
    ({"operation": "min"}, "operation must be one of sum, max, mean, got 'min'"),
    ({"version": "v4"}, "version must be one of v1, v2, v3, got 'v4'"),
    ({"dim": 4}, r"dim must lie in -4\.\.3, got 4"),
    ({"keepdim": True}, "keepdim needs dim"),
    ({"x": X[:0], "operation": "max"}, "dim None of x has no elements: there is no maximum"),
]


@pytest.mark.parametrize(("change", "message"), BAD_REDUCTIONS)
def test_reductions_reject_bad_inputs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduce(**{"x": X} | change)


def test_shares_fill_the_card_and_start_where_loads_are_whole() -> None:
    for tile in (tile_of(version, inner=i) for version in VERSIONS for i in (1, 5, 4096)):
        for outer, R, inner in ((1, 2**27 + 7, 1), (8192, 16384, 1), (1, 8192, 16384), (3, 7, 5)):
            share = tile.share_of(outer, R, inner, 132)
            assert share == R or (share < R and share % 32 == 0), (tile, outer, R, inner)
    share = tile_of("v3", inner=1).share_of(1, 2**27, 1, 132)
    assert 500 <= -(-(2**27) // share) <= 528


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "kernel_size", "stride", "padding"),
    [
        ((2, 64, 56, 56), [3, 3], [2, 2], [1, 1]),
        ((3, 5, 17, 33), [2, 5], [1, 3], [1, 2]),
        ((2, 40, 7, 7), [7, 7], [1, 1], [0, 0]),
        ((1, 1, 1, 1), [1, 1], [1, 1], [0, 0]),
    ],
)
def test_gpu_pools_match_reference(
    shape: tuple[int, ...],
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dtype: torch.dtype,
) -> None:
    sizes = (kernel_size, stride, padding)
    image = draw(*shape, dtype=dtype, device="cuda")
    for x in (image, image.to(memory_format=torch.channels_last), image.transpose(2, 3)):
        if x.shape != image.shape:
            continue
        with testing.nan_poison():
            y = torch.ops.taut.max_pool2d(x, *sizes)
        assert torch.equal(y, pooling.max_pool2d_ref(x, *sizes))
        for padded in (True, False):
            with testing.nan_poison():
                y = torch.ops.taut.avg_pool2d(x, *sizes, padded)
            gold = pooling.avg_pool2d_ref(x.double(), *sizes, padded)
            testing.assert_within_budget(y, gold, pooling.avg_pool2d_ref(x, *sizes, padded))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "shape", [(1,), (100_003,), (5, 70_001), (70_001, 5), (300, 1000), (7, 129, 65), (4, 1, 9)]
)
def test_gpu_reductions_match_reference(
    shape: tuple[int, ...], version: str, dtype: torch.dtype
) -> None:
    base = draw(*shape, dtype=dtype, device="cuda")
    for x in (base, base.transpose(0, -1), base[..., ::2]):
        for dim in (None, *range(x.dim())):
            for operation in reduction.OPERATIONS:
                with testing.nan_poison():
                    y = torch.ops.taut.reduce(x, operation, dim, False, version)
                gold = reduction.reduce_ref(x.double(), operation, dim, False)
                total = reduction.reduce_ref(x.double().abs(), operation, dim, False)
                # No way through lanes, steps and shares has more than 64 additions.
                bound = 64 * 2.0**-24 * total + torch.finfo(dtype).eps * gold.abs()
                assert y.shape == gold.shape
                assert ((y.double() - gold).abs() <= bound).all(), (operation, dim, x.shape)
                again = torch.ops.taut.reduce(x, operation, dim, False, version)
                assert torch.equal(again, y)


@pytest.mark.gpu
def test_gpu_maximum_keeps_nan_and_infinities() -> None:
    x = draw(8, 9000, dtype=torch.bfloat16, device="cuda")
    x[1, 77], x[2, 5], x[3] = float("nan"), float("inf"), float("-inf")
    for version in VERSIONS:
        y = reduce(x, "max", 1, version=version)
        torch.testing.assert_close(y, x.amax(1), equal_nan=True, rtol=0, atol=0)
        assert reduce(x, "max", version=version).isnan()
