"""Times one product on our kernel's candidates and on vLLM's kernels, in one process and in turn.

Every kernel is held to the layer's error budget first: what is wrong is a note and is not timed.
Weights rotate through three times the card's L2, in one CUDA graph a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import decode_tile, dispatch, lookup, weight_format
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.plan import Call, Weight
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line
from taut_kernels.tuner.w4a16_candidates import Product, Tried
from taut_kernels.tuner.w4a16_layer import Layer
from taut_kernels.tuner.w4a16_stock import Prepare, Prepared, UnavailableError

OURS = "taut"
TOKENS = (1, 16, 64, 256, 1024)
"""Of decode and of prefill; ends of the tables' buckets."""
GAIN = 1.02
"""What runs now ÷ another tile: two runs of one tile differ by about as much."""
_LARGE_TOKENS = 1024
_L2_ROUNDS = 3


class Clock(Protocol):
    """Times calls."""

    def __call__(self, subjects: Sequence[timing.Subject], M: int) -> list[float]:
        """Return µs a call of each subject.

        Args:
            subjects: what to time, in turn.
            M: tokens of a call.
        """


def graph_clock(subjects: Sequence[timing.Subject], M: int) -> list[float]:
    """Return the medians of replayed CUDA graphs: the :class:`Clock` of a card."""
    replays, calls = (8, 8) if M >= _LARGE_TOKENS else (12, 32)
    return [found.median for found in timing.measure(subjects, replays, calls)]


@dataclass(slots=True)
class Figures:
    """What was measured of a product.

    Attributes:
        product: the layer's shard.
        us: kernel → tokens → µs a call; ours is the fastest candidate's.
        tiles: tokens → the candidate to take and its µs, where that is another than what runs now.
        notes: what did not run, or ran wrongly.
    """

    product: Product
    us: dict[str, dict[int, float]] = field(default_factory=dict)
    tiles: dict[int, tuple[Tried, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any] | None:
        """Return the row of a table of :mod:`taut_kernels.gemm.w4a16.verdict`.

        Returns:
            None where ours and one of vLLM's were not both timed at any number of tokens.
        """
        theirs = [times for kernel, times in self.us.items() if kernel != OURS]
        tokens = [M for M in self.us.get(OURS, {}) if any(M in times for times in theirs)]
        if not tokens:
            return None
        best = [min(times[M] for times in theirs if M in times) for M in tokens]
        named = {"N": self.product.N, "K": self.product.K}
        return (
            named
            | weight_format.as_field(self.product.weights)
            | {
                "M": tokens,
                "us": [round(self.us[OURS][M], 2) for M in tokens],
                "vllm_us": [round(us, 2) for us in best],
            }
        )

    def tile_rows(self, most: int) -> list[dict[str, Any]]:
        """Return rows of a table of tiles.

        Args:
            most: 8 for those of :mod:`taut_kernels.gemm.w4a16.decode_tile`, 0 for those of
                :mod:`taut_kernels.gemm.w4a16.lookup`.
        """
        rows = []
        for M, (tile, us) in self.tiles.items():
            if (M <= decode_tile.TOKENS) != bool(most):
                continue
            bucket = M if M in lookup.BUCKETS else None
            named = {"N": self.product.N, "K": self.product.K, "max_m": most or bucket}
            if isinstance(tile, DecodeTile):
                cut: dict[str, Any] = {"tile": dataclasses.asdict(tile)}
            else:
                cut = lookup.as_fields(tile)
            spent: Any = [round(us, 3)] if most else round(us, 3)
            rows.append(named | weight_format.as_field(self.product.weights) | cut | {"us": spent})
        return rows


def measure(
    layer: Layer,
    product: Product,
    tried: Mapping[int, Sequence[Tried]],
    stock: Mapping[str, Prepare],
    clock: Clock,
) -> Figures:
    """Time a product.

    Args:
        layer: of the product, with as many rows of activations as there are tokens.
        product: what it is.
        tried: tokens → candidates of ours, what runs now first.
        stock: name → how to prepare a kernel of vLLM's.
        clock: times calls.
    """
    figures = Figures(product)
    copies = _copies(layer)
    weights = layer.packed(copies)
    ready = _prepared(layer, stock, copies, max(tried), figures.notes)
    for M, own in tried.items():
        subjects = [_subject(layer, M, one, weights) for one in own]
        subjects += [_stock_subject(layer, M, name, calls) for name, calls in ready.items()]
        right = [subject for subject in subjects if _is_right(layer, subject, M, figures.notes)]
        times = dict(zip((s.name for s in right), clock(right, M), strict=True))
        for name in ready:
            if name in times:
                figures.us.setdefault(name, {})[M] = times[name]
        _take_ours(figures, M, own, times)
    return figures


def _take_ours(figures: Figures, M: int, own: Sequence[Tried], times: Mapping[str, float]) -> None:
    """Note the fastest candidate, unless what runs now is about as fast."""
    found = {one: times[_name(one)] for one in own if _name(one) in times}
    if not found:
        return
    best = min(found, key=lambda one: found[one])
    now = found.get(own[0])
    if now is not None and now < GAIN * found[best]:
        best = own[0]
    figures.us.setdefault(OURS, {})[M] = found[best]
    if best != own[0]:
        figures.tiles[M] = best, found[best]


def _name(one: Tried) -> str:
    return f"{OURS} {one!r}"


def _copies(layer: Layer) -> int:
    if not layer.x.is_cuda:
        return 2
    cache = torch.cuda.get_device_properties(layer.x.device).L2_cache_size
    return max(2, -(-_L2_ROUNDS * cache // layer.weight_bytes()))


def _prepared(
    layer: Layer, stock: Mapping[str, Prepare], copies: int, largest: int, notes: list[str]
) -> dict[str, list[Prepared]]:
    """Prepare vLLM's kernels; one that cannot run, or errs, leaves a note."""
    ready = {}
    for name, prepare in stock.items():
        try:
            first = prepare(layer)
            reason = layer.why_wrong(first(layer.x[:largest]))
        except UnavailableError as error:
            notes.append(f"{name}: {first_line(error)}")
            continue
        except REFUSED as error:
            notes.append(f"{name}: not run: {first_line(error)}")
            continue
        if reason:
            notes.append(f"{name}: WRONG, not timed: {reason}")
            continue
        ready[name] = [first, *(first.copy() for _ in range(copies - 1))]
    return ready


def _subject(layer: Layer, M: int, one: Tried, weights: Sequence[Weight]) -> timing.Subject:
    x, has_zeros = layer.x[:M], layer.weight_zero_point is not None
    shape = (M, layer.N, layer.K)
    call_of = Call(*shape, layer.group_size, x.dtype, x.device, has_zeros, has_bias=False)
    cut = dispatch.tile_of(one, call_of) if isinstance(one, str) else one

    def call(i: int) -> Tensor:
        return dispatch.launch(cut, x, *weights[i], layer.group_size)

    return timing.Subject(_name(one), call, len(weights))


def _stock_subject(layer: Layer, M: int, name: str, calls: Sequence[Prepared]) -> timing.Subject:
    x = layer.x[:M]
    return timing.Subject(name, lambda i: calls[i](x), len(calls))


def _is_right(layer: Layer, subject: timing.Subject, M: int, notes: list[str]) -> bool:
    try:
        y = subject.call(0)
    except REFUSED as error:
        notes.append(f"{subject.name} at {M}: not run: {first_line(error)}")
        return False
    assert isinstance(y, Tensor)
    if reason := layer.why_wrong(y):
        notes.append(f"{subject.name} at {M}: WRONG, not timed: {reason}")
        return False
    return True
