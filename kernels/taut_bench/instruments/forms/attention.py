"""Calls of prefill, paged decode and the cache write: head dimensions, masks, formats, tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut_bench.instruments.recorder import BOTH, HOPPER, KernelCall, KernelVariant, each_once
from taut_kernels.attention import tiles
from taut_kernels.attention.arguments import HEAD_DIMS, padded_dim
from taut_kernels.attention.cache_arguments import EIGHT_BIT
from taut_kernels.attention.cache_write import op as cache_write
from taut_kernels.attention.cache_write.kernel import cache_write_kernel
from taut_kernels.attention.decode import op as decode
from taut_kernels.attention.decode.kernel import paged_decode_kernel
from taut_kernels.attention.prefill import hopper, hopper_backward
from taut_kernels.attention.prefill import op as prefill
from taut_kernels.attention.prefill.call import Settings
from taut_kernels.attention.prefill.hopper_kernel import attention_hopper_kernel
from taut_kernels.attention.prefill.hopper_keys_kernel import key_gradients_hopper_kernel
from taut_kernels.attention.prefill.hopper_queries_kernel import query_gradients_hopper_kernel
from taut_kernels.attention.prefill.portable_backward_kernel import (
    key_gradients_kernel,
    query_gradients_kernel,
    row_delta_kernel,
)
from taut_kernels.attention.prefill.portable_kernel import attention_kernel
from taut_kernels.attention.tile import AttentionTile, DecodeTile, HopperTile

_MASKS = ((False, 0), (True, 0), (True, 5))
"""Causal, and the window."""
_NAMES = dict(zip(_MASKS, ("full", "causal", "window"), strict=True))
_TOKENS, _HEADS, _GROUP = 17, 8, 4
_INT32, _FP32 = torch.int32, torch.float32
_WRITTEN = ((8, 128, 16), (1, 128, 32), (4, 64, 16), (32, 96, 64), (3, 80, 48), (2, 256, 16))
"""Heads, their elements, page size: Llama-3-8B, an eighth of 70B, more heads than a program takes,
no powers of two, wide heads."""


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class _Prefill(NamedTuple):
    """Operands of both passes."""

    q: Tensor
    k: Tensor
    lse: Tensor
    settings: Settings

    def forward(self, tile: AttentionTile) -> None:
        q, k, lse, settings = self
        prefill.launch_forward(tile, q, k, k, q, lse, settings)

    def forward_hopper(self, tile: HopperTile) -> None:
        q, k, lse, settings = self
        hopper.launch(tile, q, k, k, q, lse, settings)

    def delta(self) -> None:
        q, _, lse, settings = self
        prefill.row_delta(q, q, q, lse, settings)

    def backward(self, tile: AttentionTile) -> None:
        q, k, lse, settings = self
        prefill.launch_backward(tile, tile, q, q, k, k, q, lse, settings)

    def backward_hopper(self) -> None:
        q, k, lse, settings = self
        hopper_backward.launch(q, q, k, k, lse, lse, settings)


def _operands(dim: int, mask: tuple[bool, int], packed: bool) -> _Prefill:
    batch = () if packed else (2,)
    q, k = (_empty(*batch, _TOKENS, heads, dim) for heads in (_HEADS, _HEADS // _GROUP))
    bounds = _empty(3, dtype=_INT32) if packed else None
    settings = Settings(bounds, bounds, _TOKENS, _TOKENS, *mask, 0.1)
    return _Prefill(q, k, _empty(*batch, _HEADS, _TOKENS, dtype=_FP32), settings)


def _label(name: str, mask: tuple[bool, int], packed: bool, dim: int) -> str:
    return f"{name} {_NAMES[mask]}{' packed' if packed else ''} D={dim}"


def _portable() -> Iterator[KernelCall]:
    for dim in HEAD_DIMS:
        padded = padded_dim(dim)
        delta = AttentionTile(tiles.ROW_DELTA_BLOCK, 16, 4, 1)
        call, full = (
            _operands(dim, _MASKS[0], True),
            _label("attention delta", _MASKS[0], True, dim),
        )
        yield KernelCall(full, row_delta_kernel, delta, call.delta)
        for mask in _MASKS:
            # Bounds are loaded once a program: one of the two forms of each mask will do.
            packed = mask != _MASKS[0]
            call = _operands(dim, mask, packed)
            for target in BOTH:
                tile = tiles.forward(padded, mask[1] > 0, target == "sm_90")
                yield _forward(call, mask, packed, dim, tile, (target,))
            for name, kernel, backward in (
                ("attention dkv", key_gradients_kernel, tiles.KEY_GRADIENTS),
                ("attention dq", query_gradients_kernel, tiles.QUERY_GRADIENTS),
            ):
                tile, label = backward[padded], _label(name, mask, packed, dim)
                yield KernelCall(label, kernel, tile, partial(call.backward, tile))


def _forward(
    call: _Prefill,
    mask: tuple[bool, int],
    packed: bool,
    dim: int,
    tile: AttentionTile,
    targets: tuple[str, ...],
) -> KernelCall:
    label = _label("attention", mask, packed, dim)
    return KernelCall(label, attention_kernel, tile, partial(call.forward, tile), targets)


def _hopper() -> Iterator[KernelCall]:
    for dim, causal in itertools.product(HEAD_DIMS, (False, True)):
        # As above, one of the two forms of each mask will do.
        mask, padded = (causal, 0), padded_dim(dim)
        call, tile = _operands(dim, mask, causal), tiles.forward_hopper(None, padded)

        def label(name: str, mask: tuple[bool, int] = mask, dim: int = dim) -> str:
            return _label(f"{name} sm_90", mask, mask[0], dim)

        # Numbers of a tile, stored once in a tile; Triton 3.9 stores more than 3.6 does.
        spill, run = 192 if padded == 256 else 16, partial(call.forward_hopper, tile)
        yield KernelCall(label("attention"), attention_hopper_kernel, tile, run, HOPPER, spill)
        if padded == 128:
            for name, kernel, spill in (
                ("attention dkv", key_gradients_hopper_kernel, 256),
                ("attention dq", query_gradients_hopper_kernel, 64),
            ):
                gradients = call.backward_hopper
                yield KernelCall(label(name), kernel, "64x64", gradients, HOPPER, spill)


def _measured() -> Iterator[KernelCall]:
    """Yield causal attention with the tiles of every card's table, which are of sm_90."""
    mask = (True, 0)
    for gpu, dim in itertools.product(tiles.tables(), HEAD_DIMS):
        padded, call = padded_dim(dim), _operands(dim, mask, True)
        rule = (tiles.forward(padded, False, True), *tiles.backward(None, padded))
        own = (tiles.forward(padded, False, True, gpu), *tiles.backward(gpu, padded))
        forms: tuple[tuple[str, Any, Any], ...] = (
            ("attention", attention_kernel, call.forward),
            ("attention dkv", key_gradients_kernel, call.backward),
            ("attention dq", query_gradients_kernel, call.backward),
        )
        for tile, known, (name, kernel, run) in zip(own, rule, forms, strict=True):
            if tile != known:
                label = _label(name, mask, True, dim)
                # Some that spill a little were the fastest on the card all the same.
                yield KernelCall(label, kernel, tile, partial(run, tile), HOPPER, 64)


class _Decode(NamedTuple):
    """A form of paged decode: ``group`` query heads a key head, ``block_b`` lengths a program."""

    dtype: torch.dtype
    dim: int
    group: int = 4
    queries: int = 1
    page: int = 16
    window: bool = False
    splits: int = 8
    block_b: int = 0

    def __str__(self) -> str:
        form = f" of {self.block_b}" if self.block_b else "" if self.splits > 1 else " whole"
        form = f"{' window' if self.window else ''}{form}"
        name = EIGHT_BIT.get(self.dtype, "bf16")
        return f"{name} D={self.dim} g{self.group} T={self.queries} page {self.page}{form}"

    def run(self, tile: DecodeTile) -> None:
        """Call the launcher with as many sequences as ``block_b`` has room for, else 13."""
        sequences, pages, heads = self.block_b or 13, 7, 2
        if self.block_b == 64:
            sequences = 13  # few enough to start early
        q = _empty(sequences, self.queries, heads * self.group, self.dim)
        keys = _empty(pages, self.page, heads, self.dim, dtype=self.dtype)
        # More addresses to keep than where the strides are the same.
        wide = (pages, self.page, heads, 2 * self.dim)
        values = _empty(*wide, dtype=self.dtype)[..., : self.dim] if self.window else keys
        scale = _empty(1, dtype=_FP32) if self.dtype in EIGHT_BIT else None
        settings = decode.Settings(
            _empty(sequences, pages, dtype=_INT32),
            _empty(sequences, dtype=_INT32),
            scale,
            scale,
            None,
            pages * self.page,
            5 if self.window else 0,
            0.1,
        )
        splits, shares = (None, self.splits) if self.block_b else (self.splits, 0)
        decode.launch(tile, q, keys, values, settings, splits, shares=shares)


def _decode() -> Iterator[KernelCall]:
    """Yield the forms, with the rules' tiles and those of every card's table."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    plain = [_Decode(dtype, dim) for dim in HEAD_DIMS for dtype in (bf16, *EIGHT_BIT)]
    # Parts laid out on the device: a few registers more, and many before the loop.
    plain += [_Decode(dtype, 128, block_b=64) for dtype in (bf16, fp8)]
    # Every mask and address at once, on the widest form of each way to the operands.
    wide: dict[str, Any] = {"queries": 8, "page": 128, "window": True}
    others = [
        _Decode(bf16, 128, **wide),
        _Decode(fp8, 128, **wide),
        _Decode(torch.int8, 256, **wide),
        _Decode(bf16, 128, group=1, page=64, splits=1),
        _Decode(bf16, 128, **wide, block_b=256),
        _Decode(bf16, 128, block_b=tiles.MOST_LENGTHS),
        _Decode(bf16, 256, block_b=tiles.MOST_LENGTHS),
    ]
    cards = (None, *tiles.tables())
    for form in (*plain, *others):
        padded, size = padded_dim(form.dim), form.dtype.itemsize
        found = dict.fromkeys(
            tiles.decode(gpu, padded, size, load)
            for gpu, load in itertools.product(cards, tiles.LOADS)
        )
        for tile in found if form in plain else list(found)[:1]:
            yield _decode_call(form, tile, HOPPER)
        # Nothing in the code depends on D: the widest show what sm_80 makes of it.
        if form in plain and form.dim >= 128:
            yield _decode_call(form, next(iter(found)), ("sm_80",))


def _decode_call(form: _Decode, tile: DecodeTile, targets: tuple[str, ...]) -> KernelCall:
    # Around the loop: under Triton 3.9 16 rows of 256 sums are half of a thread's registers; where
    # ptxas aims at 128 of them it puts one aside.
    spill, run = 128 if form.dim == 256 else 8, partial(form.run, tile)
    return KernelCall(f"paged_decode {form}", paged_decode_kernel, tile, run, targets, spill)


def _write(heads: int, dim: int, page: int, dtype: torch.dtype) -> None:
    cache_write._plan.cache_clear()  # a process has one card
    rows, cache = _empty(3, heads, dim), _empty(5, page, heads, dim, dtype=dtype)
    scale = _empty(1, dtype=_FP32) if dtype == cache_write.FP8 else None
    cache_write.launch(rows, rows, cache, cache, _empty(3, dtype=torch.int64), scale, scale)


def _writes() -> Iterator[KernelCall]:
    for shape, dtype in itertools.product(_WRITTEN, (torch.bfloat16, cache_write.FP8)):
        heads, dim, page = shape
        cache = _empty(1, page, heads, dim, dtype=dtype)
        constants, options = cache_write.launch_constants(cache, early=False, converts=False)
        tile = f"{constants['BLOCK_H']}x{constants['BLOCK_D']}/{options['num_warps']}w"
        name = "fp8" if dtype == cache_write.FP8 else "bf16"
        label, run = f"cache_write {name} {heads}x{dim} page {page}", partial(_write, *shape, dtype)
        yield KernelCall(label, cache_write_kernel, tile, run)


def prefill_variants() -> Iterator[KernelVariant]:
    """Yield every form of prefill, forward and backward."""
    return each_once(itertools.chain(_portable(), _hopper(), _measured()))


def decode_variants() -> Iterator[KernelVariant]:
    """Yield every form of paged decode."""
    return each_once(_decode())


def cache_write_variants() -> Iterator[KernelVariant]:
    """Yield every form of the cache write."""
    return each_once(_writes())


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every form of attention's kernels."""
    return itertools.chain(prefill_variants(), decode_variants(), cache_write_variants())
