"""Whether our product of 4- or 8-bit weights is right, and faster than another, on this CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.launch import cpp_library
from taut_kernels.vllm_plugin import cpu_choice

GROUP = 64
"""Weights a scale covers in the layer that is measured."""
_FEATURES = (3072, 576)
_TOKENS = (1, 8, 64)
_WRONG = 2.0**-7
"""Of the largest result: one rounding to bf16 is a quarter of it."""

Calls = Sequence[Callable[[], object]]


def kept(name: str, measure: Callable[[], str | None]) -> str | None:
    """Return what an earlier start chose for the same source and instructions, else choose.

    Args:
        name: of the choice.
        measure: makes it: a reason to take ours, or None.
    """
    known = cpu_linear.best_isa().name, torch.__version__, cpp_library.text_of(cpu_linear.SOURCE)
    return cpu_choice.kept(name, known, measure)


class MeasuredLayer:
    """A layer of random codes, with activations of as many rows as are measured at most.

    Attributes:
        codes: [N, K] int8.
        scale: [N, K / GROUP] bf16.

    Args:
        bits: of a code.
    """

    def __init__(self, bits: int) -> None:
        generator, (N, K) = torch.Generator().manual_seed(0), _FEATURES
        half = 1 << (bits - 1)
        self.codes = torch.randint(-half, half, (N, K), generator=generator, dtype=torch.int8)
        scale = torch.rand(N, K // GROUP, generator=generator, dtype=torch.float32)
        rows = torch.randn(max(_TOKENS), K, generator=generator, dtype=torch.float32)
        self.scale, self._rows = scale.bfloat16(), rows.bfloat16()
        self._isa = cpu_linear.best_isa()
        self._packed = cpu_linear.pack(self.codes, self.scale, None, bits)

    def why_faster(self, rival: str, theirs: Callable[[Tensor], Calls]) -> str | None:
        """Say by how much ours is faster at few and at many tokens together.

        None where it is not, or does not give the known answer.

        Args:
            rival: what it is measured against, in words.
            theirs: activations → the other's calls, one for each of ``cpu_choice.COPIES`` weights.
        """
        if not self._is_right():
            return None
        own = [self._packed[0].clone() for _ in range(cpu_choice.COPIES)]
        ratios = []
        for M in _TOKENS:
            x = self._rows[:M]
            ours, other = cpu_choice.least_times(
                [partial(self._multiply, x, one) for one in own],
                theirs(x),
            )
            ratios.append(other / ours)
        if math.prod(ratios) < 1:
            return None
        told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        tokens = ", ".join(map(str, _TOKENS))
        return f"{rival} takes {told} times as long at {tokens} tokens on this CPU"

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        _, scale, zero = self._packed
        return cpu_linear.multiply(x, weight, scale, zero, None, len(self.codes), self._isa)

    def _is_right(self) -> bool:
        y = self._multiply(self._rows, self._packed[0]).float()
        exact = cpu_linear.weight_only_linear_cpu_ref(self._rows.float(), self.codes, self.scale)
        return bool(((y - exact).abs() <= _WRONG * exact.abs().max()).all())
