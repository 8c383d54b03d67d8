"""Which regime of `taut::w4a16_gemm` takes more than 8 tokens, and how `wgmma` is cut up for it.

A table is ``tiles/w4a16_wgmma-<card>.json``::

    {"gpu": "<torch.cuda.get_device_name>", "source": "<command, date, versions>",
     "rows": [{"N": …, "K": …, "max_m": one of :data:`BUCKETS` | null,
               "tile": {…} | "dense" | "decode", "us": µs per call at max_m (null: 4096)}, …]}

``tile`` has exactly the fields of :class:`WgmmaTile` or, up to 64 tokens, of
:class:`.decode_ring_tile.RingTile` or of
:class:`.ring_tile.WgmmaRingTile`, without ``tma`` up to 1024, or, up to 2048, of
:class:`.pair_tile.WavesTile`, made of such; ``dense`` stands for dequantising
the layer and multiplying densely (:mod:`.dense`), ``decode`` (up to 16
tokens) for :mod:`.decode`. A shape that no table of the card names takes
:func:`rule`. A row may have a ``format`` (:mod:`.weight_format`); a layer takes the row of its own,
else of the nearest. The layout of the weights does not depend on any of it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from taut_kernels.gemm.w4a16 import decode_ring_tile as tiles_decode_ring
from taut_kernels.gemm.w4a16 import ring_tile as tiles_wgmma_ring
from taut_kernels.gemm.w4a16 import rule as tiles_wgmma_rule
from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.portable_tile import WgmmaTile
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.launch import tile_tables

__all__ = [
    "BUCKETS",
    "DECODE_TOKENS",
    "ONE_OF_EACH",
    "Choice",
    "Choices",
    "WgmmaTable",
    "WgmmaTile",
    "bucket_of",
    "lookup",
    "parse",
    "plain_rule",
    "rule",
    "served",
    "tables",
]
_ROW_FIELDS = {"N", "K", "max_m", "tile", "us"}
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1152, 1280, 1344, 1408, 1536, 1664, 2048)
"""Largest M of each row but the last, which has no limit. 384 and 1664 are whole tiles of 128
tokens and not of 256; vLLM's steps of a few prompts are often such. 768 and 1280 are three and five
tiles of 256, 192 and 1344 one and seven of 192."""
_WIDER = {192: 256, 1152: 1280, 1280: 1664, 1344: 1664, 1408: 1536, 1536: 1664}
"""Buckets that were cut out of a wider one: where a table has no row of theirs, the wider's was
measured for these tokens, too."""
ONE_OF_EACH = (8, *BUCKETS, BUCKETS[-1] + 1)
"""One number of tokens for each choice the op makes between kernels and tiles."""
DECODE_TOKENS = 16
"""Most tokens the decode kernel takes."""
PROGRAMS_WANTED = 264
"""Two programs an SM of an H100 or H200: one converts while the other multiplies."""

Choice = WgmmaTile | RingTile | WgmmaRingTile | WavesTile | Literal["decode", "dense"]
Choices = Mapping[tuple[int, int, int, WeightFormat], Choice]
"""By N, K, a bucket's index and the format; bucket ``len(BUCKETS)`` has no limit."""


@dataclass(frozen=True, slots=True)
class WgmmaTable:
    """What was measured on one card."""

    gpu: str
    choices: Choices


def parse(text: str, where: str) -> WgmmaTable:
    """Read a table.

    Args:
        text: JSON in the form of the module's docstring.
        where: file name, for errors.

    Returns:
        The table.

    Raises:
        ValueError: an unknown key, a missing field, or a shape named twice; names ``where``.
    """
    gpu, listed = tile_tables.rows_of(text, where)
    found: dict[tuple[int, int, int, WeightFormat], Choice] = {}
    for row in listed:
        if set(row) - {weight_format.FIELD} != _ROW_FIELDS or row["max_m"] not in (*BUCKETS, None):
            raise ValueError(
                f"{where}: a row needs exactly {sorted(_ROW_FIELDS)}, max_m one of {BUCKETS}, null"
            )
        bucket = len(BUCKETS) if row["max_m"] is None else BUCKETS.index(row["max_m"])
        place = f"{where}: N={row['N']} K={row['K']} max_m={row['max_m']}"
        key = (row["N"], row["K"], bucket, weight_format.of_row(row, place))
        if key in found:
            raise ValueError(f"{place} is there twice in {key[3]}")
        found[key] = _choice(row["tile"], row["max_m"], where)
        ring = found[key]
        # Without a limit K is whole, and as many tokens as may be meet nobody.
        most = row["max_m"] or BUCKETS[-1]
        if isinstance(ring, WgmmaRingTile | WavesTile) and (why := ring.why_not(row["N"], most)):
            raise ValueError(f"{place}: {why}")
        waves = found[key]
        if isinstance(waves, WavesTile) and waves.head_rows(row["max_m"], row["N"]) == row["N"]:
            # Warm-up, which runs the largest M, would not compile the tail that others need.
            raise ValueError(f"{where}: the tail has no rows at max_m={row['max_m']}, got {waves}")
    return WgmmaTable(gpu, found)


def _choice(tile: Any, max_m: int | None, where: str) -> Choice:
    if isinstance(tile, dict):
        if "row_warps" in tile:
            if max_m is not None and max_m <= tiles_decode_ring.MAX_TOKENS:
                return RingTile(**tile)
        elif "head" in tile:
            if max_m is not None and set(tile) == {"head", "tail", "places"}:
                head, tail = WgmmaRingTile(**tile["head"]), WgmmaRingTile(**tile["tail"])
                return WavesTile(head, tail, tile["places"])
        else:
            return _product_tile(tile, max_m, where)
    if tile == "dense" or (tile == "decode" and max_m == DECODE_TOKENS):
        return "dense" if tile == "dense" else "decode"
    raise ValueError(f"{where}: tile {tile!r} is no regime for max_m={max_m}")


def _product_tile(tile: dict[str, Any], max_m: int | None, where: str) -> WgmmaTile | WgmmaRingTile:
    if max_m is None and tile.get("split_k", 1) > 1:
        # Warm-up would pass, and a long enough prefill meet more tiles than are counted.
        raise ValueError(f"{where}: split_k needs a max_m, got {tile}")
    if "warp_groups" not in tile:
        return WgmmaTile(**tile)
    ring = WgmmaRingTile(**tile)
    if not ring.tma and (max_m is None or max_m > tiles_wgmma_ring.MAX_TOKENS):
        raise ValueError(f"{where}: tile {tile!r} is no regime for max_m={max_m}")
    return ring


TABLE = "w4a16_wgmma"


@cache
def tables() -> dict[str, WgmmaTable]:
    """Load every card's table, once a process; this machine's rows come first."""

    def merged(shipped: WgmmaTable, own: WgmmaTable) -> WgmmaTable:
        return WgmmaTable(own.gpu, {**shipped.choices, **own.choices})

    shipped = tile_tables.load_all(TABLE, parse)
    return tile_tables.with_measured_here(shipped, TABLE, parse, merged)


def rule(N: int, K: int, bucket: int, *, hopper: bool) -> Choice:
    """Choose for a shape nobody measured.

    Args:
        N: output features.
        K: input features.
        bucket: index into :data:`BUCKETS`, or its length.
        hopper: the card has `wgmma`.

    Returns:
        The tile or regime.
    """
    if bucket == len(BUCKETS):
        return "dense"  # by then dequantising costs one part in ten
    tokens = BUCKETS[bucket]
    if hopper and K >= tiles_wgmma_rule.LEAST_K and N >= tiles_wgmma_rule.LEAST_N:
        return tiles_wgmma_rule.rule(N, K, tokens)
    return plain_rule(N, K, tokens)


def plain_rule(N: int, K: int, tokens: int) -> Choice:
    """Choose among the kernels that every card runs: what won on most measured shapes.

    Args:
        N: output features.
        K: input features.
        tokens: the most that the choice is for, one of :data:`BUCKETS`.

    Returns:
        The tile or regime.
    """
    if tokens <= DECODE_TOKENS:
        return "decode"
    chunks = 1 if (K // 64) % 2 or tokens > 128 else 2
    if tokens > 128:
        return WgmmaTile(256, 1, 8, chunks, 1, 3, reordered=True, early_wait=True)
    split = 1
    while -(-N // 64) * split < PROGRAMS_WANTED and split < 8 and 16 * split <= K // 64:
        split *= 2
    return WgmmaTile(tokens, 1, 4, chunks, split, 3, reordered=tokens > 32, early_wait=tokens > 64)


def bucket_of(M: int) -> int:
    """Return the bucket of a number of tokens."""
    return bisect_left(BUCKETS, M)


def _measured_for(bucket: int) -> tuple[int, ...]:
    """Return the buckets whose rows serve one, its own first."""
    found = [bucket]
    while found[-1] < len(BUCKETS) and (wider := _WIDER.get(BUCKETS[found[-1]])):
        found.append(BUCKETS.index(wider))
    return tuple(found)


def served(
    choices: Choices, N: int, K: int, bucket: int, weights: WeightFormat = DEFAULT
) -> Choice | None:
    """Return what a card's rows have for one shape; None without one.

    Args:
        choices: of the table.
        N: output features.
        K: input features.
        bucket: of :func:`bucket_of`.
        weights: the layer's format.

    Returns:
        What was measured to be fastest in the nearest format, there in the narrowest bucket.
    """
    for near, of_bucket in itertools.product(weights.tried, _measured_for(bucket)):
        if (N, K, of_bucket, near) in choices:
            return choices[N, K, of_bucket, near]
    return None


@cache
def lookup(
    gpu: str | None, N: int, K: int, bucket: int, weights: WeightFormat = DEFAULT, *, hopper: bool
) -> Choice:
    """Choose for one shape on one card.

    Args:
        gpu: card name, None outside CUDA.
        N: output features.
        K: input features.
        bucket: of :func:`bucket_of`.
        weights: the layer's format.
        hopper: the card has `wgmma`.

    Returns:
        What :func:`served` does, or what :func:`rule` says.
    """
    table = tile_tables.of_card(tables(), gpu)
    found = None if table is None else served(table.choices, N, K, bucket, weights)
    return rule(N, K, bucket, hopper=hopper) if found is None else found
