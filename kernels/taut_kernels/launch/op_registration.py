"""Registers an op of `torch.ops.taut`: schema, CPU, CUDA and shape inference in one place.

`torch.library.define` and `impl` cost half as much a call as `torch.library.custom_op`, and the
schema, with what an op writes to, stands there in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


def register_op(schema: str, cpu: Function | None, cuda: Function | None, fake: Function) -> None:
    """Define an op and what implements it; a gradient is `torch.library.register_autograd`'s.

    Args:
        schema: name and signature, as ``taut::scale(Tensor x, float factor) -> Tensor``; a name may
            have an overload, as ``taut::scale.plain``.
        cpu: the implementation for the CPU; None: the op has none.
        cuda: likewise for CUDA devices.
        fake: shapes and dtypes of the results, for meta tensors and compiled graphs.
    """
    name, parenthesis, signature = schema.partition("(")
    torch.library.define(name, parenthesis + signature)
    for device, implementation in (("CPU", cpu), ("CUDA", cuda)):
        if implementation is not None:
            torch.library.impl(name, device, implementation)
    torch.library.register_fake(name, fake)
