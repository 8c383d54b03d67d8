"""Forms of paged decode compiled ahead of time: head dimensions, formats, windows, tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import HEAD_DIMS, padded_dim
from taut_kernels.attention.cache_arguments import EIGHT_BIT
from taut_kernels.attention.decode.kernel import paged_decode_kernel
from taut_kernels.attention.decode.op import launch_constants
from taut_kernels.attention.tiles import DecodeTile
from taut_kernels.launch.variant import KernelVariant

_HEADS_K = 2
_UNALIGNED = ("stride_table", "stride_ks", "stride_vs")
_FP32 = ("k_scale_ptr", "v_scale_ptr", "partial_ptr", "stats_ptr")
_INT32 = ("table_ptr", "contexts_ptr", "arrivals_ptr")


def _variant(
    tile: DecodeTile,
    dtype: torch.dtype,
    dim: int,
    group: int,
    queries: int,
    page: int,
    window: bool,
    splits: int,
    block_b: int,
    target: str,
) -> KernelVariant:
    names = paged_decode_kernel.arg_names
    cache = torch.empty(1, page, _HEADS_K, dim, dtype=dtype, device="meta")
    constants = launch_constants(tile, cache, queries, group * _HEADS_K, window, splits, block_b)
    eight_bit = dtype in EIGHT_BIT
    # sm_80 has no conversion from e4m3.
    constants["ASM"] = eight_bit and (dtype == torch.int8 or target != "sm_80")
    constants |= dict.fromkeys(("STARTS_NEXT", "EARLY"), target == "sm_90")
    # More addresses to keep than where the strides are the same.
    constants["SAME_STRIDES"] = not window
    constants |= {"HAS_K_SCALE": eight_bit, "HAS_V_SCALE": eight_bit}
    pointers = {name: "bf16" for name in names if name.endswith("_ptr")}
    pointers |= dict.fromkeys(_FP32, "fp32") | dict.fromkeys(_INT32, "i32")
    if eight_bit:
        pointers |= {"k_ptr": "i16", "v_ptr": "i16"}
    absent: tuple[str, ...] = () if eight_bit else ("k_scale_ptr", "v_scale_ptr")
    absent += () if splits > 1 else ("partial_ptr", "stats_ptr", "arrivals_ptr")
    for name in absent:
        del pointers[name]
    strides = tuple(name for name in names if name.startswith("stride_"))
    form = f" of {block_b}" if block_b else "" if splits > 1 else " whole"
    form = f"{' window' if window else ''}{form}"
    form = f"{EIGHT_BIT.get(dtype, 'bf16')} D={dim} g{group} T={queries} page {page}{form}"
    return KernelVariant(
        label=f"paged_decode {form}",
        kernel=paged_decode_kernel,
        tile=tile,
        pointers=pointers,
        integers=("splits", "min_keys", "most_keys", "window", *strides),
        divisible_by_16=tuple(name for name in strides if name not in _UNALIGNED),
        constants={**dict.fromkeys(absent), **constants},
        options=tile.options(),
        floats=("scale_log2",),
        targets=(target,),
        # Around the loop: under Triton 3.9 16 rows of 256 sums are half of a thread's registers;
        # where ptxas aims at 128 of them it puts one aside.
        allowed_spill_bytes=128 if dim == 256 else 8,
    )


_Form = tuple[torch.dtype, int, int, int, int, bool, int, int]
"""dtype, D, query heads a key head, queries, page size, window, splits, lengths a program reads"""


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield the forms, with the rules' tiles and those of every card's table."""
    plain: list[_Form] = [
        (dtype, dim, 4, 1, 16, False, 8, 0)
        for dim, dtype in itertools.product(HEAD_DIMS, (torch.bfloat16, *EIGHT_BIT))
    ]
    # Parts laid out on the device: a few registers more, and many before the loop.
    plain += [
        (dtype, 128, 4, 1, 16, False, 8, 64) for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    # Every mask and address at once, on the widest form of each way to the operands.
    others: list[_Form] = [
        (torch.bfloat16, 128, 4, 8, 128, True, 8, 0),
        (torch.float8_e4m3fn, 128, 4, 8, 128, True, 8, 0),
        (torch.int8, 256, 4, 8, 128, True, 8, 0),
        (torch.bfloat16, 128, 1, 1, 64, False, 1, 0),
        (torch.bfloat16, 128, 4, 8, 128, True, 8, 256),
        (torch.bfloat16, 128, 4, 1, 16, False, 8, attention_tiles.MOST_LENGTHS),
        (torch.bfloat16, 256, 4, 1, 16, False, 8, attention_tiles.MOST_LENGTHS),
    ]
    for form in (*plain, *others):
        padded, size = padded_dim(form[1]), form[0].itemsize
        tiles = dict.fromkeys(
            attention_tiles.decode(gpu, padded, size, load)
            for gpu, load in itertools.product(
                (None, *attention_tiles.tables()), attention_tiles.LOADS
            )
        )
        for tile in tiles if form in plain else list(tiles)[:1]:
            yield _variant(tile, *form, "sm_90")
        # Nothing in the code depends on D: the widest show what sm_80 makes of it.
        if form in plain and form[1] >= 128:
            yield _variant(next(iter(tiles)), *form, "sm_80")
