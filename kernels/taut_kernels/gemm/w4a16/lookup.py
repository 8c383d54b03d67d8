"""Which kernel of `taut::w4a16_gemm` takes more than 8 tokens, and how it is cut up for them.

A row of the table ``w4a16_wgmma`` (:mod:`taut_kernels.launch.tile_tables`) is of one N, K, format
(:mod:`.weight_format`) and ``max_m``: one of :data:`BUCKETS`, or null for any number, ``us`` then
being at 4096. ``kernel`` is

================  ================================================================================
``decode``        :mod:`.decode`, up to 16 tokens; its tile is a row of :mod:`.decode_tile`'s table
``decode_ring``   :class:`.decode_ring_tile.RingTile`, up to 64
``ring``          :class:`.ring_tile.WgmmaRingTile` without ``tma``, up to 1024
``tma``           the same with ``tma``
``pair``          :class:`.pair_tile.WavesTile`, two of ``tma``, up to 2048
``portable``      :class:`.portable_tile.WgmmaTile`; no row of a card with `wgmma` has it
``dense``         dequantise the layer and multiply densely (:mod:`.dense`)
================  ================================================================================

and ``tile`` that class's fields but ``tma``, or null. A layer takes the row of its own format, else
of the nearest. A shape that no table of the card names takes :func:`rule`. The layout of the
weights does not depend on any of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Mapping
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
from taut_kernels.launch.tile_tables import Reader, Row, of_card

__all__ = [
    "BUCKETS",
    "DECODE_TOKENS",
    "ONE_OF_EACH",
    "Choice",
    "Choices",
    "WgmmaTile",
    "as_fields",
    "bucket_of",
    "lookup",
    "parse",
    "plain_rule",
    "rule",
    "served",
    "tables",
]
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


def as_fields(choice: Choice) -> dict[str, Any]:
    """Return a row's ``kernel`` and ``tile``."""
    if isinstance(choice, str):
        return {"kernel": choice, "tile": None}
    fields = dataclasses.asdict(choice)
    for tile in (fields, fields.get("head"), fields.get("tail")):
        (tile or {}).pop("tma", None)
    fed_by_tma = isinstance(choice, WgmmaRingTile) and choice.tma
    return {"kernel": "tma" if fed_by_tma else _KERNELS[type(choice)], "tile": fields}


_KERNELS = {
    RingTile: "decode_ring",
    WgmmaRingTile: "ring",
    WavesTile: "pair",
    WgmmaTile: "portable",
}
_MOST_TOKENS = {
    "decode": DECODE_TOKENS,
    "decode_ring": tiles_decode_ring.MAX_TOKENS,
    "ring": tiles_wgmma_ring.MAX_TOKENS,
    "pair": BUCKETS[-1],
}
"""Of kernels that do not take any number."""


def _choice(kernel: str, fields: Any) -> Choice:
    """Return what :func:`as_fields` was made of."""
    if kernel in ("decode", "dense"):
        if fields is not None:
            raise ValueError(f"{kernel} has no tile, got {fields}")
        return "decode" if kernel == "decode" else "dense"
    if kernel == "decode_ring":
        return RingTile(**fields)
    if kernel in ("ring", "tma"):
        return WgmmaRingTile(**fields, tma=kernel == "tma")
    if kernel == "pair":
        head, tail = (WgmmaRingTile(**fields[part], tma=True) for part in ("head", "tail"))
        return WavesTile(**{**fields, "head": head, "tail": tail})
    if kernel == "portable":
        return WgmmaTile(**fields)
    raise ValueError(f"there is no kernel {kernel!r}")


def _entry(row: Row) -> tuple[tuple[int, int, int, WeightFormat], Choice]:
    N, max_m = row["N"], row["max_m"]
    if max_m not in (*BUCKETS, None):
        raise ValueError(f"max_m must be one of {BUCKETS} or null")
    bucket = len(BUCKETS) if max_m is None else BUCKETS.index(max_m)
    most = _MOST_TOKENS.get(row["kernel"])
    if most is not None and (max_m is None or max_m > most):
        raise ValueError(f"{row['kernel']} takes up to {most} tokens")
    choice = _choice(row["kernel"], row["tile"])
    if isinstance(choice, WgmmaTile | WgmmaRingTile) and choice.split_k > 1 and max_m is None:
        # Warm-up would pass, and a long enough prefill meet more tiles than are counted.
        raise ValueError(f"split_k needs a max_m, got {choice}")
    # Without a limit K is whole, and as many tokens as may be meet nobody.
    if isinstance(choice, WgmmaRingTile | WavesTile) and (
        why := choice.why_not(N, max_m or BUCKETS[-1])
    ):
        raise ValueError(why)
    if isinstance(choice, WavesTile) and choice.head_rows(max_m, N) == N:
        # Warm-up, which runs the largest M, would not compile the tail that others need.
        raise ValueError(f"the tail has no rows, got {choice}")
    return (N, row["K"], bucket, weight_format.of_row(row)), choice


TABLE = "w4a16_wgmma"
_READER = Reader(
    name=TABLE,
    fields=frozenset({"N", "K", "max_m", "kernel", "tile", "us"}),
    optional=frozenset({weight_format.FIELD}),
    entry=_entry,
    measured_here=True,
)
parse, tables = _READER.parse, cache(_READER.tables)


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
        return WgmmaTile(256, 8, chunks, 1, reordered=True, early_wait=True)
    split = 1
    while -(-N // 64) * split < PROGRAMS_WANTED and split < 8 and 16 * split <= K // 64:
        split *= 2
    return WgmmaTile(tokens, 4, chunks, split, reordered=tokens > 32, early_wait=tokens > 64)


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
    table = of_card(tables(), gpu)
    found = None if table is None else served(table.choices, N, K, bucket, weights)
    return rule(N, K, bucket, hopper=hopper) if found is None else found
