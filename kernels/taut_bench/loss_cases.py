"""What the loss benchmark runs: shapes, operands, our calls and their rivals', the gate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from taut_bench.fused_rivals import UnavailableError, imported
from taut_kernels.loss.cross_entropy import cross_entropy
from taut_kernels.loss.linear_cross_entropy import linear_cross_entropy
from taut_kernels.loss.linear_jsd import linear_jsd
from taut_kernels.loss.linear_kl import linear_kl

OPS = ("cross_entropy", "linear_cross_entropy", "linear_kl", "linear_jsd")


@dataclass(frozen=True, slots=True)
class Shape:
    """One benchmarked size: tokens, hidden size (0 without a projection) and vocabulary."""

    op: str
    M: int
    H: int
    V: int

    def flops(self) -> int:
        """Return the operations of the products forward and backward cannot avoid."""
        products = {"cross_entropy": 0, "linear_cross_entropy": 3}.get(self.op, 4)
        return 2 * products * self.M * self.H * self.V

    def bytes_moved(self) -> int:
        """Return what forward and backward cannot avoid reading and writing, in bf16.

        The logits in and their gradient out, or operands in and gradients out.
        """
        if self.op == "cross_entropy":
            return 4 * self.M * self.V
        sides = 2 if self.op == "linear_cross_entropy" else 3
        return 2 * sides * self.H * (self.M + self.V)


SHAPES = (
    *(Shape("cross_entropy", 8192, 0, V) for V in (32000, 128256, 256000)),
    Shape("linear_cross_entropy", 8192, 2304, 256000),
    *(Shape("linear_cross_entropy", M, 4096, 128256) for M in (8192, 4096, 1024)),
    *(Shape("linear_kl", M, 4096, 128256) for M in (8192, 1024)),
    *(Shape("linear_jsd", M, 4096, 128256) for M in (8192, 1024)),
)


@dataclass(frozen=True, slots=True)
class Operands:
    """Inputs of a shape on the GPU, in bf16; the first are leaves that get gradients.

    Attributes:
        x: [M, H], or the logits [M, V].
        weight: [V, H], or None.
        target: [M].
        teacher: x and weight of the teacher, or None.
    """

    x: Tensor
    weight: Tensor | None
    target: Tensor
    teacher: tuple[Tensor, Tensor] | None

    def leaves(self) -> list[Tensor]:
        """Return what gets a gradient."""
        return [self.x] if self.weight is None else [self.x, self.weight]


def make_operands(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """Draw a shape's operands; logits are of order 1 to 10, as a model's are.

    Args:
        shape: which.
        dtype: the values are those of bf16 in any case.
    """
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)
        return (drawn * scale).to(dtype)

    M, H, V = shape.M, shape.H, shape.V
    target = torch.randint(0, V, (M,), generator=generator, device="cuda")
    if shape.op == "cross_entropy":
        return Operands(draw(M, V, scale=3.0).requires_grad_(), None, target, None)
    x = draw(M, H).requires_grad_()
    weight = draw(V, H, scale=3.0 / H**0.5).requires_grad_()
    teacher = None
    if shape.op != "linear_cross_entropy":
        teacher = (draw(M, H), draw(V, H, scale=3.0 / H**0.5))
    return Operands(x, weight, target, teacher)


Loss = Callable[[Operands], Tensor]
"""Computes the loss; the benchmark runs it forward and backward."""
BETA = 0.5


class _Made(torch.autograd.Function):
    """Logits as an operation made them, without its time: what is not a leaf may be overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        del ctx
        return grad


def _made(o: Operands) -> Tensor:
    made: Tensor = _Made.apply(o.x)  # type: ignore[no-untyped-call]
    return made


def taut(op: str, **options: Any) -> Loss:
    """Return our op; `options` are its own."""

    def loss(o: Operands) -> Tensor:
        if op == "cross_entropy":
            return cross_entropy(_made(o), o.target, **({"in_place": True} | options))
        assert o.weight is not None
        if op == "linear_cross_entropy":
            return linear_cross_entropy(o.x, o.weight, o.target, **options)
        assert o.teacher is not None
        if op == "linear_kl":
            return linear_kl(o.x, o.weight, *o.teacher, **options)
        return linear_jsd(o.x, o.weight, *o.teacher, beta=BETA, **options)

    return loss


def torch_eager(op: str) -> Loss:
    """Return what one writes in plain torch, logits in fp32 from the loss on."""

    def loss(o: Operands) -> Tensor:
        if o.weight is None:
            return functional.cross_entropy(o.x.float(), o.target)
        logits = functional.linear(o.x, o.weight).float()
        if op == "linear_cross_entropy":
            return functional.cross_entropy(logits, o.target)
        assert o.teacher is not None
        log_p = logits.log_softmax(1)
        log_q = functional.linear(*o.teacher).float().log_softmax(1)
        divergence = functools.partial(functional.kl_div, log_target=True, reduction="batchmean")
        if op == "linear_kl":
            return divergence(log_p, log_q)
        log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
        return BETA * divergence(log_m, log_q) + (1 - BETA) * divergence(log_m, log_p)

    return loss


def torch_compile(op: str) -> Loss:
    """Return `torch.compile` of :func:`torch_eager`, shapes fixed."""
    compiled: Loss = torch.compile(torch_eager(op), dynamic=False)
    return compiled


def torch_own(op: str) -> Loss:
    """Return torch's own fused op, which torch 2.13 has and 2.11 has not."""
    function: Any = getattr(functional, "linear_cross_entropy", None)
    if op != "linear_cross_entropy" or function is None:
        raise UnavailableError(f"this torch ({torch.__version__}) has no such op")
    return lambda o: function(o.x, o.weight, o.target)


def liger(op: str) -> Loss:
    """Return Liger's module; its KL is its JSD at the end, β = 0."""
    library = imported("liger_kernel.transformers")
    if op == "cross_entropy":
        module = library.LigerCrossEntropyLoss()
        # It writes the gradient over its input, as ours does here.
        return lambda o: module(_made(o), o.target)
    if op == "linear_cross_entropy":
        module = library.LigerFusedLinearCrossEntropyLoss()
        return lambda o: module(o.weight, o.x, o.target)
    module = library.LigerFusedLinearJSD(jsd_beta=0.0 if op == "linear_kl" else BETA)

    def loss(o: Operands) -> Tensor:
        assert o.teacher is not None
        found: Tensor = module(o.x, o.weight, *o.teacher, None)
        return found

    return loss


def quack(op: str) -> Loss:
    """Return quack's op, whose gradient overwrites logits that are given, as ours does."""
    if op not in ("cross_entropy", "linear_cross_entropy"):
        raise UnavailableError("quack has no such op")
    module = imported(f"quack.{op}")
    if op == "cross_entropy":
        return lambda o: module.cross_entropy(_made(o), o.target, inplace_backward=True)
    # On Hopper it takes its fused backward pass by itself.
    return lambda o: module.chunked_linear_cross_entropy(o.x, o.weight, o.target)


def cut_cross_entropy(op: str) -> Loss:
    """Return Apple's Cut Cross-Entropy, with its gradient filter as it comes."""
    if op != "linear_cross_entropy":
        raise UnavailableError("Cut Cross-Entropy has no such op")
    function = imported("cut_cross_entropy").linear_cross_entropy
    return lambda o: function(o.x, o.weight, o.target)


KERNELS: dict[str, Callable[[str], Loss]] = {
    "taut": taut,
    "taut out of place": functools.partial(taut, in_place=False),
    "taut tokens": functools.partial(taut, chunk_by="tokens"),
    "taut vocabulary": functools.partial(taut, chunk_by="vocabulary"),
    "taut checkpoint": functools.partial(taut, use_checkpoint=True),
    "Liger": liger,
    "quack": quack,
    "CCE": cut_cross_entropy,
    "torch": torch_eager,
    "torch.compile": torch_compile,
    "torch fused": torch_own,
}
_ONLY = dict.fromkeys(("taut tokens", "taut vocabulary", "taut checkpoint"), "linear_cross_entropy")
_ONLY["taut out of place"] = "cross_entropy"


def kernels_of(op: str) -> list[str]:
    """Return the names in `KERNELS` that mean something for an op."""
    return [name for name in KERNELS if _ONLY.get(name, op) == op]


def gradients(loss: Loss, operands: Operands) -> list[Tensor]:
    """Run forward and backward once; return the loss and the gradients."""
    for leaf in operands.leaves():
        leaf.grad = None
    found = loss(operands)
    found.backward()  # type: ignore[no-untyped-call]
    return [found.detach(), *(leaf.grad for leaf in operands.leaves() if leaf.grad is not None)]


def why_wrong(shape: Shape, loss: Loss, tokens: int = 192) -> str | None:
    """Hold a kernel to the budget: twice what plain torch in bf16 is off fp32, and one rounding.

    Args:
        shape: whose widths; few tokens, so that fp32 logits fit.
        loss: the kernel.
        tokens: how many.

    Returns:
        A reason, or None where it is right.
    """
    small = Shape(shape.op, tokens, shape.H, shape.V)
    gold = gradients(torch_eager(shape.op), make_operands(small, torch.float32))
    plain = gradients(torch_eager(shape.op), make_operands(small))
    found = gradients(loss, make_operands(small))
    for name, actual, wanted, rounded in zip(
        ("loss", "gradient of x", "gradient of weight"), found, gold, plain, strict=False
    ):
        error = (actual.float() - wanted).abs().max().item()
        rounding = torch.finfo(torch.bfloat16).eps * wanted.abs().max().item()
        budget = 2 * ((rounded.float() - wanted).abs().max().item() + rounding)
        if not error <= budget:
            return f"{name}: error {error:.3e} is above the budget {budget:.3e}"
    return None
