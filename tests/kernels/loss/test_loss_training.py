"""Training with the losses: the curve of plain torch, DDP, activation checkpointing, compilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from taut_bench.instruments import memory
from taut_bench.instruments.subject import Subject
from taut_kernels.loss.cross_entropy import cross_entropy
from taut_kernels.loss.linear_cross_entropy import linear_cross_entropy
from taut_kernels.loss.linear_jsd import linear_jsd
from taut_kernels.loss.linear_kl import linear_kl

TRAIN = Path(__file__).with_name("train_with_losses.py")
VOCABULARY, HIDDEN, STEPS = 61, 16, 200
Loss = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread(_two_threads: None) -> None:
    """Tensors are tiny here, and on a busy machine a second thread is mostly waited for."""
    torch.set_num_threads(1)


class Model(nn.Module):
    """A language model of one mixing layer, small and with something to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.mixing = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.mixing(self.embedding(tokens))[0]
        return hidden


def with_torch(x: torch.Tensor, head: nn.Linear, target: torch.Tensor) -> torch.Tensor:
    logits = functional.linear(x, head.weight, head.bias).float()
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def over_logits(x: torch.Tensor, head: nn.Linear, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(functional.linear(x, head.weight, head.bias), target, in_place=True)


def fused(**options: Any) -> Loss:
    def loss(x: torch.Tensor, head: nn.Linear, target: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, head.weight, target, bias=head.bias, **options)

    return loss


def train(loss_of: Loss, dtype: torch.dtype, device: str = "cpu") -> list[float]:
    """Train on arithmetic progressions modulo the vocabulary; return the losses."""
    torch.manual_seed(3)
    model = Model().to(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(4)
    curve = []
    for _ in range(STEPS):
        start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
        stride = torch.randint(1, 3, (8, 1), generator=generator)
        text = ((start + stride * torch.arange(13)) % VOCABULARY).to(device)
        target = text[:, 1:].clone()
        target[:, 0] = -100
        optimizer.zero_grad()
        loss = loss_of(model(text[:, :-1]), model.head, target)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return train(with_torch, torch.float32)


@pytest.mark.parametrize(
    "loss_of",
    [
        over_logits,
        fused(chunk_size=32),
        fused(chunk_by="vocabulary", chunk_size=24),
        fused(use_checkpoint=True),
    ],
    ids=["over logits", "tokens", "vocabulary", "checkpoint"],
)
def test_training_follows_plain_torch(loss_of: Loss, plain: list[float]) -> None:
    curve = train(loss_of, torch.float32)
    assert plain[-1] < 0.5 * plain[0]  # there is something to learn
    # Rounding differences grow from step to step; by the end they are still small.
    assert torch.allclose(torch.tensor(curve[:20]), torch.tensor(plain[:20]), rtol=1e-4)
    last, wanted = (sum(x[-20:]) / 20 for x in (curve, plain))
    assert abs(last - wanted) <= 0.02 * wanted


def teacher() -> tuple[nn.Module, torch.Tensor]:
    """A frozen model whose answers differ from token to token, and its head."""
    torch.manual_seed(11)
    model = Model().requires_grad_(False)
    return model, model.head.weight * 6


def distil(divergence: Callable[..., torch.Tensor]) -> list[float]:
    """Train a student on a teacher's answers; return the losses."""
    master, master_head = teacher()
    torch.manual_seed(3)
    student = Model()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(4)
    curve = []
    for _ in range(STEPS):
        text = torch.randint(0, VOCABULARY, (8, 12), generator=generator)
        mask = torch.rand(8, 12, generator=generator) > 0.2
        optimizer.zero_grad()
        loss = divergence(student(text), student.head, master(text), master_head, mask)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def kl_by_torch(x: Any, head: nn.Linear, teacher_x: Any, weight: Any, mask: Any) -> torch.Tensor:
    student, answers = (z.div(2).log_softmax(-1) for z in (head(x), teacher_x @ weight.t()))
    return 4 * ((answers - student) * answers.exp()).sum(-1)[mask].mean()


def jsd_by_torch(x: Any, head: nn.Linear, teacher_x: Any, weight: Any, mask: Any) -> torch.Tensor:
    student, answers = (z.log_softmax(-1) for z in (head(x), teacher_x @ weight.t()))
    mixed = ((student.exp() + answers.exp()) / 2).log()
    each = torch.stack([(p - mixed) * p.exp() for p in (student, answers)])
    return each.sum((0, -1))[mask].mean() / 2


def kl_of_ours(x: Any, head: nn.Linear, teacher_x: Any, weight: Any, mask: Any) -> torch.Tensor:
    options = {"bias": head.bias, "mask": mask, "temperature": 2.0, "chunk_size": 32}
    return linear_kl(x, head.weight, teacher_x, weight, **options)


def jsd_of_ours(x: Any, head: nn.Linear, teacher_x: Any, weight: Any, mask: Any) -> torch.Tensor:
    options = {"bias": head.bias, "mask": mask, "chunk_size": 32}
    return linear_jsd(x, head.weight, teacher_x, weight, **options)


@pytest.mark.parametrize(
    ("ours", "by_torch"),
    [(kl_of_ours, kl_by_torch), (jsd_of_ours, jsd_by_torch)],
    ids=["kl", "jsd"],
)
def test_distillation_follows_plain_torch(ours: Any, by_torch: Any) -> None:
    curve, plain = distil(ours), distil(by_torch)
    assert plain[-1] < 0.5 * plain[0]  # there is something to learn
    assert torch.allclose(torch.tensor(curve[:20]), torch.tensor(plain[:20]), rtol=1e-4)
    last, wanted = (sum(x[-20:]) / 20 for x in (curve, plain))
    assert abs(last - wanted) <= 0.02 * wanted


class Step(nn.Module):
    """A training step's forward pass, from the hidden states of a model to the loss."""

    def __init__(self, loss_of: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self._loss_of = nn.Linear(256, 8000, bias=False), loss_of

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self._loss_of(x, self.head, target)


def test_peak_memory_of_a_step_drops_as_the_manual_says() -> None:
    # docs/instruments.md: 49.15 MB before, 16.92 after, 8.7 of them gradients.
    x = torch.randn(1, 512, 256).requires_grad_()
    target = torch.randint(0, 8000, (1, 512))

    def peak(loss_of: Loss) -> float:
        subject = Subject("step", Step(loss_of), (x, target), torch.device("cpu"), backward=True)
        return memory.measure(subject).peak / 1e6

    logits = 512 * 8000 * 4 / 1e6
    plain = peak(with_torch)
    assert plain == pytest.approx(49.15, rel=0.02)
    assert plain >= 3 * logits
    for options in ({"chunk_size": 64}, {"chunk_by": "vocabulary", "chunk_size": 1000}):
        assert peak(fused(**options)) <= 17.3, options


def test_bf16_training_reaches_the_same_loss() -> None:
    ours = train(fused(chunk_size=32), torch.bfloat16)
    theirs = train(with_torch, torch.bfloat16)
    last, wanted = (sum(x[-20:]) / 20 for x in (ours, theirs))
    assert abs(last - wanted) <= 0.1 * wanted


def test_two_processes_average_their_gradients(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TRAIN)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
        both = json.loads(out)
        for name, wanted in both["wanted"].items():
            found = torch.tensor(both["found"][name])
            assert torch.allclose(found, torch.tensor(wanted), atol=1e-5), name


def losses(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x)
    total = linear_cross_entropy(hidden, weight, target, chunk_size=4)
    total = total + linear_cross_entropy(
        hidden, weight, target, chunk_by="vocabulary", chunk_size=16
    )
    total = total + linear_cross_entropy(hidden, weight, target, reduction="none").sum()
    total = total + linear_kl(hidden, weight, x.detach(), weight.detach())
    total = total + linear_jsd(hidden, weight, x.detach(), weight.detach(), use_checkpoint=True)
    return total + cross_entropy(hidden @ weight.t(), target, in_place=True)


def gradients(function: Any, M: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(M, 8, generator=generator).requires_grad_()
    weight = torch.randn(40, 8, generator=generator).requires_grad_()
    target = torch.randint(0, 40, (M,), generator=generator)
    loss = function(x, weight, target)
    loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [loss.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    def checkpointed(*operands: torch.Tensor) -> Any:
        return checkpoint.checkpoint(losses, *operands, use_reentrant=reentrant)

    for found, wanted in zip(gradients(checkpointed), gradients(losses), strict=True):
        assert torch.equal(found, wanted)


def test_compiles_without_graph_breaks() -> None:
    compiled = torch.compile(losses, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (7, 9):
        for found, wanted in zip(gradients(compiled, M), gradients(losses, M), strict=True):
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_compiles_with_inductor() -> None:
    compiled = torch.compile(losses, fullgraph=True)
    for found, wanted in zip(gradients(compiled), gradients(losses), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_by", ["tokens", "vocabulary"])
def test_gpu_training_follows_plain_torch(chunk_by: str) -> None:
    ours = train(fused(chunk_by=chunk_by, chunk_size=32), torch.bfloat16, "cuda")
    theirs = train(with_torch, torch.bfloat16, "cuda")
    last, wanted = (sum(x[-20:]) / 20 for x in (ours, theirs))
    assert theirs[-1] < 0.5 * theirs[0]
    assert abs(last - wanted) <= 0.1 * wanted
