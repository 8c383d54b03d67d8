"""The `wgmma` ring kernel whose stages TMA fills: tile, launcher, NumPy, GPU.

Layouts, registers and fences are Triton's to compile (test_aot.py) and a GPU's to run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from taut_kernels import _launch, testing, testing_gluon_wgmma
from taut_kernels.gemm import w4a16_wgmma_ring as ring
from taut_kernels.gemm import w4a16_wgmma_tma
from taut_kernels.gemm._w4a16_wgmma_tma_jit import w4a16_wgmma_tma_kernel
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no CUDA device of sm_90",
)
DTYPES = (torch.float16, torch.bfloat16)
TILES = {
    "one": WgmmaRingTile(16, 1, 1, 4, 1, 3, False, parts=2, running=2, tma=True),
    "two": WgmmaRingTile(64, 2, 1, 2, 1, 4, False, parts=2, running=2, tma=True),
    "wide": WgmmaRingTile(64, 1, 2, 2, 1, 3, False, parts=4, running=3, tma=True),
    "split": WgmmaRingTile(32, 1, 2, 2, 3, 4, False, parts=2, running=2, tma=True),
    "half": WgmmaRingTile(32, 1, 1, 1, 2, 6, False, parts=4, running=1, tma=True),
}


OPTIONS = {"num_warps", "maxnreg", "launch_pdl"}


def make_case(
    M: int, N: int, K: int, G: int, dtype: torch.dtype, asymmetric: bool, device: str = "cpu"
) -> testing.W4A16Case:
    return testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device=device
    )


class OnNumPy:
    """Stands in for the jit kernel: runs it on NumPy and remembers how it was launched."""

    arg_names = w4a16_wgmma_tma_kernel.arg_names

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.grid = grid
            named = dict(zip(self.arg_names, arguments, strict=False))
            named |= {name: v for name, v in constants.items() if name not in OPTIONS}
            testing_gluon_wgmma.run_fed(w4a16_wgmma_tma_kernel, grid, named)

        return launch


@pytest.mark.parametrize(
    ("tile", "M", "N", "K", "G", "dtype", "asymmetric", "grid"),
    [
        ("one", 16, 64, 512, 128, torch.bfloat16, False, (1, 1, 1)),
        ("one", 5, 80, 1088, 32, torch.float16, True, (2, 1, 1)),
        ("two", 50, 272, 1088, 64, torch.float16, True, (3, 1, 1)),
        ("two", 70, 128, 768, -1, torch.bfloat16, True, (1, 1, 2)),
        ("wide", 64, 144, 640, 128, torch.bfloat16, False, (2, 1, 1)),
        ("split", 33, 144, 1088, 32, torch.bfloat16, True, (2, 3, 2)),
        ("half", 20, 64, 1152, 128, torch.float16, False, (1, 2, 1)),
        ("half", 20, 64, 576, 64, torch.bfloat16, True, (1, 2, 1)),
    ],
)
def test_kernel_computes_the_product_on_numpy(
    tile: str,
    M: int,
    N: int,
    K: int,
    G: int,
    dtype: torch.dtype,
    asymmetric: bool,
    grid: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = OnNumPy()
    monkeypatch.setattr(w4a16_wgmma_tma, "_KERNEL", _launch.Launcher(kernel))
    case = make_case(M, N, K, G, dtype, asymmetric)
    operands = case.operands()
    with testing.nan_poison():
        actual = ring.launch(TILES[tile], *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert kernel.grid == grid
    assert not operands[5].any(), "arrivals must be 0 again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reordered": True}, "tma takes neither reordered nor summed"),
        ({"summed": True, "split_k": 2}, "tma takes neither reordered nor summed"),
    ],
)
def test_tile_refuses_what_the_kernel_cannot_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TILES["two"], **change)


def test_launch_refuses_fewer_features_than_a_tile_has_rows() -> None:
    operands = make_case(16, 48, 512, 64, torch.bfloat16, False).operands()
    with pytest.raises(ValueError, match="takes 64 features at least, got 48"):
        ring.launch(TILES["one"], *operands)


@gpu
@needs_gpu
@pytest.mark.parametrize(("tile", "M"), [(t, 2 * TILES[t].block_m - 9) for t in TILES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("K", "G"), [(1088, 32), (576, 64), (1152, 128), (704, -1), (2048, 128)])
def test_gpu_every_cut_and_format(
    tile: str, M: int, K: int, G: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    for N in (272, 1040):
        case = make_case(M, N, K, G, dtype, asymmetric, "cuda")
        operands = case.operands()
        with testing.nan_poison():
            actual = ring.launch(TILES[tile], *operands)
        testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
        for _ in range(5):
            again = ring.launch(TILES[tile], *operands)
            assert torch.equal(again, actual), "bits differ between runs"
        assert not operands[5].any(), "arrivals must be 0 again"


@gpu
@needs_gpu
def test_gpu_a_product_of_a_product_waits_for_its_activations() -> None:
    operands = make_case(60, 1024, 1024, 128, torch.bfloat16, False, "cuda").operands()
    tile = TILES["split"]
    expected = ring.launch(tile, ring.launch(tile, *operands), *operands[1:])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [ring.launch(tile, ring.launch(tile, *operands), *operands[1:]) for _ in range(8)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(one, expected) for one in found)
