"""Whether the W4A16 kernel is the faster one on a shape: measured against vLLM's, card by card.

A layer is repacked once for one kernel, so it is ours at every number of tokens or at none. A row
of the table ``w4a16_measured`` (:mod:`taut_kernels.launch.tile_tables`) is of one N, K and format:
``M`` are numbers of tokens, ``us`` the times of ours, ``vllm_us`` those of vLLM's fastest.

The rule: ratio = vLLM's time ÷ ours at each M, larger is better. ``decode`` is the geometric mean
of the ratios up to :data:`DECODE_TOKENS` tokens, ``prefill`` that of the others. Ours is preferred
where decode ≥ 1 and √(decode · prefill) ≥ 1: a worker spends its steps in decode, and no gain there
may be bought with as large a loss in prefill. Each half counts once, however many M it was measured
at. A shape nobody measured is preferred where both would hold by a cautious estimate from its
nearest measured ones (:mod:`.neighbours`); on a card nobody measured none is.

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

import torch

from taut_kernels.gemm.w4a16 import neighbours, weight_format
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.launch.tile_tables import Reader, Row, Table

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


Shapes = Table[tuple[int, int, WeightFormat], Measured]
"""One card's, by N, K and format."""


def _standing(table: Shapes, N: int, K: int, weights: WeightFormat) -> WeightFormat | None:
    """Return the format whose row a layer stands by, None where there is none."""
    alone = weights.group_size == _ALONE
    others = [near for near in weights.tried if near is not DEFAULT] if alone else [DEFAULT]
    found = (near for near in (weights, *others) if (N, K, near) in table.choices)
    return next(found, None)


def _geomean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def _entry(row: Row) -> tuple[tuple[int, int, WeightFormat], Measured]:
    if len({len(row[key]) for key in ("M", "us", "vllm_us")}) > 1:
        raise ValueError("M, us and vllm_us must be of one length")
    if len(set(row["M"])) != len(row["M"]):
        raise ValueError("an M is there twice")
    times = zip(row["M"], row["us"], row["vllm_us"], strict=True)
    measured = Measured({M: theirs / ours for M, ours, theirs in times})
    return (row["N"], row["K"], weight_format.of_row(row)), measured


TABLE = "w4a16_measured"
_READER = Reader(
    name=TABLE,
    fields=frozenset({"N", "K", "M", "us", "vllm_us"}),
    optional=frozenset({weight_format.FIELD}),
    entry=_entry,
    measured_here=True,
    lent=False,
)
parse, tables = _READER.parse, cache(_READER.tables)


@cache
def _estimates(gpu: str, weights: WeightFormat) -> neighbours.Estimates | None:
    """Return what a card's measured shapes tell of others, in a format that has rows."""
    table = tables()[gpu]
    ratios = {
        (N, K): (measured.decode, measured.overall)
        for (N, K, of), measured in table.choices.items()
        if of is weights
    }
    return neighbours.estimates(ratios)


def expected(gpu: str, N: int, K: int, weights: WeightFormat) -> tuple[float, float] | None:
    """Return a cautious estimate of the ratios of a layer nobody measured.

    Args:
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        weights: its format; groups of 32 go by rows of groups of 32.

    Returns:
        Of decode and over all; None where there is none.
    """
    if gpu not in tables():
        return None
    known = _estimates(gpu, weights if weights.group_size == _ALONE else DEFAULT)
    return None if known is None else known.of(N, K)


def is_measured(gpu: str, N: int, K: int, weights: WeightFormat) -> bool:
    """Say whether a layer has a verdict: its own, or that of the format it stands by.

    Args:
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        weights: its format.
    """
    table = tables().get(gpu)
    return table is not None and _standing(table, N, K, weights) is not None


def why_not_preferred(gpu: str, N: int, K: int, weights: WeightFormat = DEFAULT) -> str | None:
    """Say why a layer of this shape and format stays with vLLM.

    Args:
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        weights: its format.

    Returns:
        A reason, or None where ours won by the module's rule, or is estimated to.
    """
    table = tables().get(gpu)
    if table is None:
        return f"not measured against vLLM's kernels on {gpu}"
    standing = _standing(table, N, K, weights)
    if standing is None:
        estimate = expected(gpu, N, K, weights)
        if estimate is not None and min(estimate) >= 1:
            return None
        groups = f" in groups of {_ALONE}" if weights.group_size == _ALONE else ""
        return f"{N}×{K}{groups} not measured against vLLM's kernels on {gpu}"
    measured = table.choices[N, K, standing]
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
    standing = _standing(table, N, K, weights) if table else None
    if table is None or standing is None:
        return None
    slow = {M: ratio for M, ratio in table.choices[N, K, standing].ratios.items() if ratio < 1}
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
    estimate = expected(gpu or "", N, K, weights)
    if _standing(table, N, K, weights) is None and estimate is not None and min(estimate) >= 1:
        return _estimated(estimate[0])
    # Groups of 32 without a row run where they are asked for.
    timed = _standing(table, N, K, weights) or _standing(table, N, K, DEFAULT)
    if timed is None:
        return None
    parts = [slower_in_places(gpu, N, K, weights)]
    size = -1 if group_size in (0, K) else group_size
    if (size, dtype, has_zeros) != (timed.group_size, torch.bfloat16, timed.zero_points):
        known = weight_format.in_words(timed.group_size, zero_points=timed.zero_points)
        own = weight_format.in_words(size, zero_points=has_zeros)
        parts.append(f"timed in {known} in bf16, not in {own} in {_SHORT[dtype]}")
    return "; ".join(filter(None, parts)) or None


def _estimated(decode: float) -> str:
    """Say an estimate, and how often such estimates were too high."""
    share, factor = neighbours.TOO_HIGH
    return (
        f"not measured; estimated from the nearest measured shapes: {decode:.2f} of vLLM's speed "
        f"in decode (held out on an H100 and an H200, fewer than {share} of 100 were too high, "
        f"by less than {100 * (factor - 1):.0f} %)"
    )
