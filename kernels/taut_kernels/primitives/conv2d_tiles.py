"""How the convolution is cut up: a rule, and measured tables.

Rows of the table ``conv2d`` (:mod:`taut_kernels.launch.tile_tables`) are buckets of N of one layer;
``N`` are the numbers of images measured, ``us`` and ``cudnn_us`` the times at each. ``tile``
holds fields of :class:`ConvTile`. What no table of the card names takes :func:`rule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from taut_kernels.launch.tile_tables import BucketReader, Row, measured, within

VERSIONS = ("v1", "v2")
_LAYER = ("C", "K", "R", "S", "P", "Q")
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


def _entry(row: Row) -> tuple[Layer, ConvTile]:
    C, K, R, S, P, Q = (int(row[name]) for name in _LAYER)
    return (C, K, R, S, P, Q), ConvTile(**row["tile"])


_READER = BucketReader(
    name="conv2d",
    fields=frozenset({*_LAYER, "N", "max_n", "tile", "us", "cudnn_us"}),
    entry=_entry,
    limit="max_n",
)
parse, tables = _READER.parse, cache(_READER.tables)


@cache
def lookup(gpu: str | None, N: int, layer: Layer) -> ConvTile:
    """Choose V2's tile of one call.

    Args:
        gpu: card name, None outside CUDA.
        N: images, ≥ 1.
        layer: C, K, R, S, P, Q.
    """
    found: ConvTile | None = within(measured(tables(), gpu, layer) or (), N)
    return found or rule(N, layer)
