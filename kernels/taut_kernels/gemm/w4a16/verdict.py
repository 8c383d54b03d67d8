"""Whether the W4A16 kernel is the faster one on a shape: measured against vLLM's, card by card.

A layer is repacked once for one kernel, so it is ours at every number of tokens or at none. A table
is ``tiles/w4a16_measured-<card>.json``::

    {"gpu": "<torch.cuda.get_device_name>", "source": "<command, date, versions>",
     "rows": [{"N": …, "K": …, "M": [tokens, …], "us": [µs per call, …],
               "vllm_us": [µs of the better of Marlin and Machete, …]}, …]}

The rule: ratio = vLLM's time ÷ ours at each M, larger is better. ``decode`` is the geometric mean
of the ratios up to :data:`DECODE_TOKENS` tokens, ``prefill`` that of the others. Ours is preferred
where decode ≥ 1 and √(decode · prefill) ≥ 1: a worker spends its steps in decode, and no gain there
may be bought with as large a loss in prefill. Each half counts once, however many M it was measured
at. A shape nobody measured is preferred where both would hold by its neighbours' word less the most
that is known to be off (:mod:`.neighbours`); on a card nobody measured none is.

A row is of bf16, and of symmetric groups of 128 unless it has a ``format``
(:mod:`.weight_format`); the row of a layer's own format decides where there is one. Without one,
groups of 64 and of a channel, zero points with groups of 128 and fp16 are taken to stand as the
shape does in symmetric groups of 128, and :func:`remark` says so of such a layer. Groups of 32 are
not: in them the same tiles fell to 0.53 of Marlin's speed (H200, 2026-11-25). They stand or fall by
a row of groups of 32, with zero points or without. `tuning.measured_table` writes a
table from benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from taut_kernels.gemm.w4a16 import neighbours, weight_format
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.launch import tile_tables

_ROW_FIELDS = {"N", "K", "M", "us", "vllm_us"}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ALONE = 32
"""Groups that no row of other groups stands for."""
DECODE_TOKENS = 64
"""Most tokens of what counts as decode; above, a call is mostly prefill."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One shape's measurements.

    Args:
        ratios: tokens → vLLM's time ÷ ours.

    Raises:
        ValueError: no figure on one side of :data:`DECODE_TOKENS`, or one that is not positive.
    """

    ratios: dict[int, float]

    def __post_init__(self) -> None:
        if not all(ratio > 0 for ratio in self.ratios.values()):
            raise ValueError("times must be positive")
        if {M <= DECODE_TOKENS for M in self.ratios} != {True, False}:
            raise ValueError(f"needs an M of at most {DECODE_TOKENS} and one above")

    @property
    def decode(self) -> float:
        """Geometric mean of the ratios up to :data:`DECODE_TOKENS` tokens."""
        return _geomean([ratio for M, ratio in self.ratios.items() if M <= DECODE_TOKENS])

    @property
    def overall(self) -> float:
        """Geometric mean of decode's and prefill's geometric means."""
        prefill = _geomean([ratio for M, ratio in self.ratios.items() if M > DECODE_TOKENS])
        return math.sqrt(self.decode * prefill)

    @property
    def wins(self) -> bool:
        """Whether ours is preferred."""
        return self.decode >= 1 and self.overall >= 1


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """The measured shapes of one card, by (N, K, format)."""

    gpu: str
    shapes: dict[tuple[int, int, WeightFormat], Measured]

    def standing(self, N: int, K: int, weights: WeightFormat) -> WeightFormat | None:
        """Return the format whose row a layer stands by, None where there is none.

        Args:
            N: output features of the layer's shard.
            K: input features of the layer's shard.
            weights: its format.
        """
        alone = weights.group_size == _ALONE
        others = [near for near in weights.tried if near is not DEFAULT] if alone else [DEFAULT]
        found = (near for near in (weights, *others) if (N, K, near) in self.shapes)
        return next(found, None)


def _geomean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def _parse_row(row: dict[str, Any]) -> Measured:
    fields = set(row) - {weight_format.FIELD}
    if fields != _ROW_FIELDS or len({len(row[key]) for key in ("M", "us", "vllm_us")}) > 1:
        raise ValueError(f"a row needs exactly {sorted(_ROW_FIELDS)}, the last three of one length")
    if len(set(row["M"])) != len(row["M"]):
        raise ValueError("an M is there twice")
    times = zip(row["M"], row["us"], row["vllm_us"], strict=True)
    return Measured({M: theirs / ours for M, ours, theirs in times})


def parse(text: str, where: str) -> MeasuredTable:
    """Read a table.

    Args:
        text: JSON in the form of the module's docstring.
        where: file name, for errors.

    Returns:
        The table.

    Raises:
        ValueError: an unknown key, figures that cannot be judged, or a shape named twice; names
            ``where`` and the shape.
    """
    gpu, listed = tile_tables.rows_of(text, where)
    found: dict[tuple[int, int, WeightFormat], Measured] = {}
    for row in listed:
        place = f"{where}: N={row.get('N')} K={row.get('K')}"
        weights = weight_format.of_row(row, place)
        try:
            measured = _parse_row(row)
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{place}: {error}") from error
        key = (row["N"], row["K"], weights)
        if key in found:
            raise ValueError(f"{place} is there twice in {weights}")
        found[key] = measured
    return MeasuredTable(gpu, found)


TABLE = "w4a16_measured"


@cache
def tables() -> dict[str, MeasuredTable]:
    """Load every card's table, once a process; this machine's rows come first."""

    def merged(shipped: MeasuredTable, own: MeasuredTable) -> MeasuredTable:
        # Verdicts are lent to no twin.
        shapes = shipped.shapes if shipped.gpu == own.gpu else {}
        return MeasuredTable(own.gpu, {**shapes, **own.shapes})

    shipped = tile_tables.load_all(TABLE, parse)
    return tile_tables.with_measured_here(shipped, TABLE, parse, merged)


@cache
def _bound(gpu: str, weights: WeightFormat) -> neighbours.Bound | None:
    """Return what is known of a card's unmeasured shapes in a format that has rows."""
    table = tables()[gpu]
    ratios = {
        (N, K): (measured.decode, measured.overall)
        for (N, K, of), measured in table.shapes.items()
        if of is weights
    }
    return neighbours.bound(ratios)


def expected(gpu: str, N: int, K: int, weights: WeightFormat) -> tuple[float, float] | None:
    """Return the least ratios that a layer nobody measured is to be expected at.

    Args:
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        weights: its format; groups of 32 go by rows of groups of 32.

    Returns:
        Of decode and over all; None where there is no bound.
    """
    if gpu not in tables():
        return None
    bound = _bound(gpu, weights if weights.group_size == _ALONE else DEFAULT)
    return None if bound is None else bound.least(N, K)


def is_measured(gpu: str, N: int, K: int, weights: WeightFormat) -> bool:
    """Say whether a layer has a verdict: its own, or that of the format it stands by.

    Args:
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        weights: its format.
    """
    table = tables().get(gpu)
    return table is not None and table.standing(N, K, weights) is not None


def why_not_preferred(gpu: str, N: int, K: int, weights: WeightFormat = DEFAULT) -> str | None:
    """Say why a layer of this shape and format stays with vLLM.

    Args:
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        weights: its format.

    Returns:
        A reason, or None where ours won by the module's rule, or is to be expected to.
    """
    table = tables().get(gpu)
    if table is None:
        return f"not measured against vLLM's kernels on {gpu}"
    standing = table.standing(N, K, weights)
    if standing is None:
        least = expected(gpu, N, K, weights)
        if least is not None and min(least) >= 1:
            return None
        groups = f" in groups of {_ALONE}" if weights.group_size == _ALONE else ""
        return f"{N}×{K}{groups} not measured against vLLM's kernels on {gpu}"
    measured = table.shapes[N, K, standing]
    if measured.wins:
        return None
    return (
        f"slower than vLLM's kernels: {measured.decode:.2f} of their speed up to {DECODE_TOKENS} "
        f"tokens, {measured.overall:.2f} over all"
    )


def slower_in_places(
    gpu: str | None, N: int, K: int, weights: WeightFormat = DEFAULT
) -> str | None:
    """Say at which numbers of tokens ours was measured slower on a layer it serves all the same.

    Args:
        gpu: card name, None outside CUDA.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        weights: its format.

    Returns:
        For example ``slower than vLLM's at 32, 256 tokens (0.89 to 0.96 of its speed)``; None where
        it never was, or nobody measured.
    """
    table = tables().get(gpu or "")
    standing = table.standing(N, K, weights) if table else None
    if table is None or standing is None:
        return None
    slow = {M: ratio for M, ratio in table.shapes[N, K, standing].ratios.items() if ratio < 1}
    if not slow:
        return None
    tokens = ", ".join(str(M) for M in sorted(slow))
    least, most = f"{min(slow.values()):.2f}", f"{max(slow.values()):.2f}"
    speed = least if least == most else f"{least} to {most}"
    return f"slower than vLLM's at {tokens} tokens ({speed} of its speed)"


def remark(
    gpu: str | None, N: int, K: int, group_size: int, dtype: torch.dtype, *, has_zeros: bool
) -> str | None:
    """Say what is known, or not known, against our kernel on a layer it serves.

    Args:
        gpu: card name, None outside CUDA.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        group_size: G; -1, 0 or K for one group a channel.
        dtype: of the activations.
        has_zeros: with zero points.

    Returns:
        What :func:`slower_in_places` says, and whether the layer's format is another than the one
        that was timed; None where nothing is to be said, or no such card or shape was measured.
    """
    table = tables().get(gpu or "")
    weights = weight_format.of_layer(group_size, K, has_zeros=has_zeros)
    if table is None:
        return None
    least = expected(gpu or "", N, K, weights)
    if table.standing(N, K, weights) is None and least is not None and min(least) >= 1:
        return f"not measured; by shapes near it at least {least[0]:.2f} of vLLM's speed in decode"
    # Groups of 32 without a row run where they are asked for.
    timed = table.standing(N, K, weights) or table.standing(N, K, DEFAULT)
    if timed is None:
        return None
    parts = [slower_in_places(gpu, N, K, weights)]
    size = -1 if group_size in (0, K) else group_size
    if (size, dtype, has_zeros) != (timed.group_size, torch.bfloat16, timed.zero_points):
        known = weight_format.in_words(timed.group_size, zero_points=timed.zero_points)
        own = weight_format.in_words(size, zero_points=has_zeros)
        parts.append(f"timed in {known} in bf16, not in {own} in {_SHORT[dtype]}")
    return "; ".join(filter(None, parts)) or None
