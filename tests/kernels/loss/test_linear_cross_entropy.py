"""`taut::linear_cross_entropy`: specification, cuts, memory, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch.nn import functional
from torch.utils import checkpoint

from taut_bench import testing
from taut_kernels.launch import launcher
from taut_kernels.loss import linear_cross_entropy as lce
from taut_kernels.loss import logit_cut, row_chunks, vocabulary_chunks
from taut_kernels.loss.linear_cross_entropy import linear_cross_entropy
from taut_kernels.loss.modules import LinearCrossEntropyLoss

INTERPRET = Path(__file__).with_name("interpret_loss.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CUTS: list[dict[str, Any]] = [
    {"chunk_by": "tokens", "chunk_size": 5},
    {"chunk_by": "tokens", "chunk_size": 5, "accumulate_fp32": True},
    {"chunk_by": "vocabulary", "chunk_size": 16},
    {},
]


@pytest.fixture(autouse=True)
def _one_thread(_two_threads: None) -> None:
    """Tensors are tiny here, and on a busy machine a second thread is mostly waited for."""
    torch.set_num_threads(1)


def draw(
    M: int, H: int, V: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw x, weight, bias and target, which ignores each seventh token."""
    generator = torch.Generator().manual_seed(M + H + V)
    x = torch.randn(M, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) * 2 / H**0.5
    bias = torch.randn(V, generator=generator)
    target = torch.randint(0, V, (M,), generator=generator)
    target[::7] = -100
    return *(t.to(dtype).to(device) for t in (x, weight, bias)), target.to(device)


def results(function: Any, operands: Any, target: torch.Tensor, **options: Any) -> list[Any]:
    """Run forward and backward; return the loss and the operands' gradients."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in operands]
    x, weight, bias = leaves
    loss = function(x, weight, target, bias=bias, **options)
    (
        loss * torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    ).sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    z = functional.linear(x, weight, bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    losses = functional.cross_entropy(
        z,
        target,
        reduction="none",
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )
    counts = target != ignore_index
    losses = losses + torch.where(counts, z_loss * z.logsumexp(1) ** 2, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


@interpreter
@pytest.mark.parametrize(
    "checks",
    [
        {"linear_cross_entropies": 16},
        {
            "blocks_of_the_vocabulary": 16,
            "blocks_of_impossible_targets": 2,
            "empty_batches": 2,
        },
    ],
)
def test_interpreted_kernels(checks: dict[str, int], run_checks: Any) -> None:
    process = run_checks(INTERPRET, *checks, env={"TRITON_INTERPRET": "1"}, timeout=570)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines() == [f"{name} {count}" for name, count in checks.items()]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_are_torchs(
    reduction: str, with_bias: bool, use_checkpoint: bool, cut: dict[str, Any]
) -> None:
    # 20 tokens on 8 columns: some logits are kept in the gradient, some projected again.
    *operands, target = draw(20, 8, 53)
    if not with_bias:
        operands[2] = None  # type: ignore[call-overload]
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 6.0}
    ours = results(
        linear_cross_entropy, operands, target, use_checkpoint=use_checkpoint, **options, **cut
    )
    theirs = results(by_torch, operands, target, **options)
    for found, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ignore_index", [3, -1, 1000])
@pytest.mark.parametrize("cut", CUTS)
def test_any_label_can_be_the_ignored_one(cut: dict[str, Any], ignore_index: int) -> None:
    """Also one of the vocabulary, and one beyond it."""
    *operands, target = draw(20, 8, 53)
    target[target == -100] = ignore_index
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": 0.1}
    ours = results(linear_cross_entropy, operands, target, **options, **cut)
    theirs = results(by_torch, operands, target, **options)
    for found, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cut", CUTS)
def test_gradcheck(cut: dict[str, Any]) -> None:
    x, weight, bias, target = draw(6, 4, 19)
    operands = [t.requires_grad_() for t in (x, weight, bias)]

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(
            x,
            weight,
            target,
            bias=bias,
            label_smoothing=0.1,
            z_loss=0.1,
            use_checkpoint=True,
            **cut,
        )

    assert torch.autograd.gradcheck(loss, operands)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_low_precision_stays_in_budget(dtype: torch.dtype, cut: dict[str, Any]) -> None:
    *operands, target = draw(40, 32, 300, dtype)
    gold = results(by_torch, [t.double() for t in operands], target)
    theirs = results(by_torch, operands, target)
    ours = results(linear_cross_entropy, operands, target, **cut)
    # torch rounds the loss to the operands' type, we do not.
    assert abs(ours[0] - gold[0]) <= 2 * abs(theirs[0] - gold[0]) + 1e-3 * gold[0]
    for found, wanted, rounded in zip(ours[1:], gold[1:], theirs[1:], strict=True):
        testing.assert_within_budget(found, wanted, rounded)


def test_fp32_sums_are_closer_than_bf16_sums() -> None:
    *operands, target = draw(256, 16, 40, torch.bfloat16)
    gold = results(by_torch, [t.double() for t in operands], target)[2]
    errors = {
        fp32: testing.max_error(
            results(linear_cross_entropy, operands, target, chunk_size=4, accumulate_fp32=fp32)[2],
            gold,
        )
        for fp32 in (False, True)
    }
    assert errors[True] < 0.5 * errors[False]


@pytest.mark.parametrize(
    ("M", "itemsize", "options", "weight_wanted", "wanted"),
    [
        (8192, 2, (128256, "auto", 0), True, ("tokens", 768)),
        (8192, 2, (256000, "auto", 0), True, ("vocabulary", 3584)),
        (8192, 2, (256000, "auto", 0), False, ("tokens", 384)),
        (200, 2, (256000, "auto", 0), True, ("tokens", 384)),
        (8192, 2, (256000, "auto", 2048), True, ("tokens", 2048)),
        (8192, 2, (256000, "tokens", 0), True, ("tokens", 384)),
        (1024, 2, (128256, "vocabulary", 0), True, ("vocabulary", 8192)),
        (1 << 20, 2, (128256, "vocabulary", 0), True, ("vocabulary", 1024)),
        (0, 4, (32000, "auto", 0), True, ("tokens", 1536)),
    ],
)
def test_cut_follows_the_workspace(
    M: int,
    itemsize: int,
    options: tuple[int, str, int],
    weight_wanted: bool,
    wanted: tuple[str, int],
) -> None:
    V, chunk_by, chunk_size = options
    cut = logit_cut.plan(M, V, itemsize, chunk_by, chunk_size, weight_wanted=weight_wanted)
    assert (cut.by, cut.size) == wanted


@pytest.mark.parametrize("shape", [(8192, 2304, 256000), (8192, 4096, 128256)])
def test_planned_memory_of_the_bar_is_below_its_limit(shape: tuple[int, int, int]) -> None:
    M, H, V = shape
    cut = logit_cut.plan(M, V, 2, "auto", 0, weight_wanted=True)
    gradients = 2 * (M * H + V * H)
    if cut.by == "tokens":
        peak = gradients + 2 * cut.size * V
    else:
        # The fp32 sum for x stands in until the rounded one is made, without the block.
        peak = max(2 * V * H + 4 * M * H + 2 * M * cut.size, gradients + 4 * M * H)
    # Without cuBLAS's 32 MiB, which any product before took: the benchmark counts it for nobody.
    statistics = 8 * 4 * M
    assert peak + statistics <= 1.25 * 2**30


@pytest.mark.parametrize("cut", CUTS[:3])
def test_no_allocation_holds_the_logits(cut: dict[str, Any]) -> None:
    M, H, V = 64, 4, 256
    *operands, target = draw(M, H, V, torch.float32)
    operands[2] = None  # type: ignore[call-overload]
    largest = 0
    allocate = launcher.empty

    def empty(shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, torch.Size(shape).numel())
        return allocate(shape, **kind)

    with mock.patch.object(launcher, "empty", empty):
        results(linear_cross_entropy, operands, target, **cut)
    chunk = cut["chunk_size"] * (V if cut["chunk_by"] == "tokens" else M)
    assert largest <= max(chunk, V * H)


def test_gradients_are_handed_over_without_a_copy() -> None:
    x, weight, _, target = draw(10, 8, 40, torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    assert loss.grad_fn is not None
    saved = {t.data_ptr() for t in loss.grad_fn.saved_tensors}  # type: ignore[attr-defined]
    (3 * loss).backward()
    assert weight.grad is not None
    assert x.grad is not None
    assert {weight.grad.data_ptr(), x.grad.data_ptr()} <= saved


def test_frozen_operands_get_no_gradient_and_cost_none() -> None:
    x, weight, bias, target = draw(10, 8, 40, torch.float32)
    x.requires_grad_()
    for chunk_by in ("tokens", "vocabulary"):
        x.grad = None
        linear_cross_entropy(x, weight, target, bias=bias, chunk_by=chunk_by).backward()
        wanted = results(by_torch, (x, weight, bias), target)[1]
        assert x.grad is not None
        assert torch.allclose(x.grad, wanted, atol=1e-6)
    *_, grad_weight, grad_bias = torch.ops.taut.linear_cross_entropy(
        x, weight, bias, target, -100, 0.0, 0.0, 0.0, "mean", "auto", 0, False, False,
        [True, False, False],
    )  # fmt: skip
    assert grad_weight.numel() == grad_bias.numel() == 0
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, target).requires_grad


def test_takes_sequences_and_weights_at_any_stride() -> None:
    x, weight, _, target = draw(12, 8, 40, torch.float32)
    flat = linear_cross_entropy(x, weight, target, reduction="none")
    folded = linear_cross_entropy(
        x.view(3, 4, 8), weight.t().contiguous().t(), target.view(3, 4).int(), reduction="none"
    )
    assert folded.shape == (3, 4)
    assert torch.allclose(folded.flatten(), flat)
    wide = torch.zeros(40, 16)
    wide[:, ::2] = weight
    columns = wide[:, ::2].requires_grad_()
    linear_cross_entropy(x, columns, target, chunk_by="vocabulary").backward()
    assert columns.grad is not None
    wanted = results(by_torch, (x, weight, None), target)[2]
    assert torch.allclose(columns.grad, wanted, atol=1e-6)


def test_a_column_of_labels_reaches_the_kernels_without_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, _, target = draw(12, 8, 40, torch.float32)
    column = torch.stack([target, target + 1], dim=1)[:, 0]
    op, seen = torch.ops.taut.linear_cross_entropy, []
    monkeypatch.setattr(
        torch.ops.taut,
        "linear_cross_entropy",
        lambda *arguments: seen.append(arguments[3].stride()) or op(*arguments),
    )
    linear_cross_entropy(x, weight, column)
    assert seen == [(1,)]


@pytest.mark.parametrize("cut", CUTS)
def test_ignored_and_empty_batches(cut: dict[str, Any]) -> None:
    x, weight, _, target = draw(20, 8, 40, torch.float32)
    for rows, labels in ((x, torch.full_like(target, -100)), (x[:0], target[:0])):
        loss, grad_x, grad_weight = results(
            linear_cross_entropy, (rows, weight, None), labels, **cut
        )
        assert loss == 0
        assert not grad_x.any()
        assert grad_weight.shape == weight.shape
        assert not grad_weight.any()


def test_autocast_casts_the_operands() -> None:
    x, weight, bias, target = draw(10, 8, 40, torch.float32)
    low = [t.bfloat16() for t in (x, weight, bias)]
    wanted = results(linear_cross_entropy, low, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(linear_cross_entropy, (x, weight, bias), target)
    assert found[0].dtype is torch.float32
    assert found[1].dtype is torch.float32
    for ours, cast in zip(found, wanted, strict=True):
        assert torch.equal(ours, cast.to(ours.dtype))


@pytest.mark.parametrize("wrong", [-1, 40, 2**33])
def test_targets_outside_the_vocabulary_are_refused(wrong: int) -> None:
    x, weight, _, target = draw(10, 8, 40, torch.float32)
    target[3] = wrong
    with pytest.raises(ValueError, match=rf"target must lie in 0\.\.39 .* got {wrong} at row 3"):
        linear_cross_entropy(x, weight, target)


def test_is_differentiable_once_unless_checkpointed() -> None:
    x, weight, _, target = draw(10, 8, 40, torch.float32)
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="taut::linear_cross_entropy ran its backward twice"):
        loss.backward()
    for use_checkpoint in (False, True):
        loss = linear_cross_entropy(x, weight, target, use_checkpoint=use_checkpoint)
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            torch.autograd.grad(loss, weight, create_graph=True)
    weight.grad = None
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)


def test_op_contract() -> None:
    op = torch.ops.taut.linear_cross_entropy.default
    x, weight, bias, target = draw(6, 8, 30, torch.float32)
    for operand in (x, weight, bias):
        operand.requires_grad_()
    options = (-100, 0.1, 1e-3, 5.0)
    for operands, rest in (
        ((x, weight, bias), ("mean", "tokens", 4, True, False, [True] * 3)),
        ((x, weight, None), ("sum", "vocabulary", 16, False, False, [True, True, False])),
        ((x, weight, None), ("none", "auto", 0, False, False, [False] * 3)),
    ):
        torch.library.opcheck(op, (*operands, target, *options, *rest))


def test_module_trains_as_the_function_does() -> None:
    """Compiled whole, under autocast, with its activations recomputed: the same gradients."""
    x, weight, bias, target = draw(12, 8, 30, torch.float32)
    module = LinearCrossEntropyLoss(label_smoothing=0.1, chunk_size=5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    def of_function(*operands: Any, bias: Any) -> torch.Tensor:
        return linear_cross_entropy(*operands, bias=bias, label_smoothing=0.1, chunk_size=5)

    def recomputed(*operands: Any, bias: Any) -> Any:
        return checkpoint.checkpoint(module, *operands, bias, use_reentrant=False)

    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
            wanted = results(of_function, (x, weight, bias), target)
            for other in (compiled, recomputed):
                for found, right in zip(
                    results(other, (x, weight, bias), target), wanted, strict=True
                ):
                    assert torch.allclose(found, right, rtol=1e-5, atol=1e-6)


def test_module_passes_its_options_on() -> None:
    x, weight, bias, target = draw(6, 8, 30, torch.float32)
    module = LinearCrossEntropyLoss(reduction="sum", chunk_size=3)
    wanted = linear_cross_entropy(x, weight, target, bias=bias, reduction="sum", chunk_size=3)
    assert torch.equal(module(x, weight, target, bias), wanted)


X, W, Y = torch.zeros(2, 8), torch.zeros(30, 8), torch.zeros(2, dtype=torch.int64)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": X.int()}, "x must be bfloat16, float16 or float32, got torch.int32"),
    ({"x": X[:, :0]}, r"x must have shape \[\.\.\., H\]"),
    ({"weight": W[:, :7]}, r"weight must have shape \[V, 8\], got \(30, 7\)"),
    ({"weight": W.half()}, "weight must be torch.float32 on cpu, got torch.float16"),
    ({"weight": W.to("meta")}, "weight must be torch.float32 on cpu, got .* on meta"),
    ({"bias": W[:7, 0]}, r"bias must have shape \(30,\), got \(7,\)"),
    ({"bias": W[:, 0].half()}, "bias must be torch.float32"),
    ({"target": Y[:1]}, r"target must have shape \(2,\)"),
    ({"reduction": "max"}, "reduction must be"),
    ({"label_smoothing": -0.1}, r"label_smoothing must lie in 0\.\.1, got -0.1"),
    ({"z_loss": float("inf")}, "z_loss must be at least 0 and finite, got inf"),
    ({"softcap": float("nan")}, "softcap must be above 0 and finite"),
    ({"chunk_by": "rows"}, "chunk_by must be auto, tokens or vocabulary, got 'rows'"),
    ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ({"chunk_size": 9000, "chunk_by": "vocabulary"}, "and at most 8192 columns, got 9000"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": W, "target": Y}
    assert linear_cross_entropy(**arguments).shape == ()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 256, 5003), (1000, 128, 32000), (7, 64, 128256)])
@pytest.mark.parametrize(
    "cut",
    [
        {"chunk_by": "tokens", "chunk_size": 128},
        {"chunk_by": "tokens", "chunk_size": 128, "accumulate_fp32": True},
        {"chunk_by": "vocabulary"},
        {"chunk_by": "vocabulary", "use_checkpoint": True},
    ],
)
def test_gpu_matches_fp64(
    cut: dict[str, Any], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    *operands, target = draw(*shape, dtype, "cuda")
    gold = results(by_torch, [t.double() for t in operands], target)
    theirs = results(by_torch, operands, target)
    with testing.nan_poison():
        ours = results(linear_cross_entropy, operands, target, **cut)
    assert abs(ours[0] - gold[0]) <= 2 * abs(theirs[0] - gold[0]) + 1e-3 * gold[0]
    for found, wanted, rounded in zip(ours[1:], gold[1:], theirs[1:], strict=True):
        testing.assert_within_budget(found, wanted, rounded)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("chunk_by", ["tokens", "vocabulary"])
def test_gpu_options_match_fp64(chunk_by: str, reduction: str) -> None:
    *operands, target = draw(300, 256, 5003, torch.bfloat16, "cuda")
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 6.0}
    gold = results(by_torch, [t.double() for t in operands], target, **options)
    theirs = results(by_torch, operands, target, **options)
    with testing.nan_poison():
        ours = results(linear_cross_entropy, operands, target, chunk_by=chunk_by, **options)
    assert torch.allclose(ours[0].double(), gold[0], rtol=2e-2)
    for found, wanted, rounded in zip(ours[1:], gold[1:], theirs[1:], strict=True):
        testing.assert_within_budget(found, wanted, rounded)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_by", ["tokens", "vocabulary"])
def test_gpu_impossible_targets_read_nothing_beyond(chunk_by: str) -> None:
    """Not asked to look, it computes the other rows as if these were ignored."""
    x, weight, _, target = draw(300, 64, 5003, torch.bfloat16, "cuda")
    wrong = target.clone()
    wrong[[5, 70, 299]] = torch.tensor([5003, 2**40, -7], device="cuda")
    rows = linear_cross_entropy(x, weight, wrong, reduction="none", chunk_by=chunk_by)
    right = linear_cross_entropy(x, weight, target, reduction="none", chunk_by=chunk_by)
    kept = wrong == target
    assert torch.equal(rows[kept], right[kept])
    with pytest.raises(ValueError, match="target must lie in"):
        linear_cross_entropy(x, weight, wrong, chunk_by=chunk_by, check_targets=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 2304, 256000), (8192, 4096, 128256)])
def test_gpu_peak_memory_of_the_bar(shape: tuple[int, int, int]) -> None:
    M, H, V = shape
    x = torch.randn(M, H, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(V, H, device="cuda", dtype=torch.bfloat16) / H**0.5).requires_grad_()
    target = torch.randint(0, V, (M,), device="cuda")
    for _ in range(2):
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_cross_entropy(x, weight, target).backward()
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 1.25 * 2**30


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_device() -> None:
    x, weight, _, target = draw(300, 64, 5000, torch.bfloat16, "cuda")
    for operand in (x, weight):
        operand.requires_grad_()
    for chunk_by in ("tokens", "vocabulary"):
        linear_cross_entropy(x, weight, target, chunk_by=chunk_by).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_cross_entropy(x, weight, target, chunk_by=chunk_by).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_workspaces_are_whole_tiles() -> None:
    assert row_chunks.default_chunk(128256, 2) % 128 == 0
    assert row_chunks.default_chunk(10**9, 2) == 128
    assert vocabulary_chunks.default_columns(8192, 2) % 256 == 0
    assert lce.CHUNK_BY == ("auto", "tokens", "vocabulary")
