"""`taut::layer_norm`: specification, interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.modules import LayerNorm
from taut_kernels.norm import layer_norm as ln
from taut_kernels.norm.layer_norm import layer_norm

INTERPRET = Path(__file__).with_name("interpret_fused_backward.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPSILON = 1e-5


def operands(
    M: int, N: int, dtype: torch.dtype, *, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(M + N)
    x = torch.randn(M, N, generator=generator) + 0.5
    weight, bias = (torch.randn(N, generator=generator) * 0.2 + shift for shift in (1, 0))
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def gradients(
    y: torch.Tensor, leaves: tuple[torch.Tensor, ...], dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y, leaves, dy.to(y.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), [(7, 300), (3, 1), (0, 7)])
def test_matches_torch_forward_and_backward(dtype: torch.dtype, M: int, N: int) -> None:
    leaves = tuple(t.requires_grad_() for t in operands(M, N, dtype))
    gold_leaves = tuple(t.detach().double().requires_grad_() for t in leaves)
    dy = torch.randn(M, N, generator=torch.Generator().manual_seed(1))
    torch_norm = torch.nn.functional.layer_norm
    y = layer_norm(*leaves, epsilon=EPSILON)
    gold = torch_norm(gold_leaves[0], (N,), *gold_leaves[1:], EPSILON)
    reference = torch_norm(leaves[0], (N,), *leaves[1:], EPSILON)
    testing.assert_within_budget(y.detach(), gold.detach(), reference.detach())
    found = gradients(y, leaves, dy)
    wanted = gradients(gold, gold_leaves, dy.to(dtype))
    others = gradients(reference, leaves, dy)
    for one, two, three in zip(found, wanted, others, strict=True):
        testing.assert_within_budget(one, two, three)


@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_gradient_in_fp64(parameters: int) -> None:
    leaves = [t.requires_grad_() for t in operands(4, 6, torch.float64)[: 1 + parameters]]
    assert torch.autograd.gradcheck(lambda *t: layer_norm(*t, epsilon=EPSILON), leaves)


CHECKS = {
    "norm_shapes": 56,
    "norms_of_other_parameter_types": 2,
    "norm_adversarial_values": 12,
    "norm_gradients_are_the_same_bits_every_time": 3,
    "programs_outnumber_rows": 1,
}


@interpreter
def test_interpreted_kernels(run_checks: Any) -> None:
    process = run_checks(INTERPRET, *CHECKS, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines() == [f"{check} {count}" for check, count in CHECKS.items()]


def test_op_contract() -> None:
    ops = torch.ops.taut
    x, weight, bias = operands(3, 48, torch.bfloat16)
    wide = torch.randn(3, 50)[:, :48]
    parameters = (weight.float(), bias.float())
    for rows, *others in ((x, weight, bias), (wide, *parameters), (wide, None, None)):
        torch.library.opcheck(ops.layer_norm.default, (rows, *others, EPSILON))
        _, mean, rstd = ops.layer_norm(rows, *others, EPSILON)
        for wants in ((True, True), (True, False), (False, False)):
            wants = wants if others[0] is not None else (False, False)
            arguments = (rows, rows, others[0], mean, rstd, *wants)
            torch.library.opcheck(ops.layer_norm_backward.default, arguments)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, bias = operands(5, 40, torch.float32)
    for wanted in (weight, bias, x):
        leaf = wanted.clone().requires_grad_()
        given = [leaf if one is wanted else one for one in (x, weight, bias)]
        layer_norm(*given, epsilon=EPSILON).square().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.shape == wanted.shape


def test_compiles_without_graph_breaks_and_keeps_leading_dimensions() -> None:
    module = LayerNorm(40)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for M in (2, 5):
        x = operands(M * 3, 40, torch.float32)[0].view(M, 3, 40).requires_grad_()
        found, expected = compiled(x), module(x)
        assert found.shape == x.shape
        assert torch.equal(found, expected)
        leaves = (x, module.weight, module.bias)
        for one, two in zip(
            gradients(found, leaves, torch.ones_like(x)),
            gradients(expected, leaves, torch.ones_like(x)),
            strict=True,
        ):
            assert torch.allclose(one, two, atol=1e-6)


def test_second_derivative_is_refused_by_name() -> None:
    x = operands(2, 5, torch.float32)[0].requires_grad_()
    y = layer_norm(x, epsilon=EPSILON)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm can be derived once"):
        dx.sum().backward()


ONES = torch.ones(64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64, dtype=torch.int8)}, "x must be bfloat16, float16, float32"),
        ({"x": torch.zeros(64, 2).t()}, "x must have its columns next to each other"),
        ({"weight": torch.ones(63)}, r"weight must have shape \(64,\)"),
        ({"weight": torch.ones(64).half()}, "weight must be torch.float32 or torch.float32, got"),
        ({"weight": torch.ones(128)[::2]}, "weight must be contiguous"),
        ({"weight": torch.ones(64, device="meta")}, "weight must be on cpu"),
        ({"bias": torch.ones(1)}, r"bias must have shape \(64,\)"),
        ({"weight": None}, "bias needs a weight of its dtype torch.float32, got None"),
        ({"epsilon": -1.0}, "epsilon must be at least 0 and finite, got -1.0"),
    ],
)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 64), "weight": ONES, "bias": ONES}
    arguments["epsilon"] = EPSILON
    assert layer_norm(**arguments).shape == (2, 64)
    with pytest.raises(ValueError, match=message):
        layer_norm(**arguments | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("M", "N"),
    [
        (1, 4096),
        (3, 1),
        (700, 100),
        (333, 1000),
        (264, 2048),
        (300, 5120),
        (63, 8192),
        (40, 16384),
        (9, 32768),
        (5, 50000),
    ],
)
def test_gpu_kernels_match_the_reference(M: int, N: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(M, N, dtype, device="cuda")
    dy = torch.randn_like(x)
    with testing.nan_poison():
        y, mean, rstd = torch.ops.taut.layer_norm(x, weight, bias, EPSILON)
        found = torch.ops.taut.layer_norm_backward(dy, x, weight, mean, rstd, True, True)
    wide = [t.double() for t in (x, weight, bias)]
    gold, reference = ln.layer_norm_ref(*wide, EPSILON), ln.layer_norm_ref(x, weight, bias, EPSILON)
    for triple in zip((y, mean, rstd), gold, reference, strict=True):
        testing.assert_within_budget(*triple)
    gold = ln.layer_norm_backward_ref(dy.double(), wide[0], wide[1], *gold[1:], True, True)
    reference = ln.layer_norm_backward_ref(dy, x, weight, mean, rstd, True, True)
    term = (dy * weight * rstd[:, None]).abs().max().item()
    for triple, cancelled in zip(
        zip(found, gold, reference, strict=True), (term, 0, 0), strict=True
    ):
        testing.assert_within_budget(*triple, cancelled)


@pytest.mark.gpu
def test_gpu_gradients_are_the_same_bits_every_time() -> None:
    x, weight, bias = operands(1000, 4096, torch.bfloat16, device="cuda")
    leaves = tuple(t.requires_grad_() for t in (x, weight, bias))
    dy = torch.randn_like(x)
    first = gradients(layer_norm(*leaves, epsilon=EPSILON), leaves, dy)
    for _ in range(5):
        again = gradients(layer_norm(*leaves, epsilon=EPSILON), leaves, dy)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
