"""How the 8-bit products are cut up for one shape: measured tables, and where there is none a rule.

Rows of the table ``scaled_mm`` (:mod:`taut_kernels.launch.tile_tables`) are buckets of M of one op
(:data:`.tile.OPS`), N and K. ``M`` are the numbers of tokens measured, ``us`` the times of ours,
``vllm_us`` of the kernel vLLM runs there, ``rival_us`` of the fastest rival.

``kernel`` and ``tile`` hold exactly the fields of :class:`.tile.ScaledMmTile`. A product no table
of the card names takes :func:`.rule.rule`. The rivals' figures are of the same run, 0 where none
ran. Where ours is slower than vLLM's in a bucket, or its kernel was not tried on a card yet
(:data:`SERVED`), the plugin leaves that bucket to vLLM
(:func:`why_not_preferred`). A card that takes these tiles from another
has verdicts of its own (:mod:`.verdict`).

A row may also have ``"layer": {"prefetch": lines or null, "M": […], "us": […], "vllm_us": […]}``:
µs of a whole decoder layer's step with ours and with vLLM's in this product, where all other
kernels are ours and start early (:mod:`taut_bench.decode_chain`), and how ours does
(null: late). It decides in such a layer alone (``in_layer``): behind others' kernels an early start
can lose. There rings of other products start early by the same pattern (:func:`early_in_layer`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from taut_kernels.gemm.scaled_mm import verdict as measured_scaled_mm
from taut_kernels.gemm.scaled_mm.rule import (
    LONG_K,
    RULE_TOKENS,
    TMA_TOKENS,
    promised_us,
    rule,
    rule_of_waves,
)
from taut_kernels.gemm.scaled_mm.tile import (
    BLOCKS,
    MULTIPROCESSORS,
    OPS,
    PAIRS,
    PREFETCH,
    STARTS_EARLY,
    ScaledMmTile,
    most_shared_tokens,
    why_not_for,
)
from taut_kernels.launch import early_start
from taut_kernels.launch.tile_tables import BucketReader, Buckets, Row, Table, of_card

_FIGURES = {"M", "us", "vllm_us", "rival_us"}
_LAYER_FIELDS = {"prefetch", "M", "us", "vllm_us"}
SERVED = ("ring", "few", "hopper", "turns", PAIRS, BLOCKS)
"""Kernels that calls in vLLM may take: right on a card through the launcher that layers call,
within CUDA graphs, too. A new one is left out until then."""
_JUDGED_APART = ("fp8_block",)
"""Ops whose figures beside vLLM's kernels are none of the tuner's, on any card."""
_CUT = 128
"""Tokens of a part of a wide bucket."""
_LEAST_CUT, _MOST_CUT = 1024, 4096
"""Least limit of a bucket that is cut, and most tokens one without a limit is cut for."""
_FIRST_CUT = 512
"""Least limit of a part that gets another tile."""
_CLEARLY = 0.88
"""What another tile may take of the measured one's time; the estimate errs by less."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tile for up to ``max_m`` tokens (None: any number) and whether `prefer` takes it.

    ``measured`` are the numbers of tokens that chose it.
    """

    max_m: int | None
    tile: ScaledMmTile
    wins: bool
    measured: tuple[int, ...] = ()


Products = Table[tuple[str, int, int], Buckets[tuple[Bucket, Bucket]]]
"""One card's, by op, N and K: behind anybody's kernels, and between ours that start early."""


def _is_faster(figures: Row) -> bool:
    times = zip(figures["us"], figures["vllm_us"], strict=True)
    return all(ours <= theirs for ours, theirs in times)


def _bucket(max_m: int | None, tile: ScaledMmTile, figures: Row) -> Bucket:
    wins = _is_faster(figures) and tile.kernel in SERVED
    return Bucket(max_m, tile, wins, tuple(figures["M"]))


def early_in_layer(tile: ScaledMmTile, op: str, N: int, K: int, max_m: int | None) -> ScaledMmTile:
    """Return what becomes of a tile between kernels that start early, where nobody timed it there.

    As for Llama-3-8B's four products: early up to 64 tokens, but where few tokens meet more
    programs of a ring than multiprocessors (H200), or up to 32 long K in ``pairs`` (H100).

    Args:
        tile: as timed alone.
        op: one of :data:`.tile.OPS`.
        N: output features.
        K: input features.
        max_m: most tokens of its bucket.
    """
    if op == "fp8_block" or tile.kernel not in STARTS_EARLY or tile.block_k % 128:
        return tile
    if max_m is None or max_m > early_start.EARLY_TOKENS:
        return tile
    many = -(-N // tile.block_n) * tile.split_k > MULTIPROCESSORS
    of_ring, of_pairs = max_m <= 16 and many, max_m <= 32 and K >= LONG_K
    late = of_pairs if tile.kernel == PAIRS else of_ring
    return tile if late else replace(tile, early=True, prefetch=PREFETCH)


def _bucket_in_layer(row: Row, tile: ScaledMmTile) -> Bucket:
    if "layer" not in row:
        early = early_in_layer(tile, row["op"], row["N"], row["K"], row["max_m"])
        return _bucket(row["max_m"], early, row)
    layer = row["layer"]
    lengths = {len(layer.get(key, ())) for key in ("M", "us", "vllm_us")}
    if set(layer) != _LAYER_FIELDS or len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"layer needs {sorted(_LAYER_FIELDS)}, of one length, at least 1")
    if layer["prefetch"] is not None:
        tile = replace(tile, early=True, prefetch=layer["prefetch"])
    return _bucket(row["max_m"], tile, layer)


def as_fields(tile: ScaledMmTile) -> dict[str, Any]:
    """Return a row's ``kernel`` and ``tile``."""
    fields = asdict(tile)
    return {"kernel": fields.pop("kernel"), "tile": fields}


def _entry(row: Row) -> tuple[tuple[str, int, int], tuple[Bucket, Bucket]]:
    if row["op"] not in OPS:
        raise ValueError(f"op must be one of {OPS}")
    if not row["M"] or len({len(row[key]) for key in _FIGURES}) > 1:
        raise ValueError("M and the figures must be of one length, at least 1")
    tile = ScaledMmTile(kernel=row["kernel"], **row["tile"])
    most = most_shared_tokens(tile)
    if tile.split_k > 1 and (row["max_m"] is None or row["max_m"] > most):
        raise ValueError(f"split_k needs max_m ≤ {most}, got {tile} at {row['max_m']}")
    if reason := why_not_for(tile, row["op"], row["N"]):
        raise ValueError(reason)
    found = _bucket(row["max_m"], tile, row), _bucket_in_layer(row, tile)
    return (row["op"], row["N"], row["K"]), found


_READER = BucketReader(
    name="scaled_mm",
    fields=frozenset({"op", "N", "K", "max_m", "kernel", "tile"} | _FIGURES),
    optional=frozenset({"layer"}),
    entry=_entry,
)
parse, tables = _READER.parse, cache(_READER.tables)


def _between(op: str, N: int, K: int, found: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """Cut wide buckets of tiles fed by TMA where another tile's waves fit better.

    A bucket's tile won at one or two numbers of tokens; between them its waves may be half empty.
    The numbers measured keep it.
    """
    cut: list[Bucket] = []
    first = 1
    for bucket in found:
        last = bucket.max_m or _MOST_CUT
        limits: tuple[int | None, ...] = (bucket.max_m,)
        if bucket.tile.kernel in ("hopper", "turns") and last >= _LEAST_CUT:
            limits = (*range(-(-first // _CUT) * _CUT, last, _CUT), *limits)
        for limit in limits:
            tile = bucket.tile if limit is None else _better(op, N, K, limit, bucket)
            part = replace(bucket, max_m=limit, tile=tile)
            if limit != limits[0] and replace(cut[-1], max_m=limit) == part:
                cut.pop()
            cut.append(part)
        first = last + 1
    return tuple(cut)


def _better(op: str, N: int, K: int, limit: int, bucket: Bucket) -> ScaledMmTile:
    """Return the tile for the last :data:`_CUT` tokens up to a limit of a bucket."""
    if limit < _FIRST_CUT or any(limit - _CUT < M <= limit for M in bucket.measured):
        return bucket.tile
    other = rule_of_waves(op, N, K, limit)
    clearly = promised_us(other, N, K, limit) < _CLEARLY * promised_us(bucket.tile, N, K, limit)
    return other if clearly else bucket.tile


@cache
def buckets(
    op: str, gpu: str | None, N: int, K: int, *, in_layer: bool = False
) -> tuple[Bucket, ...]:
    """Return the buckets of one product on one card; those of the rule where none is measured.

    Args:
        op: one of :data:`.tile.OPS`.
        gpu: card name, None outside CUDA.
        N: output features.
        K: input features.
        in_layer: between kernels of ours that start early.
    """
    table = of_card(tables(), gpu)
    if measured := _measured(table, op, gpu, N, K, in_layer=in_layer):
        return _between(op, N, K, measured)
    # A card that runs them has them in its table.
    tma = table is not None and any(
        alone.tile.kernel != "ring" for some in table.choices.values() for _, (alone, _) in some
    )
    bounded = TMA_TOKENS if tma else RULE_TOKENS
    return tuple(
        Bucket(limit, rule(op, N, K, limit or 2 * bounded[-1], tma=tma), wins=False)
        for limit in (*bounded, None)
    )


def tokens_of_buckets(op: str, gpu: str | None, N: int, K: int) -> tuple[int, ...]:
    """Return one number of tokens for each bucket, for compiling every tile before serving starts.

    Args:
        op: one of :data:`.tile.OPS`.
        gpu: card name, None outside CUDA.
        N: output features.
        K: input features.
    """
    sizes: list[int] = []
    for bucket in buckets(op, gpu, N, K):
        previous = sizes[-1] if sizes else 0
        sizes.append(previous + 1 if bucket.max_m is None else bucket.max_m)
    return tuple(sizes)


def _measured(
    table: Products | None, op: str, gpu: str | None, N: int, K: int, *, in_layer: bool
) -> tuple[Bucket, ...]:
    """Return a product's measured buckets.

    Those of another card's table, and of an op that has verdicts of its own, have this card's
    verdicts from :mod:`.verdict`.
    """
    if table is None or (op, N, K) not in table.choices:
        return ()
    found = tuple(pair[in_layer] for _, pair in table.choices[op, N, K])
    if gpu is None or (table.gpu == gpu and op not in _JUDGED_APART):
        return found
    firsts = (1, *(bucket.max_m + 1 for bucket in found if bucket.max_m is not None))
    return tuple(
        replace(
            bucket,
            wins=bucket.tile.kernel in SERVED
            and measured_scaled_mm.wins(gpu, op, N, K, first, bucket.max_m, in_layer=in_layer),
        )
        for first, bucket in zip(firsts, found, strict=True)
    )


def lookup(op: str, gpu: str | None, N: int, K: int, M: int, *, in_layer: bool = False) -> Bucket:
    """Choose the bucket of one call: the first that holds ``M`` tokens."""
    limits, found = _by_limit(op, gpu, N, K, in_layer=in_layer)
    return found[bisect_left(limits, M)]


@cache
def _by_limit(
    op: str, gpu: str | None, N: int, K: int, *, in_layer: bool
) -> tuple[tuple[int, ...], tuple[Bucket, ...]]:
    """Return a product's buckets behind their limits; the last has none."""
    found = buckets(op, gpu, N, K, in_layer=in_layer)
    return tuple(bucket.max_m for bucket in found if bucket.max_m is not None), found


def why_not_preferred(
    op: str, gpu: str | None, N: int, K: int, *, in_layer: bool = False
) -> str | None:
    """Say at which numbers of tokens the plugin leaves a layer to vLLM.

    Args:
        op: one of :data:`.tile.OPS`.
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        in_layer: between kernels of ours that start early.

    Returns:
        A reason, or None where ours is the faster kernel for every number of tokens.
    """
    table = of_card(tables(), gpu)
    if table is None:
        return f"not measured on {gpu}"
    own = table.gpu == gpu and op not in _JUDGED_APART
    judged = own or (op, N, K) in measured_scaled_mm.products(gpu)
    if (op, N, K) not in table.choices or not judged:
        return f"{N}×{K} not measured on {gpu}"
    losing: list[list[int | None]] = []
    previous: int | None = 0
    measured = _measured(table, op, gpu, N, K, in_layer=in_layer)
    tried = all(bucket.tile.kernel in SERVED for bucket in measured)
    for bucket in measured:
        if not bucket.wins and losing and losing[-1][1] == previous:
            losing[-1][1] = bucket.max_m
        elif not bucket.wins:
            losing.append([(previous or 0) + 1, bucket.max_m])
        previous = bucket.max_m
    ranges = ", ".join(f"{first}–{'' if last is None else last}" for first, last in losing)
    why = "slower than vLLM's" if tried else "slower than vLLM's, or not tried in it,"
    if tried and not own:
        why = "not measured to be as fast as vLLM's"
    return f"{why} at {ranges} tokens" if losing else None
