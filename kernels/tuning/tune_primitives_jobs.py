"""What tuning the primitives tries: shapes, candidate tiles, operands, rows of the tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from taut_bench.primitives_cases import draw
from taut_bench.shapes import LLAMA3_8B_PRODUCTS
from taut_kernels.launch import tile_tables
from taut_kernels.primitives import convolution, gemm, transposition
from taut_kernels.primitives.conv2d_launch import Window
from taut_kernels.primitives.conv2d_tiles import RESNET_LAYERS, ConvTile, Layer, pixel_block
from taut_kernels.primitives.gemm_tiles import GemmTile
from taut_kernels.primitives.transpose_tiles import TransposeTile
from taut_kernels.tuner import timing

PARTS = ("gemm", "conv2d", "transpose")
UNIT = Window((1, 1), (1, 1), (1, 1))
_SHARED_BYTES = 227 * 1024
_MULTIPROCESSORS = 132
BUCKETS: dict[int, int | None] = {64: 64, 256: 512, 4096: None}
"""Rows of a measured → the most rows its tile is taken for."""


@dataclass(frozen=True)
class Operands:
    """A shape's operands on the card, and what its results must be."""

    run: Callable[[Any, int], Tensor]
    rival: Callable[[int], Tensor]
    copies: int
    gold: Tensor
    reference: Tensor

    def caller(self, tile: Any) -> Callable[[int], Tensor]:
        """Return the call of one tile on the i-th copy."""
        return lambda i: self.run(tile, i)


@dataclass(frozen=True)
class Job:
    """One shape and its candidates; picklable.

    Attributes:
        part: one of :data:`PARTS`.
        sizes: M, N, K of a product; N and the layer of a convolution; rows, columns and bytes of an
            element of a transpose.
        candidates: tiles.
        calls: in one graph.
    """

    part: str
    sizes: tuple[int, ...]
    candidates: tuple[Any, ...]
    calls: int

    @property
    def name(self) -> str:
        """Part and sizes, as shown."""
        return f"{self.part} {'×'.join(map(str, self.sizes))}"

    def form(self, tile: Any) -> Hashable:
        """Return what tells two compiled forms apart."""
        if self.part == "conv2d":
            N, _, _, _, _, P, Q = self.sizes
            return self.part, tile, pixel_block(N, P, Q, tile.pixels)
        return self.part, tile, self.sizes[2] if self.part == "transpose" else None

    def warm(self, tile: Any) -> None:
        """Compile one candidate's form, by running it on little."""
        if self.part == "gemm":
            a = torch.zeros(256, 2048, dtype=torch.bfloat16, device="cuda")
            b = torch.zeros(512, 2048, dtype=torch.bfloat16, device="cuda")
            gemm.launch("v4", tile, a, b.t())
            return
        if self.part == "transpose":
            dtype = torch.bfloat16 if self.sizes[2] == 2 else torch.float32
            transposition.launch("v4", tile, torch.zeros(256, 256, dtype=dtype, device="cuda"))
            return
        # The block of pixels is part of the form, and follows from the number of images.
        N, C, K, R, S, P, Q = self.sizes
        last = torch.channels_last
        x = torch.zeros(N, C, P, Q, dtype=torch.bfloat16, device="cuda").to(memory_format=last)
        weight = torch.zeros(K, C, R, S, dtype=torch.bfloat16, device="cuda")
        convolution.launch("v2", tile, x, weight.to(memory_format=last), None, UNIT)

    def make(self) -> Operands:
        """Put the operands on the card."""
        if self.part == "gemm":
            M, N, K = self.sizes
            return _product(M, N, K)
        if self.part == "conv2d":
            N, C, K, R, S, P, Q = self.sizes
            return _convolution(N, (C, K, R, S, P, Q))
        rows, columns, itemsize = self.sizes
        return _transpose(rows, columns, itemsize)


def _product(M: int, N: int, K: int) -> Operands:
    copies = min(16, timing.copies_needed(2 * (M * K + N * K)))
    a = [draw(M, K, seed=i) for i in range(copies)]
    b = [(draw(N, K, seed=100 + i) * K**-0.5).t() for i in range(copies)]
    return Operands(
        lambda tile, i: gemm.launch("v4", tile, a[i], b[i]),
        lambda i: torch.mm(a[i], b[i]),
        copies,
        a[0].double() @ b[0].double(),
        gemm.matmul_ref(a[0], b[0]),
    )


def _convolution(N: int, layer: Layer) -> Operands:
    C, K, R, S, P, Q = layer
    last = torch.channels_last
    copies = min(16, timing.copies_needed(2 * N * P * Q * (C + K)))
    x = [draw(N, C, P, Q, seed=i).to(memory_format=last) for i in range(copies)]
    weight = (draw(K, C, R, S, seed=99) * (C * R * S) ** -0.5).to(memory_format=last)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        gold = convolution.conv2d_ref(x[0].double(), weight.double(), None, UNIT)
        reference = convolution.conv2d_ref(x[0], weight, None, UNIT)
    return Operands(
        lambda tile, i: convolution.launch("v2", tile, x[i], weight, None, UNIT),
        lambda i: torch.nn.functional.conv2d(x[i], weight, padding=1),
        copies,
        gold,
        reference,
    )


def _transpose(rows: int, columns: int, itemsize: int) -> Operands:
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    x = [draw(rows, columns, dtype=dtype, seed=i) for i in range(2)]
    copy = timing.copy_subject(2 * x[0].numel() * itemsize, 2)

    def rival(i: int) -> Tensor:
        copy.call(i)
        return x[i]

    gold = transposition.transpose_ref(x[0])
    run: Callable[[Any, int], Tensor] = lambda tile, i: transposition.launch("v4", tile, x[i])  # noqa: E731
    return Operands(run, rival, 2, gold.double(), gold)


def _fits(tile: GemmTile) -> bool:
    ring = 2 * tile.block_k * (tile.block_m + tile.block_n) * tile.num_stages
    out = 0 if tile.split_k > 1 else 2 * tile.block_m * tile.block_n
    # A walk that starts the next tile early keeps its own part of shared memory for c.
    kept = out // tile.parts if tile.persistent else 0
    return max(ring + kept, out // tile.parts) + 1024 <= _SHARED_BYTES


def large_tiles() -> Iterator[GemmTile]:
    """Yield candidates for products that fill the card."""
    sizes = ((128, 256, 64), (256, 128, 64), (128, 128, 64), (128, 128, 128))
    for (m, n, k), group_m in product(sizes, (8, 16)):
        for stages in (3, 4):
            for parts in (1, 2):
                plain = GemmTile(m, n, k, 8, stages, group_m, parts=parts)
                walking = replace(plain, persistent=True)
                yield from filter(_fits, (plain, walking, replace(walking, flatten=True)))


def middle_tiles() -> Iterator[GemmTile]:
    """Yield candidates for products of some hundred rows: what a large product takes, and less."""
    for m, n in ((128, 64), (128, 128), (128, 256), (256, 64), (256, 128)):
        for stages in (3, 4, 5, 6):
            plain = GemmTile(m, n, 64, 8, stages)
            walking = replace(plain, persistent=True, flatten=True)
            more = (plain, replace(plain, parts=2), walking, replace(walking, parts=2))
            yield from filter(_fits, more)


def small_tiles(M: int, N: int, K: int) -> Iterator[GemmTile]:
    """Yield candidates for products with too few tiles to fill the card."""
    for m, n, k in product((64, 128), (64, 128, 256), (64, 128)):
        tiles = -(-M // m) * -(-N // n)
        for split, stages in product((1, 2, 4, 8), (3, 4, 6)):
            tile = GemmTile(m, n, k, m // 16, stages, split_k=split)
            filled = _MULTIPROCESSORS // 3 <= tiles * split <= 4 * _MULTIPROCESSORS
            deep = -(-K // k) >= 4 * split
            if filled and deep and m * n < 32768 and _fits(tile):
                yield tile


def conv_tiles(K: int) -> Iterator[ConvTile]:
    """Yield candidates for a layer with K output channels."""
    sizes = product((64, 128, 256), (64, 128), (4, 8), (3, 4, 5))
    for pixels, block_n, num_warps, stages in sizes:
        ring = 2 * 64 * (pixels + block_n) * stages + 2 * pixels * block_n
        a_thread = pixels * block_n // (32 * num_warps)
        if block_n <= K and ring <= _SHARED_BYTES and 16 <= a_thread <= 128:
            yield ConvTile(pixels, block_n, 64, num_warps, stages)


def jobs_of(part: str) -> list[Job]:
    """Return the shapes of a part with their candidates.

    Args:
        part: one of :data:`PARTS`.
    """
    if part == "conv2d":
        return [
            Job(part, (N, *layer), tuple(conv_tiles(layer[1])), 16)
            for layer in RESNET_LAYERS
            for N in (32, 128)
        ]
    if part == "transpose":
        sizes = [*product((32, 64, 128), (32, 64, 128), (2, 4, 8))]
        tiles = tuple(TransposeTile(*size) for size in sizes)
        return [Job(part, (8192, 8192, itemsize), tiles, 8) for itemsize in (2, 4)]
    products = LLAMA3_8B_PRODUCTS.values()
    jobs = [Job(part, (64, N, K), tuple(small_tiles(64, N, K)), 32) for N, K in products]
    for N, K in products:
        some = dict.fromkeys([*small_tiles(256, N, K), *middle_tiles()])
        jobs.append(Job(part, (256, N, K), tuple(some), 32))
    large = tuple(large_tiles())
    jobs += [Job(part, (4096, N, K), large, 3) for N, K in products]
    return [*jobs, Job(part, (8192, 8192, 8192), large, 2)]


def kept_rows(part: str, gpu: str, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a table's rows: the new ones, and of the shipped table those they do not replace.

    Args:
        part: ``gemm`` or ``conv2d``.
        gpu: the card's name.
        new: rows found in this run.
    """
    if part == "transpose":
        return new
    keys = ("N", "K", "max_m") if part == "gemm" else ("C", "K", "R", "S", "P", "Q", "max_n")

    def key(row: dict[str, Any]) -> tuple[float, ...]:
        # null is the last bucket.
        return tuple(float("inf") if row[name] is None else row[name] for name in keys)

    rows = {key(row): row for row in [*tile_tables.shipped_rows(part, gpu), *new]}
    return [rows[found] for found in sorted(rows)]


def row_of(job: Job, tile: Any, us: float, rival_us: float) -> dict[str, Any] | None:
    """Return the row of a table a winner makes; None for the transpose, which has none.

    Args:
        job: what was tuned.
        tile: the winner.
        us: its time.
        rival_us: of cuBLAS or cuDNN.
    """
    times = round(us, 2), round(rival_us, 2)
    if job.part == "gemm":
        M, N, K = job.sizes
        limits = {"N": N, "K": K, "max_m": BUCKETS.get(M)}
        return limits | {"tile": asdict(tile), "M": [M], "us": [times[0]], "cublas_us": [times[1]]}
    if job.part == "conv2d":
        N, C, K, R, S, P, Q = job.sizes
        layer = {"C": C, "K": K, "R": R, "S": S, "P": P, "Q": Q}
        limit = {"N": [N], "max_n": 64 if N <= 64 else None}
        return layer | limit | {"tile": asdict(tile), "us": [times[0]], "cudnn_us": [times[1]]}
    return None
