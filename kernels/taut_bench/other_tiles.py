"""Runs norms, activations and RoPE with other tiles than the tables': what only a chain can judge.

Their tuner times a kernel alone and late. Where kernels start early a tile also decides where the
programs of the next kernel find room (kernels/README.md, "An early start wants one program a
multiprocessor"), which no kernel shows alone. Used by `decode_chain` with ``--tile``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from taut_kernels.activation import silu_mul_launch
from taut_kernels.norm import rms_norm_launch
from taut_kernels.rope import rope_launch
from taut_kernels.rowwise import quantize
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tiles import OPS, FusedTile

_TILE = re.compile(r"(?P<rows>\d+)x(?P<block>\d+)/(?P<warps>\d+)w(?:/r(?P<registers>\d+))?")
_PLANS = (rms_norm_launch.plan, rope_launch.plan, silu_mul_launch.plan, quantize._plan)
"""What ops keep of the tables' answers."""


def parse(text: str) -> tuple[str, FusedTile]:
    """Read an op and its tile, as ``add_rms_norm=1x2048/8w/r48``.

    Args:
        text: op, rows, block, warps and, if any, a cap on registers.

    Raises:
        argparse.ArgumentTypeError: it is not of this form, or no such op or tile.
    """
    op, _, tile = text.partition("=")
    match = _TILE.fullmatch(tile)
    if op not in OPS or match is None:
        raise argparse.ArgumentTypeError(
            f"want OP=ROWSxBLOCK/WARPSw[/rREGISTERS], OP one of {', '.join(OPS)}; got {text}"
        )
    try:
        return op, FusedTile(
            int(match["rows"]),
            int(match["block"]),
            int(match["warps"]),
            registers=int(match["registers"] or 0),
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


@contextmanager
def instead(tiles: Mapping[str, FusedTile]) -> Iterator[None]:
    """Let ops run with other tiles, early where the tables' would be.

    Args:
        tiles: by op.
    """
    shipped = tiles_fused.lookup

    def lookup(gpu: str | None, op: str, N: int, M: int, hopper: bool) -> FusedTile:
        found = shipped(gpu, op, N, M, hopper)
        return replace(tiles[op], pdl=found.pdl) if op in tiles else found

    try:
        tiles_fused.lookup = lookup  # type: ignore[assignment]
        _forget()
        yield
    finally:
        tiles_fused.lookup = shipped
        _forget()


def _forget() -> None:
    for plan in _PLANS:
        plan.cache_clear()
