"""Run by test_matmul.py and its neighbours with TRITON_INTERPRET=1: jit kernels on CPU tensors.

In its own process, since Triton reads the variable when it is imported. Only fp16 and fp32: bf16
arithmetic is silently garbage there.
"""

import math
import sys

import torch

from taut_bench import testing
from taut_kernels.primitives import convolution, gemm, pooling, reduction, transposition
from taut_kernels.primitives.conv2d_launch import Window, why_not_blocks
from taut_kernels.primitives.conv2d_tiles import ConvTile
from taut_kernels.primitives.gemm_tiles import GemmTile
from taut_kernels.primitives.reduce_tiles import ReduceTile
from taut_kernels.primitives.transpose_tiles import TransposeTile

FLOATS = (torch.float16, torch.float32)
GEMM = [
    ("v1", GemmTile(16, 32, 16, 4, 1)),
    ("v2", GemmTile(32, 16, 32, 4, 1, group_m=2)),
    ("v3", GemmTile(32, 32, 16, 4, 2, group_m=2, parts=2, persistent=True, flatten=True)),
    ("v4", GemmTile(32, 32, 32, 4, 2)),
    ("v4", GemmTile(32, 32, 16, 4, 2, group_m=3, parts=2, persistent=True)),
    ("v4", GemmTile(32, 32, 16, 4, 2, split_k=3)),
    ("v4", GemmTile(32, 32, 16, 4, 2, split_k=2, persistent=True)),
]
# M, N, K: one element; one row; one tile; off every tile; rows that are no multiple of 16 bytes
PRODUCTS = [(1, 1, 1), (1, 8, 16), (32, 32, 32), (70, 72, 56), (33, 31, 17)]


def draw(*shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_product(version, tile, a, b, bias=None, activation="none"):
    with testing.nan_poison():
        c = gemm.launch(version, tile, a, b, bias, activation)
    wide = None if bias is None else bias.double()
    gold = gemm.matmul_ref(a.double(), b.double(), wide, activation)
    testing.assert_within_budget(c, gold, gemm.matmul_ref(a, b, bias, activation))


def products():
    count = 0
    for M, N, K in PRODUCTS:
        a, b = draw(M, K, seed=M), draw(K, N, seed=N)
        for version, tile in GEMM:
            check_product(version, tile, a, b)
            # What a layer has: weights [N, K], read as their transpose.
            check_product(version, tile, a, b.t().contiguous().t())
            count += 2
    return count


def strided_products():
    base = draw(100, 200, seed=3)
    a = draw(60, 50, seed=4)
    views = [
        (a.t().contiguous().t(), base[:50, 3:75]),
        (base[::2, 1:41:2][:40], base[:20, ::2]),
        (a[:1].expand(40, 50), base[:50, :64]),
        (base[:40, 8:56], base.t()[:48, :100]),
    ]
    count = 0
    for version, tile in GEMM:
        for x, y in views:
            check_product(version, tile, x, y)
            count += 1
    return count


def epilogues():
    a, b, bias = draw(40, 48), draw(48, 72, seed=1), draw(72, seed=2)
    count = 0
    for version, tile in GEMM:
        if version != "v4":
            continue
        for activation in gemm.ACTIVATIONS:
            check_product(version, tile, a, b, bias, activation)
            check_product(version, tile, a, b, None, activation)
            count += 2
    return count


def adversarial_products():
    base, b = draw(20, 40), draw(40, 24, seed=1)
    tiny = torch.finfo(torch.float16).smallest_normal / 4
    edits = (
        lambda x: x.zero_(),
        lambda x: x.fill_(-0.0),
        lambda x: x.fill_(tiny),
        lambda x: x[:, 3].fill_(2000.0),
    )
    for version, tile in GEMM:
        for edit in edits:
            edit(a := base.clone())
            check_product(version, tile, a, b)
    # A NaN stays in its row, also where rows and K end within a tile.
    base[5, 39] = float("nan")
    for version, tile in GEMM:
        c = gemm.launch(version, tile, base, b)
        assert c[5].isnan().all()
        assert not c[torch.arange(20) != 5].isnan().any()
    return len(edits)


TRANSPOSE = [
    ("v1", TransposeTile(32, 1, 1)),
    ("v2", TransposeTile(1, 32, 1)),
    ("v3", TransposeTile(16, 16, 1)),
    ("v4", TransposeTile(32, 16, 4)),
    ("v5", TransposeTile(16, 32, 4)),
]


def transposes():
    count = 0
    for dtype in FLOATS:
        shapes = [(1, 1), (40, 72), (33, 7), (3, 24, 40), (1, 16, 8), (2, 1, 50)]
        inputs = [draw(*shape, dtype=dtype) for shape in shapes]
        wide = draw(5, 30, 64, dtype=dtype)
        inputs += [wide[:, :24, 8:48], wide[:, 1:, 3:9], wide[0].t(), wide[1:, ::3, ::2]]
        for x in inputs:
            for version, tile in TRANSPOSE:
                described = x if x.dim() == 3 else x[None]
                if version == "v5" and transposition.why_not_described(described):
                    continue
                with testing.nan_poison():
                    y = transposition.launch(version, tile, x)
                assert torch.equal(y, x.transpose(-2, -1)), (version, x.shape)
                assert y.is_contiguous()
                count += 1
    return count


CONV = [
    ("v1", ConvTile(16, 64, 16, 4, 1)),
    ("v1", ConvTile(32, 64, 32, 4, 1)),
    ("v2", ConvTile(16, 64, 16, 4, 1)),
    ("v2", ConvTile(32, 64, 32, 4, 1)),
]
# N, C, H, W, K, R, S, stride, padding, dilation
LAYERS = [
    (2, 16, 5, 7, 8, 3, 3, (1, 1), (1, 1), (1, 1)),
    (1, 8, 6, 6, 72, 3, 2, (1, 1), (2, 0), (2, 1)),
    (3, 24, 4, 4, 16, 1, 1, (1, 1), (0, 0), (1, 1)),
    (2, 3, 9, 8, 16, 3, 3, (2, 1), (1, 1), (1, 1)),
    (2, 40, 6, 7, 8, 3, 3, (2, 2), (1, 1), (1, 2)),
    (1, 1, 5, 5, 1, 5, 5, (1, 1), (0, 0), (1, 1)),
    (2, 32, 6, 8, 24, 3, 3, (2, 2), (1, 1), (1, 1)),
    (1, 96, 6, 4, 8, 3, 2, (3, 2), (2, 1), (1, 2)),
    (2, 24, 4, 5, 16, 3, 1, (2, 1), (1, 0), (1, 1)),
]


def convolutions():
    count = 0
    for N, C, H, W, K, R, S, *window in LAYERS:
        walk = Window(*window)
        image, bias = draw(N, C, H, W, seed=C), draw(K, seed=K)
        weight = (draw(K, C, R, S, seed=R) / math.sqrt(C * R * S)).half()
        spread = torch.zeros(N, C, H, 2 * W, dtype=torch.float16)
        spread[..., ::2] = image
        among = torch.full((N, 2 * C, H, W), torch.nan, dtype=torch.float16)
        among = among.to(memory_format=torch.channels_last)
        among[:, :C] = image
        last = image.to(memory_format=torch.channels_last)
        for place, x in enumerate((image, last, spread[..., ::2], among[:, :C])):
            for turn, (version, tile) in enumerate(CONV, place):
                if version == "v2" and why_not_blocks(x, weight, walk):
                    continue
                # Every layout and every tile with a bias and without one, not every pair of them:
                # the bias is added behind the loop, which alone reads the image.
                check_convolution(version, tile, x, weight, (bias, None)[turn % 2], walk)
                count += 1
    return count


def check_convolution(version, tile, x, weight, bias, window):
    with testing.nan_poison():
        y = convolution.launch(version, tile, x, weight, bias, window)
    wide = None if bias is None else bias.double()
    gold = convolution.conv2d_ref(x.double(), weight.double(), wide, window)
    reference = convolution.conv2d_ref(x, weight, bias, window)
    testing.assert_within_budget(y, gold, reference)
    assert y.stride() == reference.stride()


# shape, kernel, stride, padding; 8×6 is beyond the elements that are written out
POOLS = [
    ((2, 3, 7, 9), [3, 2], [2, 1], [1, 1]),
    ((1, 16, 8, 8), [2, 2], [2, 2], [0, 0]),
    ((3, 5, 5, 4), [5, 4], [1, 1], [2, 2]),
    ((2, 8, 6, 6), [1, 1], [3, 2], [0, 0]),
    ((1, 2, 9, 8), [8, 6], [1, 1], [4, 3]),
]


def pools():
    count = 0
    for dtype in FLOATS:
        for shape, *sizes in POOLS:
            image = draw(*shape, dtype=dtype)
            wide = draw(*shape[:3], 3 * shape[3], dtype=dtype)
            for x in (image, image.to(memory_format=torch.channels_last), wide[..., 1::3]):
                with testing.nan_poison():
                    y = pooling.launch(x, *sizes, average=False)
                wanted = pooling.max_pool2d_ref(x, *sizes)
                assert torch.equal(y, wanted)
                assert y.stride() == wanted.stride()
                for padded in (True, False):
                    with testing.nan_poison():
                        y = pooling.launch(x, *sizes, average=True, count_include_pad=padded)
                    gold = pooling.avg_pool2d_ref(x.double(), *sizes, padded)
                    reference = pooling.avg_pool2d_ref(x, *sizes, padded)
                    testing.assert_within_budget(y, gold, reference)
                count += 1
    return count


def pools_of_strange_values():
    x = draw(1, 2, 6, 6)
    x[0, 0, 2, 2], x[0, 1, 3, 3] = float("nan"), float("-inf")
    x[0, 1, :2, :2] = float("-inf")
    sizes = ([2, 2], [2, 2], [0, 0])
    y = pooling.launch(x, *sizes, average=False)
    torch.testing.assert_close(y, pooling.max_pool2d_ref(x, *sizes), equal_nan=True, rtol=0, atol=0)
    assert y[0, 0, 1, 1].isnan()
    assert y[0, 1, 0, 0] == float("-inf")
    return 1


REDUCE = [
    ReduceTile(64, 16, 4),
    ReduceTile(32, 4, 4, share=50),
    ReduceTile(32, 8, 4, 2, persistent=True, per_sm=2),
    ReduceTile(16, 4, 4, 2, persistent=True, per_sm=8),
]


def reductions():
    count = 0
    shapes = [(1,), (300,), (3, 130), (20, 3), (2, 70, 5), (2, 1, 5)]
    inputs = [draw(*shape) for shape in shapes]
    inputs += [inputs[3].t(), inputs[4][:, ::2, 3:], inputs[4][:, :8].transpose(0, 2)]
    for x in inputs:
        for dim in (None, *range(x.dim())):
            for tile in REDUCE:
                typed = x.to(FLOATS[count // 3 % 2])
                check_reduction(tile, typed, reduction.OPERATIONS[count % 3], dim)
                count += 1
    return count


def check_reduction(tile, x, operation, dim):
    with testing.nan_poison():
        y = reduction.launch(tile, x, operation, dim, False)
    gold = reduction.reduce_ref(x.double(), operation, dim, False)
    assert y.shape == gold.shape
    # A lane adds at most 300 / 16 elements, then lanes and shares are added: no more than 64
    # roundings of fp32 on any way through, each of at most Σ|x|; one rounding to the result's type.
    total = reduction.reduce_ref(x.double().abs(), operation, dim, False)
    bound = 64 * 2.0**-24 * total + torch.finfo(x.dtype).eps * gold.abs()
    exact = operation == "max"
    assert ((y.double() - gold).abs() <= (0.0 if exact else bound)).all(), (tile, x.shape, dim)


def reductions_of_strange_values():
    x = draw(8, 40)
    x[1, 7], x[2, 9], x[3] = float("nan"), float("inf"), float("-inf")
    for tile in REDUCE:
        for operation in reduction.OPERATIONS:
            y = reduction.launch(tile, x, operation, 1, True)
            wanted = reduction.reduce_ref(x, operation, 1, True)
            torch.testing.assert_close(y, wanted, equal_nan=True, rtol=2e-3, atol=2e-3)
        assert reduction.launch(tile, x, "max", None, False).isnan()
    return len(REDUCE)


def nothing_to_do():
    """Zero-size operands through the ops' own launchers."""
    none = torch.zeros(0, 8, dtype=torch.float16)
    for version in ("v1", "v2", "v3", "v4"):
        assert gemm._launch_matmul(none, none.t(), None, "none", version).shape == (0, 0)
        full = gemm._launch_matmul(none.t(), none, None, "none", version)
        assert torch.equal(full, torch.zeros(8, 8, dtype=torch.float16))
    for version in ("v1", "v2", "v3", "v4", "v5"):
        assert transposition._launch_transpose(none, version).shape == (8, 0)
    image = torch.zeros(0, 8, 5, 5, dtype=torch.float16)
    sizes = ([2, 2], [2, 2], [0, 0])
    assert pooling._launch_max_pool2d(image, *sizes).shape == (0, 8, 2, 2)
    weight = torch.zeros(16, 8, 3, 3, dtype=torch.float16)
    window = ([1, 1], [0, 0], [1, 1])
    for version in ("v1", "v2"):
        found = convolution._launch_conv2d(image, weight, None, *window, version)
        assert found.shape == (0, 16, 3, 3)
    for version in ("v1", "v2", "v3"):
        assert reduction._launch_reduce(none, "sum", None, False, version) == 0
        assert reduction._launch_reduce(none, "mean", 0, False, version).isnan().all()
        assert reduction._launch_reduce(none, "max", 1, False, version).shape == (0,)
    return 1


CHECKS = {
    check.__name__: check
    for check in (
        products,
        strided_products,
        epilogues,
        adversarial_products,
        transposes,
        convolutions,
        pools,
        pools_of_strange_values,
        reductions,
        reductions_of_strange_values,
        nothing_to_do,
    )
}


def main(names):
    torch.set_num_threads(2)
    for name in names:
        sys.stdout.write(f"{name} {CHECKS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
