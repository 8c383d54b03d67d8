"""What the fused training benchmark runs: operands, the ops of each provider, the gate.

Every provider goes through autograd, so that each pays what its users pay; operands are drawn anew
for each, since Liger's backward passes write over what they were given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_bench.fused_rivals import UnavailableError, imported
from taut_kernels.activation.swiglu import swiglu
from taut_kernels.loss.softmax import softmax
from taut_kernels.norm.layer_norm import layer_norm
from taut_kernels.norm.rms_norm_train import add_rms_norm_train, rms_norm_train
from taut_kernels.rope.train import rope_train

EPSILON = 1e-5
HEAD_DIM = 128
KV_HEADS = 8
OPS = ("softmax", "rms_norm", "add_rms_norm", "layer_norm", "swiglu", "rope")
_PASSES = {
    "softmax": (2, 3),
    "rms_norm": (2, 3),
    "add_rms_norm": (4, 4),
    "layer_norm": (2, 3),
    "swiglu": (3, 5),
    "rope": (2, 2),
}
"""Op → tensors of [M, N] that its forward and its backward pass read and write."""


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmarked shape.

    Attributes:
        op: one of `OPS`.
        M: rows (tokens).
        N: columns; of ``rope`` those of q, to which 8 heads of k come.
    """

    op: str
    M: int
    N: int

    def bytes_moved(self, *, backward: bool) -> int:
        """Return what one pass cannot avoid reading and writing, in bf16."""
        columns = self.N + (KV_HEADS * HEAD_DIM if self.op == "rope" else 0)
        return 2 * _PASSES[self.op][backward] * self.M * columns

    def __str__(self) -> str:
        return f"{self.op} {self.M}×{self.N}"


@dataclass(frozen=True, slots=True)
class Operands:
    """One copy of a case's inputs on the GPU.

    Attributes:
        leaves: what has a gradient: x; x, weight; x, residual, weight; x, weight, bias; gate, up;
            q, k [1, M, heads, 128].
        gradients: of the outputs, shaped like them.
        positions: [M] int64 of ``rope``, else None.
        cache: [M, 128] cosines and sines of ``rope``, else None.
    """

    leaves: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    positions: Tensor | None = None
    cache: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Operands:
        """Return a detached copy in another type, its leaves with gradients."""
        leaves = tuple(leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves)
        gradients = tuple(gradient.to(dtype) for gradient in self.gradients)
        cache = None if self.cache is None else self.cache.to(dtype)
        return Operands(leaves, gradients, self.positions, cache)


def make_operands(case: Case, seed: int = 0, device: str = "cuda") -> Operands:
    """Draw one copy of a case's bf16 inputs.

    Args:
        case: which.
        seed: of the generator.
        device: where they go.

    Returns:
        The operands.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    M, N = case.M, case.N
    if case.op == "rope":
        heads = ((1, M, N // HEAD_DIM, HEAD_DIM), (1, M, KV_HEADS, HEAD_DIM))
        leaves = tuple(draw(*shape) for shape in heads)
        angles = torch.rand(M, HEAD_DIM // 2, generator=generator, device=device) * 6.28
        cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.bfloat16)
        positions = torch.arange(M, device=device)
        gradients = tuple(draw(*shape) for shape in heads)
        for leaf in leaves:
            leaf.requires_grad_()
        return Operands(leaves, gradients, positions, cache)
    wide = {"add_rms_norm": 2, "swiglu": 2}.get(case.op, 1)
    narrow = {"rms_norm": 1, "add_rms_norm": 1, "layer_norm": 2}.get(case.op, 0)
    leaves = tuple(draw(M, N) for _ in range(wide))
    leaves += tuple(draw(N) * 0.1 + 1 for _ in range(narrow))
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = 2 if case.op == "add_rms_norm" else 1
    return Operands(leaves, tuple(draw(M, N) for _ in range(outputs)))


Outputs = tuple[Tensor, ...]
Run = Callable[[Operands], Outputs]
"""The forward pass: outputs that autograd can go back from."""


def _taut(op: str) -> Run:
    def run(o: Operands) -> Outputs:
        found: Any
        if op == "rope":
            assert o.positions is not None
            assert o.cache is not None
            q, k = o.leaves
            found = rope_train(o.positions.view(1, -1), q, k, o.cache)
        elif op == "rms_norm":
            found = rms_norm_train(*o.leaves, epsilon=EPSILON)
        elif op == "add_rms_norm":
            found = add_rms_norm_train(*o.leaves, epsilon=EPSILON)
        elif op == "layer_norm":
            found = layer_norm(*o.leaves, epsilon=EPSILON)
        else:
            found = softmax(*o.leaves) if op == "softmax" else swiglu(*o.leaves)
        return found if isinstance(found, tuple) else (found,)

    return run


def _rotated(x: Tensor, cache: Tensor) -> Tensor:
    """Rotate as transformers' Llama does: halves, cosines and sines of the full width."""
    cos, sin = cache.chunk(2, dim=1)
    cos, sin = (torch.cat((half, half), dim=1)[None, :, None, :] for half in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def formula(op: str) -> Run:
    """Return an op in plain torch: a rival, in fp64 the gold, and what torch.compile gets.

    Args:
        op: one of `OPS`.
    """
    functional = torch.nn.functional

    def run(o: Operands) -> Outputs:
        x, *others = o.leaves
        N = x.shape[-1]
        if op == "softmax":
            return (torch.softmax(x, dim=-1),)
        if op == "rms_norm":
            return (functional.rms_norm(x, (N,), others[0], EPSILON),)
        if op == "add_rms_norm":
            total = x + others[0]
            return functional.rms_norm(total, (N,), others[1], EPSILON), total
        if op == "layer_norm":
            return (functional.layer_norm(x, (N,), others[0], others[1], EPSILON),)
        if op == "swiglu":
            return (functional.silu(x) * others[0],)
        assert o.cache is not None
        return _rotated(x, o.cache), _rotated(others[0], o.cache)

    return run


@functools.cache
def _compiled(op: str) -> Run:
    plain = formula(op)

    def of_tensors(cache: Tensor | None, *leaves: Tensor) -> Outputs:
        return plain(Operands(leaves, (), None, cache))

    compiled = torch.compile(of_tensors, dynamic=False)
    return lambda o: compiled(o.cache, *o.leaves)


def _liger_function(module: str, name: str) -> Any:
    return getattr(imported(f"liger_kernel.ops.{module}"), name)


def _liger(op: str) -> Run:
    if op == "rope":
        function = _liger_function("rope", "LigerRopeFunction")

        def rope(o: Operands) -> Outputs:
            assert o.cache is not None
            cos, sin = o.cache.chunk(2, dim=1)
            cos, sin = (torch.cat((half, half), dim=1)[None] for half in (cos, sin))
            # [1, heads, M, 128], the layout transformers has behind its transposition.
            q, k = function.apply(*(x.transpose(1, 2) for x in o.leaves), cos, sin)
            return q.transpose(1, 2), k.transpose(1, 2)

        return rope
    if op == "swiglu":
        function = _liger_function("swiglu", "LigerSiLUMulFunction")
        return lambda o: (function.apply(*o.leaves),)
    if op == "softmax":
        function = _liger_function("softmax", "LigerSoftmaxFunction")
        return lambda o: (function.apply(*o.leaves),)
    if op == "layer_norm":
        function = _liger_function("layer_norm", "LigerLayerNormFunction")
        return lambda o: (function.apply(*o.leaves, EPSILON),)
    if op == "rms_norm":
        function = _liger_function("rms_norm", "LigerRMSNormFunction")
        return lambda o: (function.apply(*o.leaves, EPSILON, 0.0, "llama", True),)
    function = _liger_function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return lambda o: function.apply(*o.leaves, EPSILON, 0.0, "llama", False)


def _quack(op: str) -> Run:
    names = {"softmax": "softmax", "rms_norm": "rmsnorm", "add_rms_norm": "rmsnorm"}
    if op not in names:
        raise UnavailableError("quack has no such op")
    function = getattr(imported(f"quack.{names[op]}"), names[op])
    if op == "softmax":
        return lambda o: (function(*o.leaves),)
    if op == "rms_norm":
        return lambda o: (function(*o.leaves, eps=EPSILON),)

    def added(o: Operands) -> Outputs:
        x, residual, weight = o.leaves
        found: Outputs = function(x, weight, residual=residual, eps=EPSILON, prenorm=True)
        return found

    return added


PROVIDERS: Mapping[str, Callable[[str], Run]] = {
    "taut": _taut,
    "Liger": _liger,
    "quack": _quack,
    "torch": formula,
    "torch.compile": _compiled,
}


def results(run: Run, operands: Operands) -> tuple[Tensor, ...]:
    """Run both passes.

    Args:
        run: a forward pass.
        operands: its inputs.

    Returns:
        Outputs and gradients of the leaves.
    """
    outputs = run(operands)
    found = torch.autograd.grad(outputs, operands.leaves, operands.gradients)
    return tuple(output.detach() for output in outputs) + found


_GATE_ROWS = 333
_GATE_ELEMENTS = 2**22


def why_wrong(case: Case, run: Run, device: str = "cuda") -> str | None:
    """Hold both passes of a provider to the budget: twice torch's error and one rounding.

    Args:
        case: of which the columns count; the rows are fewer.
        run: the provider's forward pass.
        device: where to run.

    Returns:
        A reason, or None where it is right.
    """
    rows = max(3, min(_GATE_ROWS, _GATE_ELEMENTS // case.N))
    operands = make_operands(Case(case.op, rows, case.N), device=device)
    plain = formula(case.op)
    gold = results(plain, operands.to(torch.float64))
    reference = results(plain, operands.to(torch.bfloat16))
    found = results(run, operands.to(torch.bfloat16))
    names = [f"output {i}" for i in range(len(operands.gradients))]
    names += [f"gradient {i}" for i in range(len(operands.leaves))]
    for name, one, wanted, other in zip(names, found, gold, reference, strict=True):
        rounding = torch.finfo(torch.bfloat16).eps * wanted.abs().max().item()
        budget = 2 * ((other.double() - wanted).abs().max().item() + rounding)
        error = (one.double() - wanted).abs().max().item()
        if not error <= budget:
            return f"{name}: error {error:.3e} is above the budget {budget:.3e}"
    return None
