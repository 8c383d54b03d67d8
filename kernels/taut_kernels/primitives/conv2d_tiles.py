"""How the convolution is cut up: a rule, and measured tables.

A table is ``tiles/conv2d-<card>.json``::

    {"gpu": "<torch.cuda.get_device_name>", "source": "<command, date, versions>",
     "rows": [{"C": …, "K": …, "R": …, "S": …, "P": …, "Q": …, "N": [images measured, …],
               "max_n": … | null, "tile": {…}, "us": [µs per call, …],
               "cudnn_us": [µs of cuDNN beside it, …]}, …]}

Rows of one layer are buckets of N: ``max_n`` is inclusive and rises, null in the last one. ``tile``
holds fields of :class:`ConvTile`. What no table of the card names takes :func:`rule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from taut_kernels.launch import tile_tables

VERSIONS = ("v1", "v2")
_LAYER = ("C", "K", "R", "S", "P", "Q")
_ROW_FIELDS = {*_LAYER, "N", "max_n", "tile", "us", "cudnn_us"}
_MULTIPROCESSORS = 132
_MOST_PIXELS_A_SIDE = 256
"""Of a block the copy engine fetches."""
Layer = tuple[int, int, int, int, int, int]
"""C, K, R, S, P, Q."""
RESNET_LAYERS: tuple[Layer, ...] = tuple(
    (channels, channels, 3, 3, side, side)
    for channels, side in ((64, 56), (128, 28), (256, 14), (512, 7))
)
"""ResNet-50's 3×3 layers (arXiv:1512.03385, table 1). All run at stride 1; the first of the last
three kinds runs at 2, with as many output pixels."""


@dataclass(frozen=True, slots=True)
class ConvTile:
    """One way to cut the work.

    Args:
        pixels: output pixels a program, a power of two ≥ 16.
        block_n: output channels a program, a power of two ≥ 64.
        block_k: input channels a step, a power of two ≥ 16.
        num_warps: 4 or 8.
        num_stages: steps whose loads are under way.

    Raises:
        ValueError: a field is out of its range.
    """

    pixels: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        size = f"{self.pixels}x{self.block_n}x{self.block_k}"
        return f"{size}/{self.num_warps}w/{self.num_stages}s"

    def __post_init__(self) -> None:
        for field, least in (("pixels", 16), ("block_n", 64), ("block_k", 16)):
            value = getattr(self, field)
            if value < least or value & (value - 1):
                raise ValueError(f"{field} must be a power of two of at least {least}, got {value}")
        if self.num_warps not in (4, 8) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_warps must be 4 or 8, num_stages in 1..8, got {self}")


GATHER = ConvTile(128, 64, 64, 4, 4)
"""V1, a step within one tap."""
GATHER_FEW = ConvTile(64, 64, 32, 4, 1)
"""V1 for fewer input channels than a step has: an address and a bound an element."""


@cache
def pixel_block(N: int, P: int, Q: int, pixels: int) -> tuple[int, int, int]:
    """Cut ``pixels`` output pixels into a block of images, rows and columns.

    The block that computes the fewest pixels outside the output; of equals the one with the
    longest rows, whose loads lie closest together.

    Args:
        N: images.
        P: output rows.
        Q: output columns.
        pixels: a power of two.

    Returns:
        Powers of two whose product is ``pixels``.
    """
    found: list[tuple[int, int, int, tuple[int, int, int]]] = []
    for rows_log in range(pixels.bit_length()):
        for columns_log in range(pixels.bit_length() - rows_log):
            rows, columns = 1 << rows_log, 1 << columns_log
            images = pixels // rows // columns
            if max(rows, columns, images) > _MOST_PIXELS_A_SIDE:
                continue
            blocks = -(-N // images) * -(-P // rows) * -(-Q // columns)
            found.append((blocks, -columns, -rows, (images, rows, columns)))
    return min(found)[3]


def rule(N: int, layer: Layer) -> ConvTile:
    """Choose V2's tile for a layer nobody measured, after what won on the H200.

    The most channels that still give every multiprocessor a program; else fewer pixels, and more
    steps under way.

    Args:
        N: images.
        layer: C, K, R, S, P, Q.
    """
    C, K, _, _, P, Q = layer
    block_k = min(64, max(16, 1 << (C - 1).bit_length()))
    images, rows, columns = pixel_block(N, P, Q, 128)
    blocks = -(-N // images) * -(-P // rows) * -(-Q // columns)
    for block_n in (128, 64):
        if blocks * -(-K // block_n) >= _MULTIPROCESSORS and block_n <= max(64, K):
            return ConvTile(128, block_n, block_k, 4, 3)
    return ConvTile(64, 128 if K >= 128 else 64, block_k, 4, 5)


@dataclass(frozen=True, slots=True)
class ConvTable:
    """The measured buckets of one card: layer → (``max_n`` or None, tile)."""

    gpu: str
    buckets: dict[Layer, tuple[tuple[int | None, ConvTile], ...]]


def parse(text: str, where: str) -> ConvTable:
    """Read a table.

    Args:
        text: JSON in the form of the module's docstring.
        where: file name, for errors.

    Raises:
        ValueError: an unknown key, a tile out of range, or buckets out of order; names ``where``.
    """
    gpu, listed = tile_tables.rows_of(text, where)
    found: dict[Layer, list[tuple[int | None, ConvTile]]] = {}
    for row in listed:
        layer, bucket = _parse_row(row, where)
        found.setdefault(layer, []).append(bucket)
    for layer, buckets in found.items():
        limits = [limit for limit, _ in buckets]
        bounded = [limit for limit in limits[:-1] if limit is not None]
        ordered = len(bounded) == len(limits) - 1 and sorted(set(bounded)) == bounded
        if limits[-1] is not None or not ordered:
            raise ValueError(f"{where}: {layer}: max_n must rise, and be null in the last bucket")
    return ConvTable(gpu, {layer: tuple(buckets) for layer, buckets in found.items()})


def _parse_row(row: dict[str, Any], where: str) -> tuple[Layer, tuple[int | None, ConvTile]]:
    if set(row) != _ROW_FIELDS:
        raise ValueError(f"{where}: a row needs exactly {sorted(_ROW_FIELDS)}")
    try:
        tile = ConvTile(**row["tile"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: C={row['C']} K={row['K']}: {error}") from error
    C, K, R, S, P, Q = (int(row[name]) for name in _LAYER)
    return (C, K, R, S, P, Q), (row["max_n"], tile)


@cache
def tables() -> dict[str, ConvTable]:
    """Load every card's table, once a process."""
    return tile_tables.load_all("conv2d", parse)


@cache
def lookup(gpu: str | None, N: int, layer: Layer) -> ConvTile:
    """Choose V2's tile of one call.

    Args:
        gpu: card name, None outside CUDA.
        N: images, ≥ 1.
        layer: C, K, R, S, P, Q.
    """
    table = tile_tables.of_card(tables(), gpu)
    for limit, tile in table.buckets.get(layer, ()) if table else ():
        if limit is None or limit >= N:
            return tile
    return rule(N, layer)
