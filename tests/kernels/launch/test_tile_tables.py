"""Which card's table a card's tiles come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from taut_kernels.attention import tiles as tiles_attention
from taut_kernels.attention.tile import DecodeTile as DecodeAttentionTile
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import tile_tables
from taut_kernels.launch.tile_tables import Table
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.loss.tiles import LossTile
from taut_kernels.primitives import conv2d_tiles, gemm_tiles
from taut_kernels.primitives.conv2d_tiles import ConvTile
from taut_kernels.primitives.gemm_tiles import GemmTile
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.vllm_plugin import decode_attention, fused_ops

OWN = ("scaled_mm",)
"""Families of which an H100 has a table of its own."""
H100, H200, UNKNOWN = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA X"

FAMILIES: dict[str, Callable[[], Any]] = {
    "attention": tiles_attention.tables,
    "conv2d": conv2d_tiles.tables,
    "decode": tiles_decode.tables,
    "fused": tiles_fused.tables,
    "gemm": gemm_tiles.tables,
    "loss": tiles_loss.tables,
    "scaled_mm": tiles_scaled_mm.tables,
    "wgmma": tiles_wgmma.tables,
}

LOOKUPS: dict[str, Callable[[str | None], Any]] = {
    "attention": lambda gpu: tiles_attention.decode(gpu, 128, 2, "large"),
    "conv2d": lambda gpu: conv2d_tiles.lookup(gpu, 32, (128, 128, 3, 3, 28, 28)),
    "decode": lambda gpu: tiles_decode.lookup(gpu, 8192, 8192, hopper=True),
    "fused": lambda gpu: tiles_fused.lookup(gpu, "rms_norm", 4096, 4096, True),
    "gemm": lambda gpu: gemm_tiles.lookup(gpu, 512, 6144, 4096),
    "loss": lambda gpu: tiles_loss.lookup(gpu, "cross_entropy", 256000),
    "loss ring": lambda gpu: tiles_loss.ring(gpu, 32000),
    "scaled_mm": lambda gpu: tiles_scaled_mm.lookup("fp8_gemm", gpu, 28672, 4096, 1),
    "wgmma": lambda gpu: tiles_wgmma.lookup(
        gpu, 28672, 4096, tiles_wgmma.bucket_of(128), hopper=True
    ),
}


def _empty(gpu: str) -> Table[str, int]:
    return Table(gpu, {})


def test_a_table_of_its_own_comes_before_its_twins() -> None:
    own, twin = _empty(H100), _empty(H200)
    assert tile_tables.of_card({H100: own, H200: twin}, H100) is own
    assert tile_tables.of_card({H100: own, H200: twin}, H200) is twin
    assert tile_tables.of_card({H200: twin}, H100) is twin
    assert tile_tables.of_card({H100: own}, H200) is None  # a twin lends, it does not borrow
    assert tile_tables.of_card({}, H100) is None


@pytest.mark.parametrize("gpu", [UNKNOWN, "NVIDIA H100 PCIe", "", None])
def test_a_card_that_is_nobodys_twin_has_no_table(gpu: str | None) -> None:
    assert tile_tables.of_card({H200: _empty(H200)}, gpu) is None


def test_tuning_starts_from_the_rows_that_are_lent() -> None:
    """Else a tuned row would drop all others: a card's own table replaces its twin's."""
    lent = tile_tables.shipped_rows("gemm", H200)
    assert lent
    assert tile_tables.shipped_rows("gemm", H100) == lent
    assert tile_tables.shipped_rows("gemm", UNKNOWN) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_an_h100_takes_its_own_tiles_or_the_h200s(family: str) -> None:
    tables = FAMILIES[family]()
    assert tile_tables.of_card(tables, H100) is tables[H100 if family in OWN else H200]
    assert tile_tables.of_card(tables, UNKNOWN) is None
    assert tile_tables.of_card(tables, None) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_card_a_twin_names_has_a_table(family: str) -> None:
    assert set(tile_tables.TWINS.values()) <= set(FAMILIES[family]())


@pytest.mark.parametrize("family", LOOKUPS)
def test_every_lookup_goes_to_the_twins_table(family: str) -> None:
    ask = LOOKUPS[family]
    assert ask(H100) != ask(UNKNOWN) != ask(H200)
    assert (ask(H100) == ask(H200)) is (family not in OWN)


def test_prefer_on_an_h100_runs_what_was_measured_on_its_twin() -> None:
    assert fused_ops.why_not_fused_ops(H100, "prefer") is None
    assert decode_attention.why_not_used(H100, "prefer") is None


SAMPLES: dict[str, tuple[Callable[[], Any], Any]] = {
    "w4a16 tma": (
        lambda: tiles_wgmma.lookup(H200, 28672, 4096, tiles_wgmma.bucket_of(64), hopper=True),
        WgmmaRingTile(64, 2, 1, 2, 1, 4, 128, 2, 2, tma=True),
    ),
    "w4a16 of groups of 32 by its neighbour": (
        lambda: tiles_wgmma.lookup(
            H200, 28672, 4096, tiles_wgmma.bucket_of(64), WeightFormat.G32, hopper=True
        ),
        WgmmaRingTile(64, 2, 1, 2, 1, 4, 128, 1, 1, tma=True),
    ),
    "w4a16 ring": (
        lambda: tiles_wgmma.lookup(H100, 8192, 8192, 0, WeightFormat.G32, hopper=True),
        WgmmaRingTile(16, 1, 2, 4, 4, 4, 128),
    ),
    "w4a16 decode ring": (
        lambda: tiles_wgmma.lookup(H200, 8192, 8192, 0, hopper=True),
        RingTile(2, 4, 2, 8, 4, 128),
    ),
    "w4a16 decode": (
        lambda: tiles_decode.lookup(H200, 28672, 4096, hopper=True),
        DecodeTile(4, 1, 1, 8, 8, 8, False),
    ),
    "fp8 pairs of its own card": (
        lambda: tiles_scaled_mm.lookup("fp8_gemm", H100, 28672, 4096, 17).tile,
        ScaledMmTile("pairs", 32, 64, 256, 4, 2),
    ),
    "int8 split": (
        lambda: tiles_scaled_mm.lookup("w8a8_gemm", H200, 4096, 14336, 128).tile,
        ScaledMmTile("few", 128, 64, 256, 4, 4, split_k=2),
    ),
    "gemm": (
        lambda: gemm_tiles.lookup(H200, 64, 4096, 14336),
        GemmTile(64, 64, 128, 4, 6, split_k=2),
    ),
    "conv2d": (
        lambda: conv2d_tiles.lookup(H200, 65, (128, 128, 3, 3, 28, 28)),
        ConvTile(128, 128, 64, 4, 3),
    ),
    "fused": (
        lambda: tiles_fused.lookup(H200, "rms_norm", 5120, 4096),
        FusedTile(1, 2048, 8, registers=48),
    ),
    "loss": (lambda: tiles_loss.lookup(H200, "divergence", 50304), LossTile(2048, 8, 4)),
    "attention": (
        lambda: tiles_attention.decode(H200, 128, 2, "small"),
        DecodeAttentionTile(16, 4, 4, 1, 64),
    ),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_what_was_measured_is_what_is_answered(sample: str) -> None:
    """Rows read by hand: of every table, kernel and way to fall back."""
    ask, answer = SAMPLES[sample]
    assert ask() == answer
