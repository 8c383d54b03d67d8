"""`taut::cross_entropy`: specification, interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch.nn import functional

from taut_bench import testing
from taut_kernels.loss import row_softmax
from taut_kernels.loss.cross_entropy import cross_entropy
from taut_kernels.loss.modules import CrossEntropyLoss
from taut_kernels.loss.row_softmax import Objective

INTERPRET = Path(__file__).with_name("interpret_loss.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 4.0},
    {"label_smoothing": 0.3, "z_loss": 1e-3, "softcap": 10.0, "ignore_index": 3},
]


@pytest.fixture(autouse=True)
def _one_thread(_two_threads: None) -> None:
    """Tensors are tiny here, and on a busy machine a second thread is mostly waited for."""
    torch.set_num_threads(1)


def draw(
    *shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    logits = (torch.randn(*shape, generator=generator) * 3).to(dtype).to(device)
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator).to(device)
    return logits, target


def expected(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss by torch's own functions, in fp64."""
    z = logits.double()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z, flat = z.flatten(0, -2), target.flatten()
    losses = functional.cross_entropy(
        z, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    counts = flat != ignore_index
    losses = losses + torch.where(counts, z_loss * z.logsumexp(1) ** 2, 0.0)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


@interpreter
@pytest.mark.parametrize(
    "checks",
    [
        {"cross_entropy_rows": 160},
        {
            "cross_entropy_strides": 6,
            "cross_entropy_ignored_and_impossible_targets": 1,
            "cross_entropy_adversarial_values": 6,
            "scaling": 2,
            "weights_of_rows": 4,
        },
    ],
)
def test_interpreted_kernel(checks: dict[str, int], run_checks: Any) -> None:
    process = run_checks(INTERPRET, *checks, env={"TRITON_INTERPRET": "1"}, timeout=570)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines() == [f"{name} {count}" for name, count in checks.items()]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradient_are_torchs(reduction: str, options: dict[str, Any]) -> None:
    logits, target = draw(2, 7, 50)
    target[0, 2] = options.get("ignore_index", -100)
    weights = torch.rand(2, 7, dtype=torch.float64)
    gradients = []
    for function in (cross_entropy, expected):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target, reduction=reduction, **options)
        (loss * (weights if reduction == "none" else 3.0)).sum().backward()
        gradients.append((loss.detach(), leaf.grad))
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: dict[str, Any]) -> None:
    logits, target = draw(3, 11)
    target[1] = options.get("ignore_index", -100)
    logits.requires_grad_()

    def loss(z: torch.Tensor) -> torch.Tensor:
        return cross_entropy(z, target, reduction="none", **options)

    assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_low_precision_stays_in_budget(reduction: str, in_place: bool, dtype: torch.dtype) -> None:
    logits, target = draw(9, 300, dtype=dtype)
    target[4] = -100
    wide = logits.double().requires_grad_()
    expected(wide, target, reduction=reduction).sum().backward()
    theirs = logits.clone().requires_grad_()
    functional.cross_entropy(theirs, target, reduction=reduction).sum().backward()
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    loss = cross_entropy(made, target, reduction=reduction, in_place=in_place)
    assert loss.dtype is torch.float32
    loss.sum().backward()
    for x in (leaf, theirs, wide):
        assert x.grad is not None
    testing.assert_within_budget(leaf.grad, wide.grad, theirs.grad)
    if in_place:
        # The values made way for the gradient.
        assert torch.equal(made.detach(), leaf.grad)


def test_fp16_gradients_of_a_mean_survive_a_loss_scale() -> None:
    # 1/n · p is below fp16's least number: the loss scale has to come in before the rounding.
    logits = torch.zeros(1024, 4096, dtype=torch.float16, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(1024, dtype=torch.int64))
    (loss * 2.0**16).backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad[:, 1:], torch.tensor(2.0**16 / 1024 / 4096).half())


def test_slices_of_a_sequence_need_no_copy() -> None:
    logits, target = draw(3, 9, 40, dtype=torch.float32)
    whole = logits.clone().requires_grad_()
    cross_entropy(whole[:, :-1], target[:, 1:]).backward()
    copied = logits.clone().requires_grad_()
    cross_entropy(copied[:, :-1].contiguous(), target[:, 1:].contiguous()).backward()
    assert whole.grad is not None
    assert torch.equal(whole.grad, copied.grad)


def test_mean_over_nothing_is_zero_and_leaves_weights_alone() -> None:
    logits, target = draw(4, 10, dtype=torch.float32)
    for rows, labels in ((logits, torch.full_like(target, -100)), (logits[:0], target[:0])):
        leaf = rows.clone().requires_grad_()
        loss = cross_entropy(leaf, labels)
        loss.backward()
        assert loss == 0
        assert leaf.grad is not None
        assert not leaf.grad.any()


@pytest.mark.parametrize("wrong", [-1, 10, 2**40, -101])
def test_targets_outside_the_vocabulary_are_refused(wrong: int) -> None:
    logits, target = draw(4, 10, dtype=torch.float32)
    target[2] = wrong
    message = rf"target must lie in 0\.\.9 or be ignore_index -100, got {wrong} at row 2"
    with pytest.raises(ValueError, match=message):
        cross_entropy(logits, target)


def test_in_place_refuses_what_it_would_corrupt() -> None:
    logits, target = draw(4, 10, dtype=torch.float32)
    logits.requires_grad_()
    with pytest.raises(ValueError, match="logits must not be a leaf with in_place"):
        cross_entropy(logits, target, in_place=True)
    with pytest.raises(ValueError, match="logits must be contiguous with in_place"):
        cross_entropy((logits * 1)[:, :-1], target.clamp(max=8), in_place=True)
    # tanh saves its result, whose memory the gradient takes: torch notices.
    loss = cross_entropy(torch.tanh(logits), target, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_is_differentiable_once(in_place: bool) -> None:
    logits, target = draw(4, 10, dtype=torch.float32)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf * 1, target, in_place=in_place)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran its backward twice"):
        loss.backward()
    loss = cross_entropy(leaf * 1, target, in_place=in_place)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(loss, leaf, create_graph=True)


def test_reduction_none_can_run_backward_twice() -> None:
    logits, target = draw(4, 10, dtype=torch.float32)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, target, reduction="none").sum()
    loss.backward(retain_graph=True)
    assert leaf.grad is not None
    once = leaf.grad.clone()
    loss.backward()
    assert torch.equal(leaf.grad, 2 * once)


def test_op_contract() -> None:
    ops = torch.ops.taut
    logits, target = draw(4, 10, dtype=torch.float32)
    options = (-100, 0.1, 1e-3, 5.0)
    leaf = logits.clone().requires_grad_()
    lse, one = torch.randn(4), torch.tensor(1.0)
    for op, arguments in (
        (ops.cross_entropy, (leaf, target, *options, "mean", False, True)),
        (ops.cross_entropy, (leaf, target, *options, "none", False, False)),
        (ops.cross_entropy_, (logits, target, *options, "sum", False)),
        (ops.cross_entropy_backward, (one, logits, target, lse, *options, "mean")),
        (ops.cross_entropy_backward_, (one, logits, target, lse, *options, "mean")),
        (ops.scale_, (logits, one)),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_without_graph_breaks(in_place: bool, reduction: str) -> None:
    def step(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = cross_entropy(z * 2, y, in_place=in_place, reduction=reduction)
        return (losses * 3).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5):
        logits, target = draw(M, 30, dtype=torch.float32)
        results = []
        for function in (step, compiled):
            leaf = logits.clone().requires_grad_()
            loss = function(leaf, target)
            loss.backward()
            results.append((loss.detach(), leaf.grad))
        for eager, other in zip(*results, strict=True):
            assert torch.allclose(eager, other, rtol=1e-6)


def test_module_passes_its_options_on() -> None:
    logits, target = draw(4, 10, dtype=torch.float32)
    module = CrossEntropyLoss(label_smoothing=0.2, reduction="sum")
    assert torch.equal(
        module(logits, target), cross_entropy(logits, target, label_smoothing=0.2, reduction="sum")
    )
    assert "label_smoothing=0.2" in repr(module)
    assert list(module.parameters()) == []


Z, Y = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"logits": Z.to(torch.int32)}, "logits must be bfloat16, float16 or float32"),
    ({"logits": Z[0]}, r"logits must have shape \[\.\.\., V\], got \(8,\)"),
    ({"logits": Z[:, :0]}, r"logits must have shape \[\.\.\., V\]"),
    ({"target": Y[:1]}, r"target must have shape \(2,\), got \(1,\)"),
    ({"target": Y.float()}, "target must be int64 or int32, got torch.float32"),
    ({"target": Y.to("meta")}, "target must be on cpu, got meta"),
    ({"reduction": "max"}, "reduction must be mean, sum or none, got 'max'"),
    ({"label_smoothing": 1.5}, r"label_smoothing must lie in 0\.\.1, got 1.5"),
    ({"z_loss": -0.1}, "z_loss must be at least 0 and finite, got -0.1"),
    ({"z_loss": float("nan")}, "z_loss must be at least 0 and finite, got nan"),
    ({"softcap": 0.0}, "softcap must be above 0 and finite, or None, got 0.0"),
    ({"softcap": float("inf")}, "softcap must be above 0 and finite, or None, got inf"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": Z, "target": Y}
    assert cross_entropy(**arguments).shape == ()
    with pytest.raises(ValueError, match=message):
        cross_entropy(**arguments | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(1, 128256), (37, 50257), (64, 1000), (3, 1), (130, 32000)])
def test_gpu_kernel_matches_reference(
    shape: tuple[int, int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    logits, target = draw(*shape, dtype=dtype, device="cuda")
    target = target % shape[1]
    named = dict(options)
    named["softcap"] = named.get("softcap") or 0.0
    objective = Objective(**named)
    scale = torch.rand(shape[0], device="cuda")
    gold_grad, reference_grad = torch.empty_like(logits.double()), torch.empty_like(logits)
    gold = row_softmax.cross_entropy_ref(
        logits.double(), target, objective, scale.double(), gold_grad
    )
    reference = row_softmax.cross_entropy_ref(logits, target, objective, scale, reference_grad)
    grad = torch.full_like(logits, float("nan"))
    with testing.nan_poison():
        found = row_softmax.launch(logits, target, objective, scale, grad)
    size = logits.abs().max().item() * max(1.0, gold[0].abs().max().item())
    for actual, wanted, rounded in zip(found, gold, reference, strict=True):
        budget = 2 * (testing.max_error(rounded, wanted) + 4e-7 * size)
        assert testing.max_error(actual, wanted) <= budget
    rounding = torch.finfo(dtype).eps * gold_grad.abs().max().item() + 4e-7 * size
    budget = 2 * (testing.max_error(reference_grad, gold_grad) + rounding)
    assert testing.max_error(grad, gold_grad) <= budget
    over = logits.clone()
    row_softmax.launch(over, target, objective, scale, over)
    assert torch.equal(over, grad)


@pytest.mark.gpu
def test_gpu_never_reads_behind_an_impossible_target() -> None:
    logits, target = draw(5, 1000, dtype=torch.bfloat16, device="cuda")
    target[1], target[3] = 2**40, -7
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target, reduction="none")
    loss.nansum().backward()
    assert loss.isnan().tolist() == [False, True, False, True, False]
    with pytest.raises(ValueError, match="got 1099511627776 at row 1"):
        cross_entropy(logits, target, check_targets=True)


@pytest.mark.gpu
def test_gpu_rows_far_apart_and_strided() -> None:
    # Rows 2**31 elements apart: the offset needs 64 bits.
    logits, target = draw(2, 4096, dtype=torch.bfloat16, device="cuda")
    far = torch.empty(2, 2**31 + 4096, dtype=torch.bfloat16, device="cuda")[:, -4096:]
    far.copy_(logits)
    wanted = cross_entropy(logits, target, reduction="none")
    assert torch.equal(cross_entropy(far, target, reduction="none"), wanted)
    columns = logits.t().contiguous().t()
    assert torch.equal(cross_entropy(columns, target, reduction="none"), wanted)
    apart = torch.stack((target, target + 1), dim=1)[:, 0]
    assert torch.equal(cross_entropy(logits, apart, reduction="none"), wanted)


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_device() -> None:
    logits, target = draw(64, 32000, dtype=torch.bfloat16, device="cuda")
    leaf = logits.requires_grad_()
    cross_entropy(leaf, target).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cross_entropy(leaf, target).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
