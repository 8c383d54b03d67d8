"""Descriptors of operands for Hopper's bulk copies (TMA), made often and checked once.

Triton's constructor checks rank, alignment and layout of every operand, 4 µs of the host each time
(2.5 of them the checks). Blocks and layouts are the launcher's and never change, strides and
addresses keep its contract, and the driver, which encodes a descriptor at every launch, refuses
what it cannot encode.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Describe:
    """Makes descriptors for one block and layout.

    Thread-safe: two threads may check a first operand each.

    Args:
        block: elements of a block along each axis.
        layout: of a block in shared memory.
    """

    __slots__ = ("_block", "_checked", "_layout")

    def __init__(self, block: list[int], layout: NVMMASharedLayout) -> None:
        self._block, self._layout = block, layout
        self._checked: dict[str, Any] | None = None

    def __call__(self, base: Tensor, shape: list[int], strides: list[int]) -> TensorDescriptor:
        """Describe an operand; Triton checks the first one.

        Args:
            base: 16-byte aligned; its type is that of every other operand described here, or as
                wide.
            shape: elements along each axis, positive.
            strides: as many elements apart, 16-byte multiples but for the last one, 1.
        """
        if self._checked is None:
            first = TensorDescriptor(base, shape, strides, self._block, self._layout)
            operand = ("base", "shape", "strides")
            self._checked = {name: at for name, at in vars(first).items() if name not in operand}
            return first
        found: TensorDescriptor = object.__new__(TensorDescriptor)
        vars(found).update(self._checked, base=base, shape=shape, strides=strides)
        return found
