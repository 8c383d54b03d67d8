"""`taut::w4a16_decode`: specification, layout, launcher, op contract, GPU.

The jit kernel is inline assembly, which the Triton interpreter cannot run: it is compiled ahead of
time (test_aot.py) and runs on a GPU (marker `gpu`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from taut_kernels import formats, formats_decode, testing, tiles_decode
from taut_kernels.gemm import w4a16_decode as decode
from taut_kernels.gemm import w4a16_decode_variants
from taut_kernels.gemm._w4a16_decode_jit import w4a16_decode_kernel
from taut_kernels.tiles_decode import DecodeTile

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DTYPES = (torch.float16, torch.bfloat16)
TILES = {
    "plain": DecodeTile(1, 1, 1, 1, 4, 4, 1, False),
    "k_warps": DecodeTile(1, 1, 4, 1, 4, 2, 2, True),
    "row_warps": DecodeTile(1, 4, 1, 1, 2, 1, 1, False),
    "two_rows": DecodeTile(2, 2, 2, 1, 4, 4, 4, False),
    "split": DecodeTile(1, 2, 2, 3, 4, 4, 2, True),
    "deep": DecodeTile(1, 1, 2, 1, 8, 8, 8, False),
}


@pytest.mark.parametrize(("N", "K", "G"), [(16, 64, 32), (48, 576, 64), (80, 1152, 128)])
def test_layout_inverts(N: int, K: int, G: int) -> None:
    generator = torch.Generator().manual_seed(N)
    values = torch.randint(-8, 8, (N, K), generator=generator).to(torch.int8)
    packed = formats_decode.repack_weight(formats.pack_weight(values), K)
    assert packed.shape == (N // 16, K // 64, 32, 4)
    assert torch.equal(formats_decode.unpack_weight(packed).to(torch.int8) - 8, values)
    zeros = torch.randint(-8, 8, (N, K // G), generator=generator).to(torch.int8)
    for dtype in DTYPES:
        scale = torch.randn(N, K // G, generator=generator).to(dtype)
        pairs = formats_decode.repack_scale(scale)
        assert torch.equal(formats_decode.unpair_rows(pairs, K // G), scale)
        offsets = formats_decode.repack_zero_point(formats.pack_zero_point(zeros), N, dtype)
        stored = formats_decode.stored_zero_points(offsets, K // G)
        assert torch.equal(stored.to(torch.int8) - 8, zeros)


def test_layout_puts_a_nibble_where_its_docstring_says() -> None:
    values = torch.full((32, 128), -8, dtype=torch.int8)
    # tile 1, r = 1, g = 3; chunk 1, h = 1, t = 2, i = 0, j = 1, b = 1.
    values[16 + 8 + 3, 64 + 32 + 16 + 0 + 2 + 1] = 5
    packed = formats_decode.repack_weight(formats.pack_weight(values), 128)
    expected = torch.zeros_like(packed)
    expected[1, 1, 4 * 3 + 2, 2] = (13 << (4 * (4 + 2 + 1))) - 2**32  # int32 wraps
    assert torch.equal(packed, expected)


def test_layout_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        formats_decode.repack_weight(torch.zeros(24, 8, dtype=torch.int32), 64)
    with pytest.raises(ValueError, match="multiple of 64"):
        formats_decode.repack_weight(torch.zeros(16, 4, dtype=torch.int32), 32)
    with pytest.raises(ValueError, match="weight_scale must be 2-D"):
        formats_decode.repack_scale(torch.zeros(16, 2))
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16"):
        formats_decode.repack_zero_point(torch.zeros(2, 1, dtype=torch.int32), 16, torch.float32)


def operands(case: testing.W4A16Case) -> tuple[Any, ...]:
    N, dtype = case.values.shape[0], case.x.dtype
    zero = case.weight_zero_point
    return (
        case.x,
        formats_decode.repack_weight(case.weight_packed, case.values.shape[1]),
        formats_decode.repack_scale(case.weight_scale),
        None if zero is None else formats_decode.repack_zero_point(zero, N, dtype),
        case.bias,
        decode.make_arrivals(N, case.x.device),
        case.group_size,
    )


def make_case(
    M: int, N: int, K: int, G: int, dtype: torch.dtype, asymmetric: bool, device: str = "cpu"
) -> testing.W4A16Case:
    return testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device=device
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(
    ("M", "N", "K", "G"),
    [(1, 64, 128, 32), (3, 48, 576, 64), (16, 80, 1152, 128), (5, 32, 192, -1)],
)
def test_reference_matches_the_formula(
    M: int, N: int, K: int, G: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    case = make_case(M, N, K, G, dtype, asymmetric)
    gold = case.gold()
    actual = decode.w4a16_decode_ref(*operands(case))
    assert testing.max_error(actual, gold) <= torch.finfo(dtype).eps * gold.abs().max().item()


@pytest.mark.parametrize("asymmetric", [False, True])
def test_op_contract(asymmetric: bool) -> None:
    case = make_case(3, 48, 128, 32, torch.bfloat16, asymmetric)
    torch.library.opcheck(torch.ops.taut.w4a16_decode.default, operands(case))


def test_compiles_without_graph_breaks() -> None:
    case = make_case(3, 48, 128, 32, torch.bfloat16, asymmetric=True)
    x, qweight, scales, zeros, bias, arrivals, group = operands(case)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = decode.w4a16_decode(
            x, qweight, scales, zeros, group_size=group, arrivals=arrivals, bias=bias
        )
        return y * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5, 9):
        x = torch.randn(M, 128).to(torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


def bad(**change: Any) -> dict[str, Any]:
    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bad(x=torch.tensor(1.0)), "x must have at least one dimension"),
        (bad(x=torch.zeros(2, 128)), "float16 or bfloat16"),
        (bad(x=torch.zeros(17, 128, dtype=torch.float16)), "x must have at most 16 rows, got 17"),
        (bad(x=torch.zeros(2, 96, dtype=torch.float16)), "multiple of 64, a lane's 16-byte load"),
        (bad(group_size=48), "32, 64, 128"),
        (
            bad(qweight=torch.zeros(3, 2, 32, dtype=torch.int32)),
            "qweight must have four dimensions",
        ),
        (bad(qweight=torch.zeros(3, 1, 32, 4, dtype=torch.int32)), "qweight must have shape"),
        (bad(qweight=torch.zeros(3, 2, 32, 4)), "qweight must be torch.int32"),
        (bad(scales=torch.zeros(3, 2, 8, 4, 2, dtype=torch.float16)), "scales must have shape"),
        (bad(scales=torch.zeros(3, 1, 8, 4, 2)), "scales must be torch.float16"),
        (bad(zeros=torch.zeros(3, 1, 8, 4, 2)), "zeros must be torch.float16"),
        (bad(bias=torch.zeros(47, dtype=torch.float16)), "bias must have shape"),
        (bad(bias=torch.zeros(48, dtype=torch.float16, device="meta")), "bias must be on cpu"),
        (bad(arrivals=torch.zeros(2, dtype=torch.int32)), "arrivals must have shape"),
        (bad(x=torch.zeros(2, 128, dtype=torch.float16, requires_grad=True)), "forward only"),
    ],
)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    case = make_case(2, 48, 128, 32, torch.float16, asymmetric=True)
    names = ("x", "qweight", "scales", "zeros", "bias", "arrivals", "group_size")
    arguments = dict(zip(names, operands(case), strict=True))
    assert decode.w4a16_decode(**arguments).shape == (2, 48)
    with pytest.raises(ValueError, match=message):
        decode.w4a16_decode(**arguments | change)


def test_layers_without_a_layout_say_why() -> None:
    assert decode.why_not_supported(64, 128, 32, torch.float16) is None
    assert "multiple of 16" in str(decode.why_not_supported(24, 128, 32, torch.float16))
    assert "multiple of 64" in str(decode.why_not_supported(64, 96, 32, torch.float16))
    assert "31 bits" in str(decode.why_not_supported(2**18, 2**17, 128, torch.float16))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
        lambda x: torch.cat([x[:, :1], x], dim=1)[:, 1:],
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    ],
)
def test_activations_reach_the_kernel_aligned(view: Any) -> None:
    x = torch.randn(3, 64).to(torch.float16)
    aligned = decode._aligned(view(x))
    assert torch.equal(aligned, x)
    assert (aligned.stride(1), aligned.stride(0) % 8, aligned.data_ptr() % 16) == (1, 0, 0)


def check(case: testing.W4A16Case, tile: DecodeTile) -> torch.Tensor:
    arguments = operands(case)
    with testing.nan_poison():
        actual = decode.launch(tile, *arguments)
    testing.assert_within_budget(actual, case.gold(), decode.w4a16_decode_ref(*arguments))
    assert not arguments[5].any(), "arrivals must be 0 again"
    return actual


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("K", "G"), [(1088, 32), (576, 64), (1152, 128), (704, -1), (1024, 128)])
def test_gpu_every_format(K: int, G: int, asymmetric: bool, dtype: torch.dtype) -> None:
    for M in range(1, 17):
        check(make_case(M, 80, K, G, dtype, asymmetric, "cuda"), TILES["plain"])


@gpu
@needs_gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("N", "K", "G"), [(80, 3072, 128), (16, 64, 64), (144, 1600, 32), (4096, 4096, -1)]
)
def test_gpu_every_cut(N: int, K: int, G: int, tile: str) -> None:
    cut = dataclasses.replace(TILES[tile], row_tiles=min(TILES[tile].row_tiles, N // 16))
    for M in (1, 5, 8, 9, 16):
        check(make_case(M, N, K, G, torch.bfloat16, True, "cuda"), cut)


@gpu
@needs_gpu
def test_gpu_adversarial_values() -> None:
    for edit in (
        lambda case: case.x.zero_(),
        lambda case: case.x[:, 5].fill_(20000.0),
        lambda case: case.x.fill_(-0.0),
        lambda case: case.weight_scale.fill_(torch.finfo(torch.float16).smallest_normal / 4),
    ):
        case = make_case(4, 32, 640, 32, torch.float16, True, "cuda")
        edit(case)
        check(case, TILES["k_warps"])


@gpu
@needs_gpu
def test_gpu_strided_activations() -> None:
    case = make_case(5, 64, 256, 64, torch.bfloat16, False, "cuda")
    wide = torch.full((5, 600), float("nan"), dtype=torch.bfloat16, device="cuda")
    for start in (8, 3):
        wide.fill_(float("nan"))
        wide[:, start : start + 256] = case.x
        check(dataclasses.replace(case, x=wide[:, start : start + 256]), TILES["plain"])


@gpu
@needs_gpu
@pytest.mark.parametrize("tile", ["k_warps", "split"])
def test_gpu_graph_replays_on_new_activations(tile: str) -> None:
    case = make_case(7, 4096, 3072, 128, torch.bfloat16, False, "cuda")
    arguments = operands(case)
    decode.launch(TILES[tile], *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode.launch(TILES[tile], *arguments)
    for seed in range(20):
        case.x.copy_(torch.randn(case.x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        reference = decode.w4a16_decode_ref(*arguments)
        testing.assert_within_budget(y, case.gold(), reference)
        assert torch.equal(y, decode.launch(TILES[tile], *arguments)), "bits differ between runs"


@gpu
@needs_gpu
def test_gpu_op_picks_a_tile() -> None:
    case = make_case(2, 4096, 4096, 128, torch.bfloat16, True, "cuda")
    arguments = operands(case)
    actual = torch.ops.taut.w4a16_decode(*arguments)
    testing.assert_within_budget(actual, case.gold(), decode.w4a16_decode_ref(*arguments))
    empty = torch.ops.taut.w4a16_decode(case.x[:0], *arguments[1:])
    assert empty.shape == (0, 4096)


def test_kernel_variants_cover_every_measured_tile_and_every_format() -> None:
    variants = list(w4a16_decode_variants.kernel_variants())
    assert len(variants) == len({(v.label, v.tile) for v in variants})
    measured = {t for table in tiles_decode.tables().values() for t in table.tiles.values()}
    assert measured <= {v.tile for v in variants}
    labels = " ".join(v.label for v in variants)
    for word in ("bf16", "fp16", " asym", " sym", "group=32", "group=64", "group=128", "channel"):
        assert word in labels


class Recorder:
    """Stands in for the jit kernel: remembers how it was launched."""

    arg_names = w4a16_decode_kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.grid, self.arguments, self.constants = grid, arguments, constants

        return launch


@pytest.mark.parametrize(
    ("tile", "N", "M", "grid"),
    [
        ("plain", 80, 1, (5, 1)),
        ("row_warps", 80, 9, (2, 1)),
        ("two_rows", 80, 16, (2, 1)),
        ("two_rows", 16, 3, (1, 1)),
        ("split", 80, 8, (3, 3)),
    ],
)
def test_launch_covers_every_row_and_names_every_argument(
    tile: str, N: int, M: int, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(decode, "w4a16_decode_kernel", recorder)
    arguments = operands(make_case(M, N, 1536, 128, torch.bfloat16, asymmetric=True))
    y = decode.launch(TILES[tile], *arguments)
    assert y.shape == (M, N)
    assert recorder.grid == grid
    named = dict(zip(recorder.arg_names, recorder.arguments, strict=False))
    given = set(named) | set(recorder.constants)
    assert given == set(recorder.arg_names) | {"num_warps", "maxnreg"}
    constants = recorder.constants
    assert constants["TOKEN_TILES"] == (1 if M <= 8 else 2)
    rows = 16 * constants["ROW_TILES"] * constants["ROW_WARPS"]
    assert rows * grid[0] >= N
    if grid[1] == 1:
        assert named["partial_ptr"] is None
        assert named["arrivals_ptr"] is None
    else:
        tokens = 8 * constants["TOKEN_TILES"]
        assert named["partial_ptr"].numel() == grid[0] * grid[1] * rows * tokens
        assert named["arrivals_ptr"].numel() >= grid[0]
    assert (named["M"], named["N"], named["stride_xm"]) == (M, N, 1536)
