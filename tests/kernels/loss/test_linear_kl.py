"""`linear_kl` and `linear_jsd`: specification, interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch.nn import functional

from taut_bench import testing
from taut_kernels.loss.linear_jsd import linear_jsd
from taut_kernels.loss.linear_kl import linear_kl
from taut_kernels.loss.modules import LinearJSDLoss, LinearKLLoss

INTERPRET = Path(__file__).with_name("interpret_loss.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BETAS = (0.0, 0.3, 0.5, 1.0)


@pytest.fixture(autouse=True)
def _one_thread(_two_threads: None) -> None:
    """Tensors are tiny here, and on a busy machine a second thread is mostly waited for."""
    torch.set_num_threads(1)


def draw(
    M: int, H: int, V: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Draw a student's and a teacher's x, weight and bias, and a mask."""
    generator = torch.Generator().manual_seed(M + H + V)

    def side(width: int) -> list[torch.Tensor]:
        x = torch.randn(M, width, generator=generator)
        weight = torch.randn(V, width, generator=generator) * 2 / width**0.5
        bias = torch.randn(V, generator=generator)
        return [t.to(dtype).to(device) for t in (x, weight, bias)]

    student, teacher = side(H), side(H + 3)
    return student, teacher, (torch.rand(M, generator=generator) > 0.2).to(device)


def by_torch(
    student: list[torch.Tensor],
    teacher: list[torch.Tensor],
    mask: torch.Tensor,
    beta: float,
    temperature: float,
    reduction: str,
) -> torch.Tensor:
    log_p = (functional.linear(*student) / temperature).float_power(1).log_softmax(1)
    log_q = (functional.linear(*teacher) / temperature).float_power(1).log_softmax(1)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.kl_div(b, a, log_target=True, reduction="none").sum(1)

    if beta == 0.0:
        losses = kl(log_q, log_p)
    elif beta == 1.0:
        losses = kl(log_p, log_q)
    else:
        log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
        losses = beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    losses = losses * temperature**2 * mask
    if reduction == "none":
        return losses
    return losses.sum() / mask.sum() if reduction == "mean" else losses.sum()


def ours(
    student: list[torch.Tensor],
    teacher: list[torch.Tensor],
    mask: torch.Tensor,
    beta: float,
    temperature: float,
    reduction: str,
    **cut: Any,
) -> torch.Tensor:
    return linear_jsd(
        *student[:2],
        *teacher[:2],
        bias=student[2],
        teacher_bias=teacher[2],
        mask=mask,
        beta=beta,
        temperature=temperature,
        reduction=reduction,
        **cut,
    )


def results(function: Any, student: list[torch.Tensor], *arguments: Any, **cut: Any) -> list[Any]:
    """Run forward and backward; return the loss and the student's gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in student]
    loss = function(leaves, *arguments, **cut)
    factors = torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    (loss * factors).sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@interpreter
def test_interpreted_kernel(run_checks: Any) -> None:
    checks = {"divergence_rows": 50, "divergence_of_impossible_tokens": 5, "linear_divergences": 6}
    process = run_checks(INTERPRET, *checks, env={"TRITON_INTERPRET": "1"}, timeout=570)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines() == [f"{name} {count}" for name, count in checks.items()]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_are_torchs(
    reduction: str, use_checkpoint: bool, temperature: float, beta: float
) -> None:
    student, teacher, mask = draw(20, 8, 53)
    arguments = (teacher, mask, beta, temperature, reduction)
    found = results(ours, student, *arguments, chunk_size=6, use_checkpoint=use_checkpoint)
    for actual, wanted in zip(found, results(by_torch, student, *arguments), strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-10, atol=1e-12)


def test_fp32_sums_are_closer_than_bf16_sums() -> None:
    student, teacher, mask = draw(256, 16, 40, torch.bfloat16)
    arguments = (mask, 0.5, 1.0, "mean")
    wide = [t.double() for t in student], [t.double() for t in teacher]
    gold = results(by_torch, *wide, *arguments)[2]
    errors = [
        testing.max_error(
            results(ours, student, teacher, *arguments, chunk_size=4, accumulate_fp32=fp32)[2], gold
        )
        for fp32 in (False, True)
    ]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta: float) -> None:
    student, teacher, mask = draw(4, 3, 17)
    for operand in student:
        operand.requires_grad_()

    def loss(*operands: torch.Tensor) -> torch.Tensor:
        return ours(list(operands), teacher, mask, beta, 2.0, "mean", use_checkpoint=True)

    assert torch.autograd.gradcheck(loss, student)


def test_kl_is_an_end_of_jsd() -> None:
    student, teacher, _ = draw(5, 8, 40)
    operands = (*student[:2], *teacher[:2])
    assert torch.equal(linear_kl(*operands), linear_jsd(*operands, beta=0.0))
    assert torch.equal(linear_kl(*operands, reverse=True), linear_jsd(*operands, beta=1.0))
    # The limits the docstring names: loss / β and loss / (1 − β).
    small = linear_jsd(*operands, beta=1e-6) / 1e-6
    assert torch.allclose(small, linear_kl(*operands), rtol=1e-3)
    large = linear_jsd(*operands, beta=1 - 1e-6) / 1e-6
    assert torch.allclose(large, linear_kl(*operands, reverse=True), rtol=1e-3)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_low_precision_stays_in_budget(dtype: torch.dtype, beta: float) -> None:
    student, teacher, mask = draw(30, 32, 300, dtype)
    arguments = (mask, beta, 2.0, "mean")
    wide = [t.double() for t in student], [t.double() for t in teacher]
    gold = results(by_torch, *wide, *arguments)
    theirs = results(by_torch, student, teacher, *arguments)
    found = results(ours, student, teacher, *arguments, chunk_size=8)
    assert abs(found[0] - gold[0]) <= 2 * abs(theirs[0] - gold[0]) + 1e-3 * gold[0]
    for actual, wanted, rounded in zip(found[1:], gold[1:], theirs[1:], strict=True):
        testing.assert_within_budget(actual, wanted, rounded)


def test_masked_and_empty_batches_give_zero() -> None:
    student, teacher, mask = draw(6, 8, 40, torch.float32)
    for count in (6, 0):
        rows = [[t[:count] if t.dim() == 2 and t.shape[0] == 6 else t for t in side]
                for side in (student, teacher)]  # fmt: skip
        none = torch.zeros_like(mask[:count])
        loss, *gradients = results(ours, *rows, none, 0.5, 1.0, "mean")
        assert loss == 0
        assert not any(gradient.any() for gradient in gradients)


def test_a_column_of_a_mask_reaches_the_kernels_without_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    student, teacher, mask = draw(6, 8, 40, torch.float32)
    column = torch.stack([mask, ~mask], dim=1)[:, 0]
    op, seen = torch.ops.taut.linear_divergence, []
    monkeypatch.setattr(
        torch.ops.taut,
        "linear_divergence",
        lambda *arguments: seen.append(arguments[6].stride()) or op(*arguments),
    )
    ours(student, teacher, column, 0.5, 1.0, "mean")
    assert seen == [(1,)]


def test_frozen_head_gets_no_gradient() -> None:
    student, teacher, mask = draw(6, 8, 40, torch.float32)
    student[0].requires_grad_()
    ours(student, teacher, mask, 0.5, 1.0, "mean").backward()
    assert student[0].grad is not None
    assert student[1].grad is None


def test_keeps_leading_dimensions_and_autocasts() -> None:
    student, teacher, _ = draw(6, 8, 40, torch.float32)
    flat = linear_kl(*student[:2], *teacher[:2], reduction="none")
    x, teacher_x = student[0].view(2, 3, 8), teacher[0].view(2, 3, 11)
    folded = linear_kl(x, student[1], teacher_x, teacher[1], reduction="none")
    assert torch.equal(folded.flatten(), flat)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_kl(*student[:2], *teacher[:2], reduction="none")
    low = [t.bfloat16() for t in (*student[:2], *teacher[:2])]
    assert torch.equal(cast, linear_kl(*low, reduction="none"))


def test_op_contract() -> None:
    op = torch.ops.taut.linear_divergence.default
    student, teacher, mask = draw(6, 8, 30, torch.float32)
    for operand in student:
        operand.requires_grad_()
    for form, reduction, wants in (
        ("jsd", "mean", [True] * 3),
        ("forward_kl", "none", [False] * 3),
    ):
        options = (mask, form, 2.0, 0.5, reduction, 4, False, wants)
        torch.library.opcheck(op, (*student, *teacher, *options))


def test_is_differentiable_once() -> None:
    student, teacher, mask = draw(6, 8, 30, torch.float32)
    student[1].requires_grad_()
    loss = ours(student, teacher, mask, 0.5, 1.0, "mean")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="taut::linear_divergence ran its backward twice"):
        loss.backward()
    loss = ours(student, teacher, mask, 0.5, 1.0, "mean")
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(loss, student[1], create_graph=True)


def test_modules_pass_their_options_on() -> None:
    student, teacher, mask = draw(6, 8, 30, torch.float32)
    operands = (*student[:2], *teacher[:2])
    biases = {"bias": student[2], "teacher_bias": teacher[2]}
    assert torch.equal(
        LinearKLLoss(temperature=3.0)(*operands, mask, **biases),
        linear_kl(*operands, mask=mask, temperature=3.0, **biases),
    )
    assert torch.equal(
        LinearJSDLoss(beta=0.1)(*operands, mask, **biases),
        linear_jsd(*operands, mask=mask, beta=0.1, **biases),
    )
    with pytest.raises(TypeError, match="LinearKLLoss has no option beta: expected temperature"):
        LinearKLLoss(beta=0.1)
    with pytest.raises(TypeError, match="LinearJSDLoss has no option mask"):
        LinearJSDLoss(mask=mask)


X, W = torch.zeros(2, 8), torch.zeros(30, 8)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"weight": W[:, :7]}, r"weight must have shape \[V, 8\]"),
    ({"teacher_x": X[:1]}, r"teacher_x must have shape \(2, 8\) on cpu, got \(1, 8\)"),
    ({"teacher_weight": W[:29]}, "teacher_weight and weight must have one vocabulary, got 29 and"),
    ({"teacher_weight": W.half()}, "teacher_weight must be torch.float32 on cpu"),
    ({"teacher_x": X.clone().requires_grad_()}, "teacher_x requires grad: detach it"),
    ({"teacher_bias": W[:3, 0]}, r"teacher_bias must have shape \(30,\)"),
    ({"mask": torch.ones(2)}, r"mask must be bool \(2,\) on cpu, got torch.float32"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask must be bool \(2,\)"),
    ({"temperature": 0.0}, "temperature must be above 0 and finite, got 0.0"),
    ({"temperature": float("inf")}, "temperature must be above 0 and finite, got inf"),
    ({"beta": 1.1}, r"beta must lie in 0\.\.1, got 1.1"),
    ({"reduction": "batchmean"}, "reduction must be mean, sum or none, got 'batchmean'"),
    ({"chunk_size": -1}, "chunk_size must be at least 1, got -1"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": W, "teacher_x": X, "teacher_weight": W}
    assert linear_jsd(**arguments) == 0
    with pytest.raises(ValueError, match=message):
        linear_jsd(**arguments | change)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("cut", [{"use_checkpoint": True}, {"accumulate_fp32": True}], ids=str)
def test_gpu_options_match_fp64(cut: dict[str, bool], reduction: str) -> None:
    student, teacher, mask = draw(300, 256, 5003, torch.bfloat16, "cuda")
    arguments = (mask, 0.5, 1.0, reduction)
    wide = [t.double() for t in student], [t.double() for t in teacher]
    gold = results(by_torch, *wide, *arguments)
    theirs = results(by_torch, student, teacher, *arguments)
    with testing.nan_poison():
        found = results(ours, student, teacher, *arguments, chunk_size=64, **cut)
    assert torch.allclose(found[0].double(), gold[0], rtol=2e-2, atol=1e-3)
    for actual, wanted, rounded in zip(found[1:], gold[1:], theirs[1:], strict=True):
        testing.assert_within_budget(actual, wanted, rounded)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("shape", [(300, 256, 5003), (64, 128, 128256)])
def test_gpu_matches_fp64(shape: tuple[int, int, int], beta: float, dtype: torch.dtype) -> None:
    student, teacher, mask = draw(*shape, dtype, "cuda")
    arguments = (mask, beta, 2.0, "mean")
    wide = [t.double() for t in student], [t.double() for t in teacher]
    gold = results(by_torch, *wide, *arguments)
    theirs = results(by_torch, student, teacher, *arguments)
    with testing.nan_poison():
        found = results(ours, student, teacher, *arguments, chunk_size=128)
    assert abs(found[0] - gold[0]) <= 2 * abs(theirs[0] - gold[0]) + 1e-3 * gold[0]
    for actual, wanted, rounded in zip(found[1:], gold[1:], theirs[1:], strict=True):
        testing.assert_within_budget(actual, wanted, rounded)
