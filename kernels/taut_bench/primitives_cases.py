"""What the primitives' benchmark runs: every rung, its rivals, its gate and its floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from taut_bench import testing
from taut_bench.shapes import LLAMA3_8B_PRODUCTS
from taut_kernels.primitives import (
    conv2d_tiles,
    convolution,
    gemm,
    gemm_tiles,
    pooling,
    reduce_tiles,
    reduction,
    transpose_tiles,
    transposition,
)
from taut_kernels.primitives.conv2d_launch import Window
from taut_kernels.primitives.conv2d_tiles import RESNET_LAYERS
from taut_kernels.tuner import timing

PARTS = ("gemm", "transpose", "conv2d", "pool", "reduction")
Call = Callable[[int], Tensor]
"""Runs an operation on the i-th copy of its operands."""


@dataclass(frozen=True)
class Subjects:
    """A case with its operands on the card.

    Attributes:
        ours: rung → call.
        rivals: name → call.
        copies: of the operands.
        gold: the result on copy 0 in fp64, or exact.
        reference: the specification's result on copy 0.
        apart: what is timed in turn with each other only: a card at its power limit runs what
            follows a kernel that leaves it cool some 10 % faster.
    """

    ours: dict[str, Call]
    rivals: dict[str, Call]
    copies: int
    gold: Tensor
    reference: Tensor
    apart: frozenset[str] = frozenset()

    def why_wrong(self, actual: Tensor) -> str | None:
        """Return why a result is outside the error budget, or None."""
        return testing.why_outside_budget(actual, self.gold, self.reference)


@dataclass(frozen=True)
class Case:
    """One size of one operation.

    Attributes:
        part: one of :data:`PARTS`.
        name: shape and options, as shown.
        flops: operations of a call; 0 where bytes are the floor.
        bytes_moved: read and written by a call, at least.
        calls: in one graph; fewer for calls of milliseconds.
        make: puts operands on the card.
    """

    part: str
    name: str
    flops: int
    bytes_moved: int
    calls: int
    make: Callable[[], Subjects]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Draw normal values on the card; equal seeds give equal values."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def _copies(make: Callable[[int], Tensor], bytes_moved: int) -> list[Tensor]:
    return [make(i) for i in range(min(16, timing.copies_needed(bytes_moved)))]


def _gemm(M: int, N: int, K: int) -> Subjects:
    a = _copies(lambda i: draw(M, K, seed=i), 2 * M * K)
    # Weights as layers keep them, [N, K], read as their transpose.
    weights = [draw(N, K, seed=100 + i) * K**-0.5 for i in range(len(a))]
    b = [weight.t() for weight in weights]

    def rung(version: str) -> Call:
        return lambda i: gemm.matmul(a[i], b[i], version=version)

    pipelined = replace(gemm_tiles.TILED, num_stages=3)
    ours = {f"taut {version}": rung(version) for version in gemm_tiles.VERSIONS}
    ours["taut v2, 3 stages"] = lambda i: gemm.launch("v2", pipelined, a[i], b[i])
    return Subjects(
        ours,
        {"cuBLAS": lambda i: torch.mm(a[i], b[i])},
        len(a),
        a[0].double() @ b[0].double(),
        gemm.matmul_ref(a[0], b[0]),
        frozenset(name for name in ours if name[:7] in ("taut v1", "taut v2")),
    )


def _gemms() -> Iterator[Case]:
    shapes = [(4096, 4096, 4096), (8192, 8192, 8192)]
    shapes += [(M, *product) for M in (4096, 256, 64) for product in LLAMA3_8B_PRODUCTS.values()]
    for M, N, K in shapes:
        flops, bytes_moved = 2 * M * N * K, 2 * (M * K + N * K + M * N)
        calls = max(4, min(32, int(2e13 / flops)))
        name = f"{M}×{N}×{K} bf16"
        yield Case("gemm", name, flops, bytes_moved, calls, lambda s=(M, N, K): _gemm(*s))  # type: ignore[misc]


def _rivals(function: Callable[..., Tensor], x: list[Tensor], compiled: bool) -> dict[str, Call]:
    """Return torch's own, and where asked for what Inductor makes of it (seconds of compiling)."""
    rivals: dict[str, Call] = {"torch": lambda i: function(x[i])}
    if compiled:
        faster: Callable[..., Tensor] = torch.compile(function, dynamic=False)
        rivals["torch.compile"] = lambda i: faster(x[i])
    return rivals


def _transpose(
    shape: tuple[int, ...], dtype: torch.dtype, described: bool, compiled: bool
) -> Subjects:
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    x = _copies(lambda i: draw(*shape, dtype=dtype, seed=i), nbytes)

    def rung(version: str) -> Call:
        return lambda i: transposition.transpose(x[i], version=version)

    versions = transpose_tiles.VERSIONS if described else transpose_tiles.VERSIONS[:-1]
    rivals = _rivals(lambda x: x.transpose(-2, -1).contiguous(), x, compiled)
    gold = transposition.transpose_ref(x[0])
    ours = {f"taut {version}": rung(version) for version in versions}
    return Subjects(ours, rivals, len(x), gold.double(), gold)


def _transposes() -> Iterator[Case]:
    for shape, dtype, described, compiled in (
        ((8192, 8192), torch.bfloat16, True, True),
        ((8192, 8192), torch.float32, True, True),
        ((32768, 4096), torch.bfloat16, True, False),
        ((32, 2048, 2048), torch.bfloat16, True, False),
        ((8191, 8193), torch.bfloat16, False, True),
    ):
        nbytes = 2 * dtype.itemsize * torch.Size(shape).numel()
        name = f"{'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        arguments = (shape, dtype, described, compiled)
        yield Case("transpose", name, 0, nbytes, 8, lambda s=arguments: _transpose(*s))  # type: ignore[misc]


def _conv2d(N: int, C: int, K: int, side: int, stride: int) -> Subjects:
    """Padded by 1; ``side`` is of the input."""
    nbytes = 2 * N * side * side * (C + K // stride**2)
    last = torch.channels_last
    x = _copies(lambda i: draw(N, C, side, side, seed=i).to(memory_format=last), nbytes)
    weight = (draw(K, C, 3, 3, seed=99) * (9 * C) ** -0.5).to(memory_format=last)
    window = Window((stride, stride), (1, 1), (1, 1))

    def rung(version: str) -> Call:
        return lambda i: convolution.conv2d(x[i], weight, None, stride, 1, version=version)

    ours = {f"taut {version}": rung(version) for version in conv2d_tiles.VERSIONS}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        gold = convolution.conv2d_ref(x[0].double(), weight.double(), None, window)
        reference = convolution.conv2d_ref(x[0], weight, None, window)
    cudnn: Call = lambda i: functional.conv2d(x[i], weight, stride=stride, padding=1)  # noqa: E731
    return Subjects(ours, {"cuDNN": cudnn}, len(x), gold, reference)


def _convolutions() -> Iterator[Case]:
    for N in (32, 128):
        strided = ((layer, 2) for layer in RESNET_LAYERS[1:])
        for (C, K, R, S, P, Q), stride in (*((layer, 1) for layer in RESNET_LAYERS), *strided):
            pixels, side = N * P * Q, P * stride
            moved = 2 * (pixels * (C * stride**2 + K) + K * C * R * S)
            arguments = (N, C, K, side, stride)
            yield Case(
                "conv2d",
                f"{N}×{C}×{side}×{side}, 3×3{' /2' if stride == 2 else ''}, bf16 channels_last",
                2 * pixels * K * C * R * S,
                moved,
                16,
                lambda s=arguments: _conv2d(*s),  # type: ignore[misc]
            )


def _pool(shape: tuple[int, ...], average: bool, last: bool) -> Subjects:
    layout = torch.channels_last if last else torch.contiguous_format
    nbytes = 2 * torch.Size(shape).numel()
    x = _copies(lambda i: draw(*shape, seed=i).contiguous(memory_format=layout), nbytes)
    sizes: tuple[list[int], ...] = ([3, 3], [2, 2], [1, 1])
    if average:
        sizes = ([2, 2], [2, 2], [0, 0])
        ours: Call = lambda i: pooling.avg_pool2d(x[i], 2)  # noqa: E731
        theirs: Callable[..., Tensor] = partial(functional.avg_pool2d, kernel_size=2)
        gold = pooling.avg_pool2d_ref(x[0].double(), *sizes, True)
        reference = pooling.avg_pool2d_ref(x[0], *sizes, True)
    else:
        ours = lambda i: pooling.max_pool2d(x[i], 3, 2, 1)  # noqa: E731
        theirs = partial(functional.max_pool2d, kernel_size=3, stride=2, padding=1)
        gold = pooling.max_pool2d_ref(x[0].double(), *sizes)
        reference = pooling.max_pool2d_ref(x[0], *sizes)
    rivals = _rivals(theirs, x, not average)
    return Subjects({"taut": ours}, rivals, len(x), gold, reference)


def _pools() -> Iterator[Case]:
    shape = (64, 64, 112, 112)
    for average, last in ((False, True), (False, False), (True, True)):
        name = f"{'avg 2×2 /2' if average else 'max 3×3 /2'} {'×'.join(map(str, shape))} bf16"
        moved = 2 * torch.Size(shape).numel() * 5 // 4
        layout = " channels_last" if last else " contiguous"
        arguments = (shape, average, last)
        yield Case("pool", name + layout, 0, moved, 16, lambda s=arguments: _pool(*s))  # type: ignore[misc]


def _reduction(shape: tuple[int, ...], operation: str, dim: int | None) -> Subjects:
    x = _copies(lambda i: draw(*shape, seed=i), 2 * torch.Size(shape).numel())

    def rung(version: str) -> Call:
        return lambda i: reduction.reduce(x[i], operation, dim, version=version)

    def theirs(x: Tensor) -> Tensor:
        if operation == "max":
            return x.amax() if dim is None else x.amax(dim)
        return x.sum() if dim is None else x.sum(dim)

    rivals = _rivals(theirs, x, operation == "sum")
    gold = reduction.reduce_ref(x[0].double(), operation, dim, False)
    reference = reduction.reduce_ref(x[0], operation, dim, False)
    ours = {f"taut {version}": rung(version) for version in reduce_tiles.VERSIONS}
    return Subjects(ours, rivals, len(x), gold, reference)


def _reductions() -> Iterator[Case]:
    for shape, operation, dim in (
        ((8192, 16384), "sum", None),
        ((8192, 16384), "sum", 1),
        ((8192, 16384), "max", 0),
        ((32, 4194304), "sum", 1),
    ):
        where = "all" if dim is None else f"dim {dim}"
        name = f"{operation} {where} {shape[0]}×{shape[1]} bf16"
        moved = 2 * torch.Size(shape).numel()
        arguments = (shape, operation, dim)
        yield Case("reduction", name, 0, moved, 4, lambda s=arguments: _reduction(*s))  # type: ignore[misc]


def cases(parts: tuple[str, ...]) -> Iterator[Case]:
    """Yield the cases of some parts, in the order of :data:`PARTS`."""
    makers = (_gemms, _transposes, _convolutions, _pools, _reductions)
    for part, make in zip(PARTS, makers, strict=True):
        if part in parts:
            yield from make()
