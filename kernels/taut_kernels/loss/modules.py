"""The losses as modules: options fixed once, tensors at each call. No parameters of their own.

The projection stays where the model has it: pass ``lm_head.weight`` (and bias) to the call.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from taut_kernels.loss.cross_entropy import cross_entropy
from taut_kernels.loss.linear_cross_entropy import linear_cross_entropy
from taut_kernels.loss.linear_jsd import linear_jsd
from taut_kernels.loss.linear_kl import linear_kl


class _Loss(torch.nn.Module):
    _function: ClassVar[Callable[..., Tensor]]
    _of_a_call: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **options: Any) -> None:
        super().__init__()
        named = signature(self._function).parameters.values()
        known = [
            p.name for p in named if p.kind is p.KEYWORD_ONLY and p.name not in self._of_a_call
        ]
        if unknown := sorted(options.keys() - set(known)):
            name = type(self).__name__
            raise TypeError(f"{name} has no option {unknown[0]}: expected {', '.join(known)}")
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class CrossEntropyLoss(_Loss):
    """:func:`.cross_entropy.cross_entropy` with fixed options.

    Args:
        options: its keyword arguments.

    Raises:
        TypeError: an option the function does not have.
    """

    _function = staticmethod(cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of ``logits`` [..., V] and ``target`` [...]."""
        return cross_entropy(logits, target, **self.options)


class LinearCrossEntropyLoss(_Loss):
    """:func:`.linear_cross_entropy.linear_cross_entropy` with fixed options.

    Args:
        options: its keyword arguments but ``bias``.

    Raises:
        TypeError: an option the function does not have.
    """

    _function = staticmethod(linear_cross_entropy)
    _of_a_call = frozenset({"bias"})

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the loss of ``x`` [..., H], projected by ``weight`` [V, H], and ``target``."""
        return linear_cross_entropy(x, weight, target, bias=bias, **self.options)


class _Divergence(_Loss):
    """A divergence with fixed options.

    Args:
        options: the function's keyword arguments but ``bias``, ``teacher_bias`` and ``mask``.

    Raises:
        TypeError: an option the function does not have.
    """

    _of_a_call = frozenset({"bias", "teacher_bias", "mask"})

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:
        """Return the divergence of the student, the first two, and the teacher."""
        operands = (x, weight, teacher_x, teacher_weight)
        given = {"bias": bias, "teacher_bias": teacher_bias, "mask": mask}
        return type(self)._function(*operands, **given, **self.options)


class LinearKLLoss(_Divergence):
    """:func:`.linear_kl.linear_kl` with fixed options: those of :class:`_Divergence`."""

    _function = staticmethod(linear_kl)


class LinearJSDLoss(_Divergence):
    """:func:`.linear_jsd.linear_jsd` with fixed options: those of :class:`_Divergence`."""

    _function = staticmethod(linear_jsd)
