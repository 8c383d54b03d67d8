"""Tile tables of the loss kernels: reading, the rule, and what is compiled ahead of time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taut_kernels import tiles_loss
from taut_kernels.loss import variants
from taut_kernels.tiles_loss import LossTile

ROW = {
    "op": "cross_entropy",
    "V": 32000,
    "tile": {"block": 2048, "num_warps": 8, "stages": 2},
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


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW | {"M": 1}], "a row needs exactly"),
        ([ROW | {"op": "softmax"}], "a row needs exactly"),
        ([ROW, ROW], "cross_entropy V=32000 is there twice"),
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
    found = list(variants.kernel_variants())
    assert len(found) == len({(v.label, v.tile) for v in found})
    labels = " ".join(v.label for v in found)
    for form in (
        "cross_entropy loss and gradient bf16 V=256000",
        "cross_entropy gradient fp16",
        "divergence jsd and gradient",
        "divergence forward_kl V=",
        "block_statistics+",
        "block_gradient bf16",
        "scale bf16",
    ):
        assert form in labels
