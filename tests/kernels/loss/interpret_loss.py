"""Run by the tests of the losses with TRITON_INTERPRET=1: jit kernels on CPU tensors.

In its own process, since Triton reads the variable when it is imported. Only fp16 and fp32 (bf16
arithmetic is silently garbage there).
"""

import sys
import warnings
from unittest import mock

import torch

from taut_bench import testing
from taut_kernels.launch import launcher
from taut_kernels.loss import (
    block_softmax,
    gradient_scale,
    linear_cross_entropy,
    linear_divergence,
    logit_cut,
    row_softmax,
    row_weights,
)
from taut_kernels.loss import divergence as loss_divergence
from taut_kernels.loss.divergence import Divergence
from taut_kernels.loss.reduction import row_scale
from taut_kernels.loss.row_softmax import Objective
from taut_kernels.loss.tiles import LossTile

DTYPES = (torch.float16, torch.float32)
# M, V, tile: one step; a partial last step; as many columns as steps hold; one column; long rows.
ROWS = [
    (3, 100, LossTile(128, 4, 1)),
    (5, 1000, LossTile(256, 4, 2)),
    (2, 512, LossTile(128, 4, 3)),
    (4, 1, LossTile(16, 1, 1)),
    (1, 10011, LossTile(4096, 8, 3)),
]
OBJECTIVES = [
    Objective(),
    Objective(label_smoothing=0.1, z_loss=1e-2),
    Objective(ignore_index=0, softcap=5.0),
    Objective(label_smoothing=1.0, z_loss=1e-3, softcap=30.0),
]
DIVERGENCES = [
    Divergence("forward_kl", 1.0, 0.0),
    Divergence("forward_kl", 2.0, 0.0),
    Divergence("reverse_kl", 0.7, 1.0),
    Divergence("jsd", 1.0, 0.5),
    Divergence("jsd", 3.0, 0.1),
]


def nan_like(x):
    return torch.full_like(x, float("nan"))


def draw(M, V, dtype, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed + M * V)
    logits = (torch.randn(M, V, generator=generator) * scale).to(dtype)
    target = torch.randint(0, V, (M,), generator=generator)
    weights = torch.rand(M, generator=generator)
    return logits, target, weights


def assert_within_budget(actual, gold, reference, logits):
    """The budget of testing.py, with the rounding of what the results are small differences of.

    A loss is a log-sum-exp minus a logit, a gradient a probability, whose relative error is the
    absolute one of its logit, minus another: each logit is rounded twice in fp32.
    """
    assert torch.isfinite(actual).all()
    assert actual.dtype == reference.dtype
    largest = gold.abs().max().item()
    size = max(1.0, logits.double().abs().max().item()) * max(1.0, largest)
    rounding = torch.finfo(actual.dtype).eps * largest + 2 * torch.finfo(torch.float32).eps * size
    budget = testing.BUDGET_FACTOR * (testing.max_error(reference, gold) + rounding)
    error = testing.max_error(actual, gold)
    assert error <= budget, f"error {error:.3e} is above the budget {budget:.3e}"


def check_rows(logits, target, objective, scale, tile, *, grad="new"):
    """Hold loss, lse and gradient of one call to the budget; `grad` names where it goes."""
    gold_grad, reference_grad = nan_like(logits.double()), nan_like(logits)
    gold = row_softmax.cross_entropy_ref(
        logits.double(), target, objective, scale.double(), gold_grad
    )
    reference = row_softmax.cross_entropy_ref(logits, target, objective, scale, reference_grad)
    logits = logits.clone() if grad == "over" else logits
    out = {"new": nan_like(logits).contiguous(), "over": logits, "none": None}[grad]
    factors = None if out is None else scale
    found = row_softmax.launch(logits, target, objective, factors, out, tile=tile)
    source = gold[1] if grad == "over" else logits  # the logits are gone
    for triple in zip(found, gold, reference, strict=True):
        assert_within_budget(*triple, source)
    if out is not None:
        assert_within_budget(out, gold_grad.view(out.shape), reference_grad, source)
    return found[1]


def cross_entropy_rows():
    count = 0
    for dtype in DTYPES:
        for M, V, tile in ROWS:
            logits, target, scale = draw(M, V, dtype)
            for objective in OBJECTIVES:
                for grad in ("new", "over", "none"):
                    lse = check_rows(logits, target, objective, scale, tile, grad=grad)
                    count += 1
                # The gradient alone, from the lse of the call before.
                again, wanted = nan_like(logits), nan_like(logits)
                row_softmax.launch(logits, target, objective, scale, again, lse, tile)
                row_softmax.launch(logits, target, objective, scale, wanted, tile=tile)
                # Between fp32 lse in a register and in memory there is one rounding.
                assert torch.allclose(again, wanted, rtol=1e-5, atol=1e-6)
                count += 1
    return count


def cross_entropy_strides():
    base, target, scale = draw(12, 2 * 70, torch.float32)
    views = (
        base[:, 3:73],
        base[:, ::2],
        base[:, 70:].t()[:12, :12].t(),
        base.view(3, 4, 140)[:, :-1, :70],
        base.view(3, 4, 140).transpose(0, 1)[..., :70],
        base[:1].expand(12, -1)[:, :70],
    )
    for view in views:
        M, V = view.shape[:-1].numel(), view.shape[-1]
        check_rows(view, target[:M] % V, Objective(), scale[:M], LossTile(64, 4, 2))
    return len(views)


def cross_entropy_ignored_and_impossible_targets():
    logits, target, scale = draw(7, 300, torch.float32)
    target[1], target[2], target[4], target[6] = -100, 300, -1, 2**40
    logits[1, 5] = float("inf")
    grad = nan_like(logits)
    losses, lse = row_softmax.launch(
        logits, target, Objective(), scale, grad, tile=LossTile(128, 4, 2)
    )
    assert losses.isnan().tolist() == [False, False, True, False, True, False, True]
    assert losses[1] == 0 == lse[1]
    assert not grad[1].any()
    assert grad[[2, 4, 6]].isnan().all()
    assert grad[[0, 3, 5]].isfinite().all()
    return 1


def cross_entropy_adversarial_values():
    base, target, scale = draw(4, 300, torch.float32)
    minus = float("-inf")
    edits = (
        lambda z: z.zero_(),
        lambda z: z.fill_(-3e4),
        lambda z: z[:, 7].fill_(6e4),
        lambda z: z[:, :128].fill_(minus),
        lambda z: z[:, 200:].fill_(minus),
    )
    for edit in edits:
        edit(logits := base.clone())
        target.fill_(130)
        for dtype in DTYPES:
            check_rows(logits.to(dtype), target, Objective(), scale, LossTile(128, 4, 2))
    # What has no value: NaN, as torch says, in its own rows only.
    logits = base.clone()
    logits[0], logits[1, 3], logits[2, 3] = minus, float("inf"), float("nan")
    grad = nan_like(logits)
    losses, _ = row_softmax.launch(
        logits, target, Objective(), scale, grad, tile=LossTile(128, 4, 2)
    )
    wanted = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    assert torch.allclose(losses, wanted, equal_nan=True)
    assert grad[3].isfinite().all()
    return len(edits) + 1


def divergence_rows():
    count = 0
    for dtype in DTYPES:
        for M, V, tile in ROWS:
            student, _, scale = draw(M, V, dtype)
            teacher, _, _ = draw(M, V, dtype, seed=1)
            keep = torch.arange(M) != 1
            for divergence in DIVERGENCES:
                golds = [x.double() for x in (student, teacher)]
                gold_grad, reference_grad = nan_like(golds[0]), nan_like(student)
                gold = loss_divergence.divergence_ref(
                    *golds, keep, divergence, scale.double(), gold_grad
                )
                reference = loss_divergence.divergence_ref(
                    student, teacher, keep, divergence, scale, reference_grad
                )
                over, z = student.clone(), student / divergence.temperature
                found = loss_divergence.launch(over, teacher, keep, divergence, scale, over, tile)
                assert_within_budget(found, gold, reference, student / divergence.temperature)
                assert_within_budget(over, gold_grad, reference_grad, z)
                alone = loss_divergence.launch(student, teacher, keep, divergence, tile=tile)
                assert_within_budget(alone, gold, reference, student / divergence.temperature)
                count += 1
    return count


def divergence_of_impossible_tokens():
    student, _, scale = draw(3, 300, torch.float32)
    teacher, _, _ = draw(3, 300, torch.float32, seed=1)
    student[0, :150] = teacher[0, :150] = float("-inf")
    teacher[1, 20:40] = float("-inf")
    student[2] = teacher[2]
    keep = torch.ones(3, dtype=torch.bool)
    for divergence in DIVERGENCES:
        if divergence.form == "reverse_kl":
            continue  # infinite where the teacher rules a token out
        grad, wanted_grad = nan_like(student), nan_like(student)
        wanted = loss_divergence.divergence_ref(
            student, teacher, keep, divergence, scale, wanted_grad
        )
        found = loss_divergence.launch(
            student, teacher, keep, divergence, scale, grad, LossTile(128, 4, 2)
        )
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert torch.allclose(grad, wanted_grad, rtol=1e-4, atol=1e-6)
        assert abs(found[2]) < 1e-5
    return len(DIVERGENCES)


def blocks_of_the_vocabulary():
    count = 0
    for dtype in DTYPES:
        logits, target, scale = draw(5, 300, dtype)
        for objective in OBJECTIVES:
            target[3] = objective.ignore_index
            for columns in (77, 300):
                known = block_softmax.Statistics(5, torch.float32, logits.device)
                for start in range(0, 300, columns):
                    part = logits[:, start : start + columns]
                    block_softmax.launch_statistics(part, target, known.values, start, objective)
                losses, lse = known.finish(target, objective, 300)
                grad = nan_like(logits)
                for start in range(0, 300, columns):
                    part = slice(start, start + columns)
                    block_softmax.launch_gradient(
                        logits[:, part], grad[:, part], target, scale, lse, start, 300, objective
                    )
                wanted_grad = nan_like(logits)
                wanted = row_softmax.launch(
                    logits, target, objective, scale, wanted_grad, tile=LossTile(128, 4, 2)
                )
                assert torch.allclose(losses, wanted[0], rtol=1e-5, atol=1e-5)
                assert torch.allclose(lse, wanted[1], rtol=1e-6, atol=1e-6)
                step = torch.finfo(dtype).eps
                assert torch.allclose(grad, wanted_grad, rtol=step, atol=1e-6)
                count += 1
    return count


def blocks_of_impossible_targets():
    """A target of no block is not followed: NaN in its own row, others as without it."""
    columns, V = 77, 300
    for dtype in DTYPES:
        logits, target, scale = draw(7, V, dtype)
        target[1], target[2], target[4], target[6] = -100, V, -1, 2**32 + 5
        known = block_softmax.Statistics(7, torch.float32, logits.device)
        for start in range(0, V, columns):
            part = logits[:, start : start + columns]
            block_softmax.launch_statistics(part, target, known.values, start, Objective())
        losses, lse = known.finish(target, Objective(), V)
        grad = nan_like(logits)
        for start in range(0, V, columns):
            part = slice(start, start + columns)
            block_softmax.launch_gradient(
                logits[:, part], grad[:, part], target, scale, lse, start, V, Objective()
            )
        assert losses.isnan().tolist() == [False, False, True, False, True, False, True]
        assert not losses[1]
        assert not grad[1].any()
        assert grad[[2, 4, 6]].isnan().all()
        good = [0, 3, 5]
        wanted_grad = nan_like(logits[good])
        wanted, _ = row_softmax.launch(
            logits[good], target[good], Objective(), scale[good], wanted_grad
        )
        assert torch.allclose(losses[good], wanted, rtol=1e-5, atol=1e-5)
        assert torch.allclose(grad[good], wanted_grad, rtol=torch.finfo(dtype).eps, atol=1e-6)
    return len(DTYPES)


def linear_operands(M, H, V, dtype, with_bias):
    generator = torch.Generator().manual_seed(M + V)
    x = torch.randn(M, H, generator=generator).to(dtype)
    weight = (torch.randn(V, H, generator=generator) * 2 / H**0.5).to(dtype)
    bias = torch.randn(V, generator=generator).to(dtype) if with_bias else None
    target = torch.randint(0, V, (M,), generator=generator)
    target[::5] = -100
    return x, weight, bias, target


CUTS = [("tokens", 7), ("tokens", 64), ("vocabulary", 96), ("vocabulary", 4096)]


def check_linear(operands, cut):
    *projection, target = operands
    wants = [True, True, projection[2] is not None]
    options = (-100, 0.1, 1e-3, 10.0, "mean", *cut, cut[1] == 7)
    run = linear_cross_entropy._linear_cross_entropy
    found = run(logit_cut.TRITON, *operands, *options, False, wants)
    wide = [None if t is None else t.double() for t in projection]
    gold = run(logit_cut.TORCH, *wide, target, *options, False, wants)
    reference = run(logit_cut.TORCH, *operands, *options, False, wants)
    for triple in zip(found, gold, reference, strict=True):
        testing.assert_within_budget(*triple)
    again = linear_cross_entropy._linear_cross_entropy_backward(
        logit_cut.TRITON, torch.tensor(1.0), found[1], *operands, *options, wants
    )
    for triple in zip(again, gold[2:], reference[2:], strict=True):
        testing.assert_within_budget(*triple)


def linear_cross_entropies():
    count = 0
    with mock.patch.object(launcher, "empty", testing._empty_nan):
        for dtype in DTYPES:
            for M, H, V, with_bias in ((20, 8, 150, False), (6, 24, 97, True)):
                operands = linear_operands(M, H, V, dtype, with_bias)
                for cut in CUTS:
                    check_linear(operands, cut)
                    count += 1
    return count


def linear_divergences():
    count = 0
    with mock.patch.object(launcher, "empty", testing._empty_nan):
        for dtype in DTYPES:
            x, weight, bias, target = linear_operands(20, 8, 150, dtype, True)
            teacher = linear_operands(20, 12, 150, torch.float16, False)
            keep = target != -100
            for form, beta in (("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)):
                wants = [True] * 3
                options = (keep, form, 2.0, beta, "mean", 7, dtype is torch.float16, wants)
                run = linear_divergence._linear_divergence
                student = (x, weight, bias)
                found = run(loss_divergence.launch, *student, *teacher[:3], *options)
                wide = [None if t is None else t.double() for t in (*student, *teacher[:3])]
                gold = run(loss_divergence.divergence_ref, *wide, *options)
                reference = run(loss_divergence.divergence_ref, *student, *teacher[:3], *options)
                for triple in zip(found, gold, reference, strict=True):
                    testing.assert_within_budget(*triple)
                count += 1
    return count


def empty_batches():
    none = torch.zeros(0, 8)
    weight, target = torch.zeros(30, 8), torch.zeros(0, dtype=torch.int64)
    for cut in (("tokens", 0), ("vocabulary", 0)):
        options = (-100, 0.0, 0.0, 0.0, "mean", *cut, False, False, [True, True, False])
        loss, _, grad_x, grad_weight, _ = linear_cross_entropy._linear_cross_entropy(
            logit_cut.TRITON, none, weight, None, target, *options
        )
        assert loss == 0
        assert grad_x.shape == (0, 8)
        assert torch.equal(grad_weight, weight)
    losses, _ = row_softmax.launch(torch.zeros(0, 9), target, Objective())
    assert losses.shape == (0,)
    return 2


def scaling():
    for dtype in DTYPES:
        x = torch.randn(70001).to(dtype)  # more blocks than programs
        y = x.clone()
        gradient_scale.launch_scale_(y, torch.tensor(1.0))
        assert torch.equal(y, x)
        gradient_scale.launch_scale_(y, torch.tensor(0.3))
        assert torch.equal(y, (x.float() * torch.tensor(0.3)).to(dtype))
        gradient_scale.launch_scale_(y[:0], torch.tensor(0.3))
    return len(DTYPES)


def weights_of_rows():
    shapes = (1, 100, row_weights.BLOCK + 3, 2 * row_weights.BLOCK)
    for M in shapes:
        generator = torch.Generator().manual_seed(M)
        losses = torch.randn(M, generator=generator)
        for share in (0.0, 0.5, 1.0):  # of rows that do not count
            target = torch.where(torch.rand(M, generator=generator) < share, -100, 7)
            for reduction in ("mean", "sum"):
                weights = row_weights.launch_row_weights(target, -100, mean=reduction == "mean")
                counts = target != -100
                assert torch.equal(weights, row_scale(counts, reduction, torch.float32))
                total = row_weights.launch_weighted_sum(losses, weights)
                gold = (losses.double() * weights).sum()
                assert abs(total - gold) <= 1e-6 * (losses * weights).abs().sum()
    return len(shapes)


CHECKS = {
    check.__name__: check
    for check in (
        cross_entropy_rows,
        cross_entropy_strides,
        cross_entropy_ignored_and_impossible_targets,
        cross_entropy_adversarial_values,
        divergence_rows,
        divergence_of_impossible_tokens,
        blocks_of_the_vocabulary,
        blocks_of_impossible_targets,
        linear_cross_entropies,
        linear_divergences,
        empty_batches,
        scaling,
        weights_of_rows,
    )
}


def main(names):
    torch.set_num_threads(2)
    # NumPy warns of the infinities and NaN that the kernels mask.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    for name in names:
        sys.stdout.write(f"{name} {CHECKS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
