"""`taut::softmax`: specification, interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_bench.instruments import aot
from taut_bench.instruments.forms import training
from taut_bench.instruments.recorder import variants_of
from taut_kernels.loss import softmax as sm
from taut_kernels.loss.softmax import softmax
from taut_kernels.rowwise import training_tiles

INTERPRET = Path(__file__).with_name("interpret_fused_backward.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def draw(
    M: int, N: int, dtype: torch.dtype = torch.float32, *, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(M + N + seed)
    return torch.randn(M, N, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), [(5, 300), (3, 1), (0, 7)])
def test_matches_torch_forward_and_backward(dtype: torch.dtype, M: int, N: int) -> None:
    x = (4 * draw(M, N, dtype)).requires_grad_()
    dy = draw(M, N, dtype, seed=1)
    gold_x = x.detach().double().requires_grad_()
    gold = torch.softmax(gold_x, dim=-1)
    y = softmax(x)
    reference = torch.softmax(x, dim=-1)
    testing.assert_within_budget(y.detach(), gold.detach(), reference.detach())
    gradients = [
        torch.autograd.grad(one, two, dy.to(one.dtype))[0]
        for one, two in ((y, x), (gold, gold_x), (reference, x))
    ]
    testing.assert_within_budget(*gradients)


def test_gradient_in_fp64() -> None:
    x = draw(4, 6, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(softmax, (x,))


CHECKS = {"softmax_shapes": 12, "softmax_extreme_values": 7}


@interpreter
def test_interpreted_kernels(run_checks: Any) -> None:
    process = run_checks(INTERPRET, *CHECKS, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines() == [f"{check} {count}" for check, count in CHECKS.items()]


def test_op_contract() -> None:
    ops = torch.ops.taut
    wide = torch.randn(3, 50)[:, :48]
    for x in (draw(3, 48, torch.bfloat16), wide, wide.clone().requires_grad_()):
        torch.library.opcheck(ops.softmax.default, (x,))
        torch.library.opcheck(ops.softmax_backward.default, (x.detach(), wide.to(x.dtype)))


def test_rows_of_any_stride_and_leading_shape() -> None:
    base = draw(6, 50).requires_grad_()
    expected = torch.softmax(base[:, :48], dim=-1)
    found = softmax(base[:, :48].unflatten(0, (2, 3)))
    assert found.shape == (2, 3, 48)
    assert torch.allclose(found.view(6, 48), expected)
    # A gradient whose columns do not lie next to each other, and one expanded from a scalar.
    for dy in (draw(48, 6).t(), torch.ones(1, 1).expand(6, 48)):
        one = torch.autograd.grad(found, base, dy.reshape(2, 3, 48), retain_graph=True)[0]
        two = torch.autograd.grad(expected, base, dy, retain_graph=True)[0]
        assert torch.allclose(one, two, atol=1e-7)


def test_compiles_without_graph_breaks() -> None:
    compiled = torch.compile(
        lambda x: softmax(x * 2).square().sum(), fullgraph=True, backend="aot_eager"
    )
    x = draw(3, 40).requires_grad_()
    found = torch.autograd.grad(compiled(x), x)[0]
    assert torch.allclose(found, torch.autograd.grad(softmax(x * 2).square().sum(), x)[0])


def test_second_derivative_is_refused_by_name() -> None:
    x = draw(2, 5).requires_grad_()
    (dx,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="softmax can be derived once"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), "x must be bfloat16, float16, float32"),
        (torch.tensor(1.0), r"x must have 1..262144 columns, got shape \(\)"),
        (torch.zeros(2, 0), "x must have 1..262144 columns"),
        (torch.zeros(1, 262145), "x must have 1..262144 columns"),
        (torch.zeros(9, 2).t(), "x must have its columns next to each other"),
        (torch.zeros(2, 9, 8).transpose(0, 1), "x must have its rows at one stride"),
    ],
)
def test_rejects_bad_inputs(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        softmax(x)


@pytest.mark.parametrize(
    ("N", "backward"), [(16384, False), (24576, False), (32768, False), (16384, True)]
)
def test_two_programs_with_long_rows_fit_a_multiprocessor(N: int, backward: bool) -> None:
    # One loads while the other computes: 261 µs instead of 322 at 32768 columns on an H200.
    rule = training_tiles.softmax_backward if backward else training_tiles.softmax
    tile = rule(N, 8192, 2)
    _, hopper = variants_of(training.softmax(N, tile, backward=backward))
    found = aot.compile_variant(hopper)
    assert found.failure is None
    assert 2 * 32 * tile.num_warps * found.registers <= 65536


SHAPES = [(1, 4096), (3, 1), (300, 100), (33, 1000), (64, 5120), (17, 16384), (9, 32768)]
LONG_SHAPES = [(7, 24576), (5, 40000), (3, 65536), (3, 131072), (2, 262143), (2, 262144)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), SHAPES + LONG_SHAPES)
def test_gpu_kernels_match_the_reference(M: int, N: int, dtype: torch.dtype) -> None:
    x, dy = 4 * draw(M, N, dtype, device="cuda"), draw(M, N, dtype, seed=1, device="cuda")
    with testing.nan_poison():
        y = torch.ops.taut.softmax(x)
        dx = torch.ops.taut.softmax_backward(dy, y)
    testing.assert_within_budget(y, sm.softmax_ref(x.double()), sm.softmax_ref(x))
    gold = sm.softmax_backward_ref(dy.double(), y.double())
    testing.assert_within_budget(dx, gold, sm.softmax_backward_ref(dy, y))


@pytest.mark.gpu
def test_gpu_strided_misaligned_and_far_rows() -> None:
    base = draw(9, 4200, torch.bfloat16, device="cuda")
    for view in (base[:, :4096], base[:, 3:4099], base[1::2, 8:4104]):
        reference = sm.softmax_ref(view)
        testing.assert_within_budget(softmax(view), sm.softmax_ref(view.double()), reference)
        dx = torch.ops.taut.softmax_backward(view, reference)
        gold = sm.softmax_backward_ref(view.double(), reference.double())
        testing.assert_within_budget(dx, gold, sm.softmax_backward_ref(view, reference))
    # Rows 2**31 elements apart: the offset needs 64 bits.
    far = torch.empty(2, 2**31 + 4096, dtype=torch.bfloat16, device="cuda")[:, -4096:]
    far.copy_(base[:2, :4096])
    assert torch.equal(softmax(far), softmax(base[:2, :4096]))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [4096, 65536])
def test_gpu_graph_replays_with_the_same_bits_every_time(N: int) -> None:
    x, dy = (draw(64, N, torch.bfloat16, seed=seed, device="cuda") for seed in (0, 1))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.ops.taut.softmax(x)
        return y, torch.ops.taut.softmax_backward(dy, y)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
        for one, two in zip(found, call(), strict=True):
            assert torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [100, 40000])
def test_gpu_extreme_rows_are_torchs(N: int) -> None:
    infinity, largest = float("inf"), torch.finfo(torch.float32).max
    x = torch.zeros(6, N, device="cuda")
    x[0] = -infinity
    x[1, 3] = infinity
    x[2, 5] = float("nan")
    x[3, 1:] = -infinity
    x[4] = largest
    x[4, 1] = -largest
    x[5, 7] = 1e4
    found, expected = softmax(x), torch.softmax(x, dim=-1)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-12, equal_nan=True)
