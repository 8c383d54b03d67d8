"""`taut::conv2d`: specification, interpreter, op contract, tiles, GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.primitives import conv2d, conv2d_tiles, convolution
from taut_kernels.primitives.conv2d_launch import Window, why_not_blocks
from taut_kernels.primitives.conv2d_tiles import ConvTile

INTERPRET = Path(__file__).with_name("interpret_primitives.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16)
UNIT = Window((1, 1), (1, 1), (1, 1))


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    scale = 1.0 / math.sqrt(math.prod(shape[1:])) if len(shape) == 4 and shape[2] <= 5 else 1.0
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def test_reference_is_the_sum_over_taps_and_channels() -> None:
    x, weight = draw(2, 3, 6, 7, dtype=torch.float64), draw(4, 3, 3, 2, dtype=torch.float64)
    bias = draw(4, dtype=torch.float64)
    window = Window((2, 1), (1, 2), (1, 2))
    y = convolution.conv2d_ref(x, weight, bias, window)
    gold = torch.zeros_like(y)
    for p in range(y.shape[2]):
        for q in range(y.shape[3]):
            gold[:, :, p, q] = bias
            for r in range(3):
                for s in range(2):
                    h, w = 2 * p - 1 + r, q - 2 + 2 * s
                    if 0 <= h < 6 and 0 <= w < 7:
                        gold[:, :, p, q] += x[:, :, h, w] @ weight[:, :, r, s].t()
    assert testing.max_error(y, gold) < 1e-13


@interpreter
def test_interpreted_kernels(run_checks: Any) -> None:
    process = run_checks(INTERPRET, "convolutions", env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == ["convolutions", "120"]


def test_op_contract() -> None:
    x, weight = draw(2, 8, 6, 5, dtype=torch.bfloat16), draw(16, 8, 3, 3, dtype=torch.bfloat16)
    bias, op = draw(16, dtype=torch.bfloat16), torch.ops.taut.conv2d.default
    for image in (x, x.to(memory_format=torch.channels_last), x[:0]):
        torch.library.opcheck(op, (image, weight, bias, (1, 1), (1, 1), (1, 1), "v2"))
        torch.library.opcheck(op, (image, weight, None, (2, 1), (0, 1), (1, 2), "v1"))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return conv2d(x + 1, weight, bias, padding=1).float()

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_result_has_the_layout_of_the_image(layout: torch.memory_format) -> None:
    x = draw(2, 8, 6, 5, dtype=torch.bfloat16).to(memory_format=layout)
    y = conv2d(x, draw(16, 8, 3, 3, dtype=torch.bfloat16), padding=1)
    assert y.shape == (2, 16, 6, 5)
    assert y.is_contiguous(memory_format=layout)


X, W = torch.zeros(1, 8, 4, 4, dtype=torch.float16), torch.zeros(8, 8, 3, 3, dtype=torch.float16)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(1, 8, 4, 4)}, "x must be bfloat16, float16, got float32"),
    ({"x": X[0]}, r"x must have shape \[N, C, H, W\]"),
    ({"x": torch.zeros(1, 8, 4, 4, dtype=torch.float16, requires_grad=True)}, "x requires grad"),
    ({"weight": W.float()}, "weight must be float16, got float32"),
    ({"weight": W[:, :4]}, r"weight must have shape \[K, 8, R, S\], none of them 0"),
    ({"weight": W[:0]}, "weight must have shape"),
    ({"weight": W.to("meta")}, "weight must be on cpu, got meta"),
    ({"bias": torch.zeros(7, dtype=torch.float16)}, r"bias must be contiguous \[8\]"),
    ({"bias": torch.zeros(8)}, r"bias must be contiguous \[8\] torch.float16"),
    ({"stride": 0}, "stride must be one or two integers of at least 1, got 0"),
    ({"padding": (1, 1, 1)}, "padding must be one or two integers of at least 0"),
    ({"dilation": (1, 0)}, "dilation must be one or two integers of at least 1"),
    ({"dilation": 3}, r"weight \(8, 8, 3, 3\) is larger than padded x"),
    ({"groups": 8}, "groups must be 1, got 8: grouped convolution is not implemented"),
    ({"version": "v3"}, "version must be None, v1 or v2, got 'v3'"),
    ({"version": "v2", "stride": 3}, r"stride must divide x's 4 rows and 4 columns with v2"),
    ({"version": "v2", "stride": 2}, r"32 input channels with v2 at stride \(2, 2\), got 8"),
    ({"version": "v2", "weight": W[:5]}, "weight must have multiples of 8 channels with v2"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    assert conv2d(X, W).shape == (1, 8, 2, 2)
    with pytest.raises(ValueError, match=message):
        conv2d(**{"x": X, "weight": W} | change)


@pytest.mark.parametrize(
    ("sizes", "pixels", "expected"),
    [
        ((32, 56, 56), 256, (4, 8, 8)),
        ((32, 28, 28), 256, (16, 4, 4)),
        ((32, 14, 14), 128, (32, 2, 2)),
        ((32, 7, 7), 32, (32, 1, 1)),
        ((1, 1, 1000), 64, (1, 1, 64)),
    ],
)
def test_pixel_blocks_leave_little_outside(
    sizes: tuple[int, int, int], pixels: int, expected: tuple[int, int, int]
) -> None:
    assert conv2d_tiles.pixel_block(*sizes, pixels) == expected


def table(**change: Any) -> str:
    tile = {"pixels": 128, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    row: dict[str, Any] = {"C": 64, "K": 64, "R": 3, "S": 3, "P": 56, "Q": 56, "N": [32]}
    row |= {"max_n": None, "tile": tile, "us": [1.0], "cudnn_us": [1.0]}
    rows = [row | {"max_n": 32, "tile": tile | {"num_stages": 4}}, row | change]
    return json.dumps({"gpu": "card", "source": "test", "rows": rows})


def test_table_is_looked_up_by_layer_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = conv2d_tiles.parse(table(), "conv2d-card.json")
    monkeypatch.setattr(conv2d_tiles, "tables", lambda: {"card": parsed})
    lookup, layer = conv2d_tiles.lookup.__wrapped__, (64, 64, 3, 3, 56, 56)
    assert lookup("card", 32, layer).num_stages == 4
    assert lookup("card", 33, layer).num_stages == 3
    assert lookup("card", 33, (64, 64, 3, 3, 56, 57)) == conv2d_tiles.rule(
        33, (64, 64, 3, 3, 56, 57)
    )
    for change, message in (
        ({"extra": 1}, "conv2d-card.json: a row needs exactly"),
        ({"max_n": 40}, "max_n must be null in the last row"),
        ({"tile": {"pixels": 3}}, "conv2d-card.json: C=64 .*K=64"),
    ):
        with pytest.raises(ValueError, match=message):
            conv2d_tiles.parse(table(**change), "conv2d-card.json")


# N, C, H, W, K, R, S, stride, padding, dilation
LAYERS: list[tuple[Any, ...]] = [
    (4, 64, 56, 56, 64, 3, 3, 1, 1, 1),
    (3, 128, 14, 14, 256, 3, 3, 1, 1, 1),
    (2, 512, 7, 7, 512, 3, 3, 1, 1, 1),
    (2, 64, 9, 33, 72, 1, 1, 1, 0, 1),
    (2, 24, 17, 5, 40, 3, 2, 1, (2, 0), (2, 1)),
    (2, 64, 28, 28, 128, 3, 3, 2, 1, 1),
    (3, 512, 14, 14, 512, 3, 3, 2, 1, 1),
    (5, 96, 12, 10, 40, 3, 3, (3, 2), (2, 0), 1),
    (3, 24, 12, 10, 40, 3, 3, (3, 1), (2, 0), 1),
    (2, 64, 14, 9, 24, 1, 1, (2, 1), 0, 1),
    (2, 64, 9, 9, 24, 3, 3, 2, 1, 1),
    (2, 3, 64, 64, 64, 7, 7, 2, 3, 1),
    (1, 5, 9, 9, 3, 3, 3, 1, 1, 2),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_gpu_kernels_match_reference(layer: tuple[Any, ...], dtype: torch.dtype) -> None:
    N, C, H, W, K, R, S, stride, padding, dilation = layer
    image = draw(N, C, H, W, dtype=dtype, device="cuda")
    weight, bias = draw(K, C, R, S, dtype=dtype, device="cuda"), draw(K, dtype=dtype, device="cuda")
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    sizes = [(o, o) if isinstance(o, int) else o for o in options.values()]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        gold = convolution.conv2d_ref(
            image.double(), weight.double(), bias.double(), Window(*sizes)
        )
        reference = convolution.conv2d_ref(image, weight, bias, Window(*sizes))
    versions = ("v1",) if why_not_blocks(image, weight, Window(*sizes)) else ("v1", "v2")
    for x in (image, image.to(memory_format=torch.channels_last)):
        for version in versions:
            with testing.nan_poison():
                y = conv2d(x, weight, bias, **options, version=version)
            testing.assert_within_budget(y, gold, reference)
            assert y.stride() == convolution.conv2d_ref(x, weight, bias, Window(*sizes)).stride()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile",
    [
        ConvTile(256, 128, 64, 8, 3),
        ConvTile(256, 64, 64, 4, 3),
        ConvTile(128, 128, 64, 8, 4),
        ConvTile(64, 64, 32, 4, 4),
        ConvTile(32, 128, 64, 8, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("stride", [1, 2])
def test_gpu_tiles_are_right_and_repeat_their_bits(tile: ConvTile, stride: int) -> None:
    window = Window((stride, stride), (1, 1), (1, 1))
    x = draw(9, 80, 14, 10, dtype=torch.bfloat16, device="cuda")
    x = x.to(memory_format=torch.channels_last)
    weight = draw(136, 80, 3, 3, dtype=torch.bfloat16, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        gold = convolution.conv2d_ref(x.double(), weight.double(), None, window)
        reference = convolution.conv2d_ref(x, weight, None, window)
    with testing.nan_poison():
        y = convolution.launch("v2", tile, x, weight, None, window)
    testing.assert_within_budget(y, gold, reference)
    for _ in range(20):
        assert torch.equal(convolution.launch("v2", tile, x, weight, None, window), y)
