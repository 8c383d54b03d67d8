"""Forms of the attention kernels compiled ahead of time: every head dimension and kind of mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import HEAD_DIMS, padded_dim
from taut_kernels.attention.prefill import hopper_backward as backward_hopper
from taut_kernels.attention.prefill.hopper import DESCRIPTOR_LAYOUT
from taut_kernels.attention.prefill.hopper_kernel import attention_hopper_kernel
from taut_kernels.attention.prefill.hopper_keys_kernel import key_gradients_hopper_kernel
from taut_kernels.attention.prefill.hopper_queries_kernel import query_gradients_hopper_kernel
from taut_kernels.attention.prefill.portable_backward_kernel import (
    key_gradients_kernel,
    query_gradients_kernel,
    row_delta_kernel,
)
from taut_kernels.attention.prefill.portable_kernel import attention_kernel
from taut_kernels.attention.tiles import AttentionTile
from taut_kernels.launch.variant import KernelVariant

_MASKS = ((False, False), (True, False), (True, True))
"""(causal, window)"""
_NAMES = {(False, False): "full", (True, False): "causal", (True, True): "window"}


def _variant(
    label: str,
    kernel: Any,
    tile: AttentionTile,
    dim: int,
    mask: tuple[bool, bool],
    packed: bool,
    floats: tuple[str, ...],
) -> KernelVariant:
    names = kernel.arg_names
    strides = tuple(name for name in names if name.startswith("stride_"))
    bounds = tuple(name for name in names if name.startswith("cu_"))
    constants: dict[str, Any] = {"D": dim, "BLOCK_D": padded_dim(dim)}
    constants |= {"GROUP": 4, "CAUSAL": mask[0], "WINDOW": mask[1]}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "HEADS_FIRST": True}
    pointers = {name: "bf16" for name in names if name.endswith("_ptr") and name not in bounds}
    pointers |= {name: "fp32" for name in ("lse_ptr", "delta_ptr") if name in names}
    if packed:
        pointers |= dict.fromkeys(bounds, "i32")
    else:
        constants |= dict.fromkeys(bounds)
    lengths = tuple(name for name in names if name.startswith("length_"))
    window = ("window",) if "window" in names else ()
    return KernelVariant(
        label=f"{label} {_NAMES[mask]}{' packed' if packed else ''} D={dim}",
        kernel=kernel,
        tile=tile,
        pointers=pointers,
        integers=(*lengths, *window, *strides),
        divisible_by_16=tuple(name for name in strides if not name.startswith("stride_l")),
        constants={name: value for name, value in constants.items() if name in names},
        options=tile.options(),
        floats=floats,
    )


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every form."""
    for dim in HEAD_DIMS:
        padded = padded_dim(dim)
        delta = AttentionTile(attention_tiles.ROW_DELTA_BLOCK, 16, 4, 1)
        yield _variant("attention delta", row_delta_kernel, delta, dim, _MASKS[0], True, ())
        for mask in _MASKS:
            # Bounds are loaded once a program: one of the two forms of each mask will do.
            packed = mask != _MASKS[0]
            for hopper, target in ((False, "sm_80"), (True, "sm_90")):
                forward = attention_tiles.forward(padded, mask[1], hopper)
                of = (dim, mask, packed, ("scale_log2",))
                variant = _variant("attention", attention_kernel, forward, *of)
                yield replace(variant, targets=(target,))
            for label, kernel, tiles in (
                ("attention dkv", key_gradients_kernel, attention_tiles.KEY_GRADIENTS),
                ("attention dq", query_gradients_kernel, attention_tiles.QUERY_GRADIENTS),
            ):
                variant = _variant(label, kernel, tiles[padded], dim, mask, packed, ("scale",))
                for target in variant.targets:
                    order = {"HEADS_FIRST": target == "sm_90"}
                    constants = variant.constants | order
                    yield replace(variant, targets=(target,), constants=constants)
    yield from _hopper()
    yield from _measured()


def _hopper() -> Iterator[KernelVariant]:
    """Yield the kernels of sm_90."""
    for dim, causal in itertools.product(HEAD_DIMS, (False, True)):
        # As above, one of the two forms of each mask will do.
        of, padded = (dim, causal, causal), padded_dim(dim)
        tile = attention_tiles.forward_hopper(None, padded)
        cut = {"BLOCK_N": tile.block_n, "STAGES": tile.num_stages}
        rows = {"q_desc": 64, "k_desc": tile.block_n, "v_desc": tile.block_n}
        # Numbers of a tile, stored once in a tile; Triton 3.9 stores more than 3.6 does.
        spill = 192 if padded == 256 else 16
        yield _hopper_variant("attention", attention_hopper_kernel, tile, of, cut, rows, spill)
        if padded == 128:
            block, half = backward_hopper.BLOCK, backward_hopper.TILE // 2
            cut = {"BLOCK_M": block, "STAGES": backward_hopper.KEY_STAGES}
            rows = {"q_desc": block, "k_desc": half, "v_desc": half, "do_desc": block}
            of_keys = (key_gradients_hopper_kernel, "64x64", of, cut, rows, 256)
            yield _hopper_variant("attention dkv", *of_keys)
            cut = {"BLOCK_N": block, "STAGES": backward_hopper.QUERY_STAGES}
            rows = {"q_desc": half, "k_desc": block, "v_desc": block, "do_desc": half}
            of_queries = (query_gradients_hopper_kernel, "64x64", of, cut, rows, 64)
            yield _hopper_variant("attention dq", *of_queries)


def _hopper_variant(
    label: str,
    kernel: Any,
    tile: object,
    of: tuple[int, bool, bool],
    cut: dict[str, int],
    rows: dict[str, int],
    spill: int,
) -> KernelVariant:
    dim, causal, packed = of
    names = kernel.arg_names
    bounds = tuple(name for name in names if name.startswith("cu_"))
    constants = {"HEAD_GROUP": 4, "D": dim, "BLOCK_D": padded_dim(dim), "CAUSAL": causal} | cut
    pointers = {name: "bf16" for name in names if name.endswith("_ptr") and name not in bounds}
    pointers |= {name: "fp32" for name in ("lse_ptr", "delta_ptr") if name in names}
    pointers |= dict.fromkeys(bounds, "i32") if packed else {}
    descriptors = {
        name: f"bf16[1, {count}, 1, {padded_dim(dim)}],{DESCRIPTOR_LAYOUT!r}"
        for name, count in rows.items()
    }
    floats = tuple(name for name in names if name.startswith("scale"))
    known = {*constants, *pointers, *descriptors, *bounds, *floats}
    strides = tuple(name for name in names if name.startswith("stride_"))
    return KernelVariant(
        label=f"{label} sm_90 {_NAMES[causal, False]}{' packed' * packed} D={dim}",
        kernel=kernel,
        tile=tile,
        pointers=pointers,
        integers=tuple(name for name in names if name not in known),
        divisible_by_16=tuple(name for name in strides if not name.startswith("stride_l")),
        constants=constants | ({} if packed else dict.fromkeys(bounds)),
        options={"num_warps": 4},
        floats=floats,
        targets=("sm_90",),
        allowed_spill_bytes=spill,
        descriptors=descriptors,
    )


def _measured() -> Iterator[KernelVariant]:
    """Yield causal attention with the tiles of every card's table, which are of sm_90."""
    for gpu, dim in itertools.product(attention_tiles.tables(), HEAD_DIMS):
        padded, mask = padded_dim(dim), (True, False)
        rule = (
            attention_tiles.forward(padded, False, True),
            *attention_tiles.backward(None, padded),
        )
        tiles = (
            attention_tiles.forward(padded, False, True, gpu),
            *attention_tiles.backward(gpu, padded),
        )
        forms = (
            ("attention", attention_kernel, "scale_log2"),
            ("attention dkv", key_gradients_kernel, "scale"),
            ("attention dq", query_gradients_kernel, "scale"),
        )
        for tile, known, (label, kernel, scale) in zip(tiles, rule, forms, strict=True):
            if tile != known:
                variant = _variant(label, kernel, tile, dim, mask, True, (scale,))
                # Some that spill a little were the fastest on the card all the same.
                yield replace(variant, targets=("sm_90",), allowed_spill_bytes=64)
