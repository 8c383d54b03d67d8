"""The decode regime of `taut::w4a16_gemm` (M ≤ 16): launcher, ahead-of-time variants, GPU.

The jit kernel is inline assembly, which the Triton interpreter cannot run: it is compiled ahead of
time (test_aot.py) and runs on a GPU (marker `gpu`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from taut_kernels import _launch, testing, tiles_decode
from taut_kernels.gemm import w4a16_decode as decode
from taut_kernels.gemm import w4a16_decode_variants
from taut_kernels.gemm._w4a16_decode_jit import w4a16_decode_kernel
from taut_kernels.gemm.w4a16 import w4a16_gemm_ref
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


def make_case(
    M: int, N: int, K: int, G: int, dtype: torch.dtype, asymmetric: bool, device: str = "cpu"
) -> testing.W4A16Case:
    return testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device=device
    )


def check(case: testing.W4A16Case, tile: DecodeTile) -> torch.Tensor:
    arguments = case.operands()
    with testing.nan_poison():
        actual = decode.launch(tile, *arguments)
    testing.assert_within_budget(actual, case.gold(), w4a16_gemm_ref(*arguments))
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
@pytest.mark.parametrize("tile", ["k_warps", "split"])
def test_gpu_graph_replays_on_new_activations(tile: str) -> None:
    case = make_case(7, 4096, 3072, 128, torch.bfloat16, False, "cuda")
    arguments = case.operands()
    decode.launch(TILES[tile], *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode.launch(TILES[tile], *arguments)
    for seed in range(20):
        case.x.copy_(torch.randn(case.x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        reference = w4a16_gemm_ref(*arguments)
        testing.assert_within_budget(y, case.gold(), reference)
        assert torch.equal(y, decode.launch(TILES[tile], *arguments)), "bits differ between runs"


def test_kernel_variants_cover_every_measured_tile_and_every_format() -> None:
    variants = list(w4a16_decode_variants.kernel_variants())
    assert len(variants) == len({(v.label, v.tile, v.targets) for v in variants})
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
    monkeypatch.setattr(decode, "_KERNEL", _launch.Launcher(recorder))
    arguments = make_case(M, N, 1536, 128, torch.bfloat16, asymmetric=True).operands()
    y = decode.launch(TILES[tile], *arguments)
    assert y.shape == (M, N)
    assert recorder.grid == (*grid, 1)
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
