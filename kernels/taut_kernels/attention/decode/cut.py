"""How a launch of paged decode is cut up: rows of a program, lengths it reads, its constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import padded_dim
from taut_kernels.attention.cache_arguments import EIGHT_BIT
from taut_kernels.attention.tile import DecodeTile
from taut_kernels.launch import launcher

_BLOCK_M = 16
"""Rows of the least product of tensor cores; more would spill registers."""
_MERGED_ELEMENTS = 2048
"""Of the parts of all splits, how many each warp of the last program reads at once: 64 a thread, in
registers that its loop needs no more."""
_MOST_MERGED = 32
"""Parts at once at most: instructions are written out for each."""
_LENGTHS = (64, 256, attention_tiles.MOST_LENGTHS)
"""What a batch's size is rounded up to where programs read all lengths: each a form."""


class Queries(NamedTuple):
    """What a form of the kernel knows of queries."""

    tokens: int  # T, of a sequence
    group: int  # query heads a key head
    dim: int  # D, elements of a head
    block_d: int  # ``dim`` up to a power of two
    windowed: bool  # a query sees the keys of a window alone


class Cache(NamedTuple):
    """What a form of the kernel knows of caches."""

    page: int  # keys of one
    same_strides: bool  # of keys and values


class Cut(NamedTuple):
    """How a form of the kernel divides rows of queries, and keys."""

    rows: int  # query rows of a program, at most ``block_m``
    block_m: int  # rows of a product
    kept: int  # rows of a product that the softmax is worked out for
    block_r: int  # ``rows`` up to a power of two
    unroll: int  # splits merged at once
    keys: int  # of a warp in a step
    warps: int  # of a program


def row_blocks(rows: int) -> tuple[int, int]:
    """Divide the query rows of a key head among programs, at most 16 to each.

    Args:
        rows: query heads a key head × queries a sequence.

    Returns:
        Programs, and rows of each.
    """
    blocks = -(-rows // _BLOCK_M)
    return blocks, -(-rows // blocks)


def has_conversion(cache: Tensor) -> bool:
    """Say whether this device turns the cache's elements into fp16 by inline assembly."""
    if cache.is_cpu or cache.element_size() != 1:
        return False
    return cache.dtype == torch.int8 or launcher.capability(cache.device) >= (8, 9)


def launch_constants(
    tile: DecodeTile,
    cache: Tensor,
    queries: int,
    heads: int,
    window: bool,
    same_strides: bool,
    block_b: int = 0,
    starts: tuple[bool, bool] = (False, False),
) -> dict[str, Any]:
    """Return the kernel's constants.

    Args:
        tile: how to cut the work.
        cache: keys or values, [pages, page size, Hk, D].
        queries: of a sequence.
        heads: query heads.
        window: whether keys are limited to one.
        same_strides: of keys and values.
        block_b: of :func:`lengths_read` in a launch in shares, else 0.
        starts: of :func:`early_starts`.
    """
    dim, group = cache.shape[3], heads // cache.shape[2]
    padded = padded_dim(dim)
    _, rows = row_blocks(queries * group)
    block_r = 1 << (rows - 1).bit_length()
    merged = _MERGED_ELEMENTS * tile.num_warps // (block_r * padded)
    return {
        "FORMAT": EIGHT_BIT.get(cache.dtype, "16 bit"),
        "ASM": has_conversion(cache),
        "CACHE": Cache(cache.shape[1], same_strides),
        "QUERIES": Queries(queries, group, dim, padded, window),
        "CUT": Cut(
            rows=rows,
            block_m=_BLOCK_M,
            # Half of a product's rows are left out where no query has them.
            kept=_BLOCK_M // 2 if rows <= _BLOCK_M // 2 else _BLOCK_M,
            block_r=block_r,
            unroll=max(1, min(_MOST_MERGED, merged)),
            keys=tile.keys,
            warps=tile.num_warps,
        ),
        "BLOCK_B": block_b,
        "STARTS_NEXT": starts[0],
        "EARLY": starts[1],
    }


def lengths_read(sequences: int) -> int:
    """Return for how many lengths the form of a launch in shares has room.

    Args:
        sequences: of the batch, at most :data:`attention_tiles.MOST_LENGTHS`.
    """
    return next(block for block in _LENGTHS if block >= sequences)
