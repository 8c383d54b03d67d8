"""Compile what a layer of ours may launch over its cache: decodes and cache writes.

Beside :mod:`.warm_up`, which sees a loaded model: the form of a cache is
known later, when it is laid out. Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import padded_dim
from taut_kernels.attention.cache_write import op as cache_write
from taut_kernels.attention.decode import op as decode
from taut_kernels.attention.decode.cut import lengths_read, row_blocks
from taut_kernels.attention.tile import DecodeTile
from taut_kernels.launch import early_start, launcher
from taut_kernels.launch.compile_ahead import ask, warmed_up


@dataclass(frozen=True, slots=True)
class DecodeForm:
    """What compiled forms of paged decode of a layer have in common, beside scales.

    Attributes:
        heads: query heads.
        kv_heads: key heads.
        head_dim: elements of one.
        page_size: keys of a page.
        window: keys a query sees, 0 for all; only whether it is 0 counts.
        dtype: of queries.
        cache_dtype: of keys and values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


_compiled: set[tuple[DecodeForm, int, torch.device]] = set()


def _bounded_launches(
    form: DecodeForm, sequences: int, device: torch.device
) -> dict[tuple[Any, ...], tuple[DecodeTile, int, int, int, int]]:
    """Return a launch of each form that decodes may need.

    Tile, splits, shares, sequences and longest context.

    Which tile a batch takes changes where its keys, at the longest context, pass a bound; whether
    it is divided, and whether one sequence starts early, where that context does.
    """
    kind = (launcher.gpu_name(device), padded_dim(form.head_dim), form.cache_dtype.itemsize)
    blocks, _ = row_blocks(form.heads // form.kv_heads)
    units = launcher.multiprocessors(device)
    found: dict[tuple[Any, ...], tuple[DecodeTile, int, int, int, int]] = {}
    for count in range(1, sequences + 1):
        pairs = count * form.kv_heads * blocks
        small = attention_tiles.SMALL_LOAD * units // pairs
        ends = (small, decode.EARLY_KEYS)
        for longest in (1, *ends, *(end + 1 for end in ends), 2**20):
            cut = attention_tiles.bounded_decode(*kind, pairs, longest, units, count)
            tile, splits, shares = cut
            block = lengths_read(count) if shares else 0
            starts = decode.early_starts(count, longest, device)
            key = (tile.keys, tile.num_warps, tile.num_stages, splits > 1, block, starts)
            found.setdefault(key, (*cut, count, longest))
    return found


def ask_decode(form: DecodeForm, sequences: int, device: torch.device) -> None:
    """Have what :func:`compile_decode` runs compiled meanwhile; its arguments."""
    ask(lambda: _run_all(form, sequences, device), (form, sequences))


def compile_decode(form: DecodeForm, sequences: int, device: torch.device) -> int:
    """Run every form of a layer's decodes and cache writes once; layers repeat forms.

    Args:
        form: of the layer.
        sequences: most of a batch.
        device: where it runs.

    Returns:
        The number of launches, 0 where another layer had the same form.
    """
    if (form, sequences, device) in _compiled:
        return 0
    _compiled.add((form, sequences, device))
    return warmed_up(lambda: _run_all(form, sequences, device))


def _run_all(form: DecodeForm, sequences: int, device: torch.device) -> int:
    dim, size = form.head_dim, form.cache_dtype.itemsize
    # As vLLM lays them out: a key and its value are neighbours.
    both = torch.zeros(1, form.page_size, form.kv_heads, 2 * dim, dtype=form.dtype, device=device)
    both = both.to(form.cache_dtype)
    scale = torch.ones((), device=device) if size == 1 else None
    launches = _bounded_launches(form, sequences, device).values()
    for tile, splits, shares, count, longest in launches:
        q = torch.zeros(count, 1, form.heads, dim, dtype=form.dtype, device=device)
        table = torch.zeros(count, 1, dtype=torch.int32, device=device)
        contexts = torch.ones(count, dtype=torch.int32, device=device)
        arrivals = torch.zeros(count * form.heads, dtype=torch.int32, device=device)
        settings = decode.Settings(
            table, contexts, scale, scale, arrivals, longest, form.window, 1.0
        )
        caches = (both[..., :dim], both[..., dim:])
        decode.launch(tile, q, *caches, settings, splits, shares=shares)
    return len(launches) + _write_nowhere(form, both, scale)


def _write_nowhere(form: DecodeForm, both: Tensor, scale: Tensor | None) -> int:
    """Run the cache write of few tokens and of many; return how many forms."""
    dim, device = form.head_dim, both.device
    caches = (both[..., :dim], both[..., dim:])
    counts = (1, early_start.EARLY_TOKENS + 1)  # that start early, and that do not
    for count in counts:
        tokens = torch.zeros(count, form.kv_heads, dim, dtype=form.dtype, device=device)
        nowhere = torch.full((count,), -1, dtype=torch.int64, device=device)
        cache_write.launch(tokens, tokens, *caches, nowhere, scale, scale)
    return len(counts)
