"""Run by test_w4a16_sum.py, TRITON_INTERPRET=1: what stands before and behind products, fp16."""

import sys

import torch

from taut_kernels import testing
from taut_kernels.gemm import w4a16_sum, w4a16_wgmma

# M, rows, N of y, splits, tokens a tile, warps, row tiles, bias
CASES = [
    (70, 272, 272, 3, 64, 4, 2, True),
    (129, 128, 512, 2, 128, 8, 1, False),
    (16, 80, 80, 3, 16, 4, 1, True),
    (300, 256, 640, 4, 256, 8, 1, True),
]


def places(rows, n, warps, row_tiles):
    """Return (place in a tile, row of y) of every row a tile holds, in the order of its sums."""
    for r in range(row_tiles):
        for warp in range(warps):
            tile = min((n * warps + warp) * row_tiles, rows // 16 - row_tiles) + r
            for line in range(16):
                yield r, 16 * warp + line, 16 * tile + line


def cell(r, line, token, block_m, warps):
    """Return where a tile keeps one sum."""
    lines = 16 * warps
    warp, half, g = line // 16, line % 16 // 8, line % 8
    lane = (warp * 8 + g) * 4 + token % 8 // 2
    return (r * (block_m // 8) + token // 8) * (8 * lines) + lane * 4 + half * 2 + token % 2


def check(M, rows, N, splits, block_m, warps, row_tiles, has_bias):
    generator = torch.Generator().manual_seed(M)
    tiles = (-(-rows // (16 * warps * row_tiles)), -(-M // block_m))
    size = 16 * warps * row_tiles * block_m
    partial = torch.full((tiles[0] * tiles[1], splits, size), float("nan"))
    wanted = torch.randn(splits, M, rows, generator=generator)
    token = torch.arange(block_m)
    for m in range(tiles[1]):
        for n in range(tiles[0]):
            for r, line, row in places(rows, n, warps, row_tiles):
                values = wanted[:, (m * block_m + token) % M, row]
                partial[m * tiles[0] + n][:, cell(r, line, token, block_m, warps)] = values
    bias = torch.randn(rows, generator=generator).half() if has_bias else None
    whole = torch.full((M, N), float("nan")).half()
    first = N - rows
    w4a16_sum.launch(
        partial,
        bias,
        whole[:, first:],
        tiles,
        split_k=splits,
        block_m=block_m,
        num_warps=warps,
        row_tiles=row_tiles,
    )
    total = torch.zeros(M, rows)
    for s in range(splits):
        total = total + wanted[s]
    expected = (total if bias is None else total + bias.float()).half()
    assert torch.equal(whole[:, first:], expected)
    assert whole[:, :first].isnan().all(), "columns of another launch"


def check_reorder(M, K, padding):
    x = torch.randn(M, K + padding, generator=torch.Generator().manual_seed(K)).half()[:, :K]
    expected = x.reshape(M, K // 64, 2, 4, 2, 2, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(M, K)
    assert torch.equal(w4a16_wgmma.reorder(x), expected)


with testing.nan_poison():
    for shape in ((3, 64, 0), (2, 2112, 8), (1, 4096, 0)):
        check_reorder(*shape)
    for case in CASES:
        check(*case)
        sys.stdout.write(f"{case} ok\n")
