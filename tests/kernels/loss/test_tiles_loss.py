"""Tile tables of the loss kernels: reading, the rule, and what is compiled ahead of time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taut_bench.instruments.forms import loss as loss_forms
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.loss.tiles import LossTile, RingTile

ROW = {
    "op": "cross_entropy",
    "V": 32000,
    "tile": {"block": 2048, "num_warps": 8, "stages": 2},
    "us": 1.0,
}

RING_ROW = {
    "op": "cross_entropy_ring",
    "V": 32000,
    "tile": {"parts": 1, "units": 1, "num_warps": 16, "slots": 28, "lag": 0, "per_sm": 1},
    "us": 1.0,
}


def text(*rows: dict[str, Any]) -> str:
    return json.dumps({"gpu": "card", "source": "a test", "rows": rows})


def test_measured_tile_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tiles_loss.parse(text(ROW), "loss-card.json")
    monkeypatch.setattr(tiles_loss, "tables", lambda: {"card": table})
    tiles_loss.lookup.cache_clear()
    try:
        assert tiles_loss.lookup("card", "cross_entropy", 32000) == LossTile(2048, 8, 2)
        rule = tiles_loss.rule("cross_entropy", 32000)
        assert tiles_loss.lookup("other", "cross_entropy", 32000) == rule
        assert tiles_loss.lookup(None, "cross_entropy", 32000) == rule
        assert tiles_loss.lookup("card", "divergence", 32000) == tiles_loss.rule(
            "divergence", 32000
        )
    finally:
        tiles_loss.lookup.cache_clear()


def test_ring_and_blocks_of_a_vocabulary_stand_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = tiles_loss.parse(text(ROW, RING_ROW), "loss-card.json")
    monkeypatch.setattr(tiles_loss, "tables", lambda: {"card": table})
    tiles_loss.lookup.cache_clear()
    tiles_loss.ring.cache_clear()
    try:
        assert tiles_loss.ring("card", 32000) == RingTile(1, 1, 16, 28, 0, 1)
        assert tiles_loss.lookup("card", "cross_entropy", 32000) == LossTile(2048, 8, 2)
    finally:
        tiles_loss.lookup.cache_clear()
        tiles_loss.ring.cache_clear()


def test_ring_rule_holds_every_row_it_takes() -> None:
    parts = []
    for V in (16384, 32000, 50304, 128256, 151936, 256000, 262144):
        tile = tiles_loss.ring_rule(V)
        assert tile is not None
        # A row and what is on its way fit; 40 KB on the way cover the latency of memory.
        assert tile.ahead(V) * tile.chunk_bytes * tile.per_sm >= 40 * 1024
        assert tile.parts * tile.chunks(V) * tile.chunk_bytes >= 2 * V
        parts.append(tile.parts)
    assert parts == sorted(parts)
    assert tiles_loss.ring_rule(10**7) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW | {"M": 1}], "a row needs exactly"),
        ([ROW | {"op": "softmax"}], "op must be one of"),
        ([ROW, ROW], "op=cross_entropy V=32000 is there twice"),
        ([RING_ROW, RING_ROW], "op=cross_entropy_ring V=32000 is there twice"),
        ([RING_ROW | {"tile": RING_ROW["tile"] | {"parts": 3}}], "parts must be one of"),  # type: ignore[operator]
        ([ROW | {"tile": {"block": 3, "num_warps": 8, "stages": 2}}], "block must be a power"),
        ([ROW | {"tile": {"block": 4, "num_warps": 3, "stages": 2}}], "num_warps must be"),
        ([ROW | {"tile": {"block": 4, "num_warps": 4, "stages": 0}}], "stages must lie in 1..8"),
    ],
)
def test_refuses_a_wrong_table(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiles_loss.parse(text(*rows), "loss-card.json")


def test_rule_covers_every_vocabulary() -> None:
    for op in tiles_loss.OPS:
        for V in (1, 2, 31, 1000, 4096, 4097, 32000, 50257, 128256, 262144, 10**6):
            tile = tiles_loss.rule(op, V)
            assert tile.block >= min(V, 4096)


def test_variants_cover_every_form() -> None:
    found = list(loss_forms.kernel_variants())
    assert len(found) == len({(v.label, v.tile, v.target) for v in found})
    labels = " ".join(v.label for v in found)
    for form in (
        "cross_entropy loss and gradient bf16 V=256000",
        "cross_entropy gradient fp16",
        "divergence jsd and gradient",
        "divergence forward_kl V=",
        "block_statistics+",
        "block_gradient bf16",
        "scale bf16",
        "cross_entropy_ring bf16 V=256000",
        "cross_entropy_ring batched",
        "softmax_ring bf16 V=131072",
        "row_weights",
    ):
        assert form in labels
