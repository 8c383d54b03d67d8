"""Forms of the cache write compiled ahead of time: head dimensions, numbers of heads, formats."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from taut_kernels.attention.cache_write.kernel import cache_write_kernel
from taut_kernels.attention.cache_write.op import FP8, launch_constants
from taut_kernels.launch.variant import KernelVariant

_SHAPES = ((8, 128, 16), (1, 128, 32), (4, 64, 16), (32, 96, 64), (3, 80, 48), (2, 256, 16))
"""Heads, their elements, page size: Llama-3-8B, an eighth of 70B, more heads than a program takes,
no powers of two, wide heads."""
_ELEMENT = {"16 bit": "bf16", "fp8": "fp8e4nv", "fp8 codes": "u8"}


def _variant(heads: int, dim: int, page: int, dtype: torch.dtype, target: str) -> KernelVariant:
    names, eight_bit = cache_write_kernel.arg_names, dtype == FP8
    cache = torch.empty(1, page, heads, dim, dtype=dtype, device="meta")
    hopper = target == "sm_90"
    constants, options = launch_constants(cache, early=hopper, converts=hopper)
    pointers = {"k_ptr": "bf16", "v_ptr": "bf16", "slots_ptr": "i64"}
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), _ELEMENT[constants["FORMAT"]])
    scales = ("k_scale_ptr", "v_scale_ptr")
    if eight_bit:
        pointers |= dict.fromkeys(scales, "fp32")
    else:
        constants |= dict.fromkeys(scales)
    strides = tuple(name for name in names if name.startswith("stride_"))
    form = "fp8" if eight_bit else "bf16"
    return KernelVariant(
        label=f"cache_write {form} {heads}x{dim} page {page}",
        kernel=cache_write_kernel,
        tile=f"{constants['BLOCK_H']}x{constants['BLOCK_D']}/{options['num_warps']}w",
        pointers=pointers,
        integers=strides,
        divisible_by_16=tuple(name for name in strides if name not in ("stride_ks", "stride_vs")),
        constants=constants,
        options=options,
        targets=(target,),
    )


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield the forms."""
    for shape in _SHAPES:
        for dtype in (torch.bfloat16, FP8):
            for target in ("sm_80", "sm_90"):
                yield _variant(*shape, dtype, target)
