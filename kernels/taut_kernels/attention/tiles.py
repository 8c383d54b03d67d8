"""How the attention kernels are cut up: measured tables and the rules behind them.

A row of the table ``attention`` (:mod:`taut_kernels.launch.tile_tables`) has ``kernel``, ``D``,
``bits``, ``load``, ``tile`` and ``us``.

``kernel`` is one of :data:`KERNELS`, ``D`` the padded head dimension, ``bits`` those of a cached
element (16 but for decode), ``load`` one of :data:`LOADS` (``large`` but for decode), ``tile`` has
the fields of :class:`.tile.AttentionTile`, of :class:`.tile.HopperTile` where the kernel is
``forward_hopper``, or of :class:`.tile.DecodeTile` where it is ``decode``. What no row names takes
the rule.
``python -m tuning.tune_attention`` writes a table, and `python -m taut_bench.instruments.aot`
proves that no tile spills on sm_80 and sm_90.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, cast

from taut_kernels.attention.tile import AttentionTile, DecodeTile, HopperTile, Tile
from taut_kernels.launch.tile_tables import Reader, Row, measured

KERNELS = ("forward", "forward_hopper", "key_gradients", "query_gradients", "decode")
ROW_DELTA_BLOCK = 64
LOADS = ("small", "large", "many")
"""Of decode: up to :data:`SMALL_LOAD` keys a multiprocessor, where latencies count; more; and more,
of so many sequences and heads that they are hardly divided."""
SMALL_LOAD = 1024
MANY_PAIRS = 2
"""Sequences × key heads a multiprocessor up to which a load is "large" and not "many"."""
_FEW_KEYS = 1024
"""Keys of a program where there are more programs than fit at once."""
_MOST_SPLITS = 512
_MOST_IMBALANCE = 1.1
MOST_LENGTHS = 1024
"""Sequences of a batch at most whose parts are laid out on the device: each program reads all
lengths."""
_SHARE_KEYS = 1024
"""Keys of a share at least, where sequences alone occupy the device."""
_MOST_SHARES = 2**14
"""With a place for every sequence: counts of 15 bits, and less than a grid may have."""
HEADS_FIRST_BYTES = 32 * 2**20
"""Of queries: up to here backward's programs begin in the order of heads, so that none with much
work is the last to run. Beyond, reading the blocks of all heads at once costs more than it gains
(sm_90, measured at 32 and 128 MiB)."""


# By the padded head dimension.
_FORWARD = {
    64: AttentionTile(128, 64, 8, 3),
    128: AttentionTile(128, 32, 8, 3),
    256: AttentionTile(64, 32, 8, 2),
}
_FORWARD_128_HOPPER = AttentionTile(128, 64, 8, 3)
FORWARD_HOPPER = {64: HopperTile(128, 3), 128: HopperTile(128, 2), 256: HopperTile(64, 2)}
KEY_GRADIENTS = {
    64: AttentionTile(64, 128, 8, 2),
    128: AttentionTile(64, 64, 8, 2),
    256: AttentionTile(32, 32, 8, 1),
}
QUERY_GRADIENTS = {
    64: AttentionTile(128, 64, 8, 2),
    128: AttentionTile(64, 64, 8, 2),
    256: AttentionTile(32, 32, 8, 1),
}
# By the padded head dimension, bytes of an element, and load; "large" stands for "many", too. One
# warp a program has no other to wait for, and many fit into a multiprocessor. On the H200 four
# warps and fewer parts are faster where sequences are divided into many (LIBRARY).
_DECODE = {
    (64, 2, "small"): DecodeTile(16, 4, 3, 4, 128),
    (64, 2, "large"): DecodeTile(16, 1, 4, 10, 256),
    (64, 1, "small"): DecodeTile(16, 4, 3, 4, 128),
    (64, 1, "large"): DecodeTile(16, 1, 4, 10, 256),
    (128, 2, "small"): DecodeTile(16, 4, 3, 2, 128),
    (128, 2, "large"): DecodeTile(16, 1, 4, 7, 256),
    (128, 1, "small"): DecodeTile(16, 4, 3, 4, 128),
    (128, 1, "large"): DecodeTile(16, 1, 4, 10, 128),
    (256, 2, "small"): DecodeTile(16, 4, 2, 2, 128),
    (256, 2, "large"): DecodeTile(16, 2, 3, 3, 256),
    (256, 1, "small"): DecodeTile(16, 4, 3, 2, 128),
    (256, 1, "large"): DecodeTile(16, 2, 3, 4, 256),
}


_KINDS = {"forward_hopper": HopperTile, "decode": DecodeTile}


def _entry(row: Row) -> tuple[tuple[str, int, int, str], Tile]:
    """Key a row by kernel, padded head dimension, bytes of a cached element, and load."""
    if row["kernel"] not in KERNELS or row["load"] not in LOADS:
        raise ValueError(f"no such kernel or load: {row['kernel']}, {row['load']}")
    kind: Any = _KINDS.get(row["kernel"], AttentionTile)
    return (row["kernel"], row["D"], row["bits"] // 8, row["load"]), kind(**row["tile"])


_READER = Reader(
    name="attention",
    fields=frozenset({"kernel", "D", "bits", "load", "tile", "us"}),
    entry=_entry,
)
parse, tables = _READER.parse, cache(_READER.tables)


def _measured(gpu: str | None, kernel: str, dim: int, size: int = 2, load: str = "large") -> Any:
    """Return a card's measured tile, or None."""
    return measured(tables(), gpu, (kernel, dim, size, load))


def forward(padded_dim: int, windowed: bool, hopper: bool, gpu: str | None = None) -> AttentionTile:
    """Return the tile of the forward kernel.

    Args:
        padded_dim: 64, 128 or 256.
        windowed: a window's mask needs registers of its own: never by a table.
        hopper: sm_90, whose products take both operands from shared memory.
        gpu: the card's name; None for the rule.
    """
    if not windowed and (measured := _measured(gpu, "forward", padded_dim)):
        return cast("AttentionTile", measured)
    if padded_dim == 128 and hopper and not windowed:
        return _FORWARD_128_HOPPER
    return _FORWARD[padded_dim]


def forward_hopper(gpu: str | None, padded_dim: int) -> HopperTile:
    """Return the tile of the forward kernel of sm_90.

    Args:
        gpu: the card's name; None for the rule.
        padded_dim: 64, 128 or 256.
    """
    measured = _measured(gpu, "forward_hopper", padded_dim)
    return cast("HopperTile", measured) if measured else FORWARD_HOPPER[padded_dim]


def backward(gpu: str | None, padded_dim: int) -> tuple[AttentionTile, AttentionTile]:
    """Return the tiles of the gradients of keys and of queries.

    Args:
        gpu: the card's name; None for the rule.
        padded_dim: 64, 128 or 256.
    """
    keys = _measured(gpu, "key_gradients", padded_dim) or KEY_GRADIENTS[padded_dim]
    queries = _measured(gpu, "query_gradients", padded_dim) or QUERY_GRADIENTS[padded_dim]
    return keys, queries


def load_of(pairs: int, max_context: int, multiprocessors: int) -> str:
    """Return whether a call of paged decode has little to read, or much of few or of many.

    One of :data:`LOADS`.

    Args:
        pairs: programs without splits: sequences × key heads.
        max_context: keys of the longest sequence.
        multiprocessors: of the device.
    """
    if pairs * max_context <= SMALL_LOAD * multiprocessors:
        return "small"
    return "large" if pairs <= MANY_PAIRS * multiprocessors else "many"


def decode(gpu: str | None, padded_dim: int, size: int, load: str) -> DecodeTile:
    """Return the tile of paged decode.

    Args:
        gpu: the card's name; None for the rule.
        padded_dim: 64, 128 or 256.
        size: bytes of a cached element, 1 or 2.
        load: of :func:`load_of`.
    """
    measured = _measured(gpu, "decode", padded_dim, size, load)
    rule = _DECODE[padded_dim, size, "small" if load == "small" else "large"]
    return cast("DecodeTile", measured) if measured else rule


def decode_splits(tile: DecodeTile, pairs: int, max_context: int, multiprocessors: int) -> int:
    """Return into how many programs a sequence's keys are divided.

    As many as run at once; where even whole sequences are more than that, or would leave some
    multiprocessors with less than others, small ones, so that the last to run are soon done.

    Args:
        tile: of the call.
        pairs: programs without splits: sequences × key heads.
        max_context: keys of the longest sequence.
        multiprocessors: of the device.
    """
    most = max(1, min(-(-max_context // tile.min_keys), _MOST_SPLITS))
    at_once = max(1, min(tile.per_sm * multiprocessors // pairs, most))
    each = pairs * at_once / multiprocessors
    if each <= tile.per_sm and math.ceil(each) <= _MOST_IMBALANCE * each:
        return at_once
    return max(at_once, min(-(-max_context // _FEW_KEYS), most))


def bounded_decode(
    gpu: str | None,
    padded_dim: int,
    size: int,
    pairs: int,
    max_context: int,
    multiprocessors: int,
    sequences: int,
) -> tuple[DecodeTile, int, int]:
    """Return how paged decode runs where most sequences may be far shorter than the most.

    A CUDA graph keeps its grid, laid out for the longest context a model may have: the parts of
    several sequences are laid out on the device, by the lengths, in as many shares as programs run
    at once. One sequence alone is divided evenly by splits, too, and needs no such layout.
    ``min_keys`` of the tile is raised so that short sequences stay whole, for a merge costs more
    than it gains where sequences alone occupy the device.

    Args:
        gpu: the card's name; None for the rule.
        padded_dim: 64, 128 or 256.
        size: bytes of a cached element, 1 or 2.
        pairs: programs without splits: sequences × key heads.
        max_context: keys of the longest sequence there may be.
        multiprocessors: of the device.
        sequences: of the batch.

    Returns:
        Tile, splits and shares as :func:`.decode.op.launch` wants them.
    """
    load = load_of(pairs, max_context, multiprocessors)
    if 2 * pairs > decode(gpu, padded_dim, size, "large").per_sm * multiprocessors:
        load = "many"
    least = _SHARE_KEYS // max(1, multiprocessors // pairs)
    tile = _with_longer_parts(decode(gpu, padded_dim, size, load), least)
    if max_context <= tile.min_keys or sequences > MOST_LENGTHS:
        return tile, 1, 0
    if load == "many" and size == 1:
        # Evenly divided, many are as few. In 16 bits the smaller tile gains with short sequences.
        tile = _with_longer_parts(decode(gpu, padded_dim, size, "large"), least)
    at_once = max(1, tile.per_sm * multiprocessors * sequences // pairs)
    most = sequences * -(-max_context // tile.min_keys)
    if sequences == 1:
        return tile, min(at_once, most, _MOST_SPLITS), 0
    return tile, 1, min(at_once, most, _MOST_SHARES)


@cache
def _with_longer_parts(tile: DecodeTile, min_keys: int) -> DecodeTile:
    return replace(tile, min_keys=max(tile.min_keys, min_keys))
