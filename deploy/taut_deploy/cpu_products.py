"""16-bit products on CPUs that have no instructions for them.

torch computes them there all the same, by emulation: 2 to 7 times as long as fp32's with AVX-512
alone, 20 to 30 times without (deploy/README.md, "Measured facts").
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_X86 = ("x86_64", "AMD64")
_PRODUCTS = (torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention)


def has_products(dtype: torch.dtype) -> bool:
    """Say whether this CPU multiplies matrices of a 16-bit type at least as fast as fp32's.

    Args:
        dtype: bf16 or fp16.
    """
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if platform.machine() in _X86:
        # oneDNN says that it supports bf16 where it emulates it by AVX-512.
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class WideProducts(TorchFunctionMode):
    """Linear layers and attention in here widen 16-bit operands on such a CPU, and round once.

    A 16-bit product does the same: it multiplies exactly and adds in fp32. Only attention's
    probabilities, which it would round before the second product, stay wider.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take the call of a torch function; most pass through."""
        named = kwargs or {}
        if func not in _PRODUCTS or not _is_emulated(args[0]):
            return func(*args, **named)
        wide = func(*map(_widened, args), **{name: _widened(at) for name, at in named.items()})
        return wide.to(args[0].dtype)


def _is_emulated(x: torch.Tensor) -> bool:
    half = x.dtype in (torch.bfloat16, torch.float16)
    return half and x.device.type == "cpu" and not has_products(x.dtype)


def _widened(operand: Any) -> Any:
    if isinstance(operand, torch.Tensor) and operand.dtype in (torch.bfloat16, torch.float16):
        return operand.float()
    return operand
