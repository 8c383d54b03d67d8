"""The `wgmma` ring kernel whose stages TMA fills: tile, launcher, NumPy, GPU.

Layouts, registers and fences are Triton's to compile (test_aot.py) and a GPU's to run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
from emulator import gluon, hopper, wgmma

from taut_bench import testing
from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import tma as w4a16_wgmma_tma
from taut_kernels.gemm.w4a16.lookup import BUCKETS
from taut_kernels.gemm.w4a16.ring_tile import SHARED_BYTES, WgmmaRingTile
from taut_kernels.gemm.w4a16.tma_kernel import w4a16_wgmma_tma_kernel
from taut_kernels.gemm.w4a16.weight_format import DEFAULT
from taut_kernels.launch import launcher
from tuning import tune_w4a16_wgmma
from tuning.wgmma_tma_candidates import REGISTERS, tma_candidates, well_filled

DTYPES = (torch.float16, torch.bfloat16)
TILES = {
    "one": WgmmaRingTile(16, 1, 1, 4, 1, 3, parts=2, running=2, tma=True),
    "two": WgmmaRingTile(64, 2, 1, 2, 1, 4, parts=2, running=2, tma=True),
    "wide": WgmmaRingTile(64, 1, 2, 2, 1, 3, parts=4, running=3, tma=True),
    "split": WgmmaRingTile(32, 1, 2, 2, 3, 4, parts=2, running=2, tma=True),
    "half": WgmmaRingTile(32, 1, 1, 1, 2, 6, parts=4, running=1, tma=True),
    "grouped": WgmmaRingTile(16, 1, 1, 2, 2, 4, parts=2, running=2, tma=True, group_m=2),
    "thirds": WgmmaRingTile(96, 2, 1, 2, 1, 4, parts=2, running=2, tma=True, group_m=2),
    "wide thirds": WgmmaRingTile(192, 1, 1, 1, 1, 4, parts=4, running=2, tma=True),
    "ninths": WgmmaRingTile(288, 1, 1, 1, 1, 4, parts=4, running=2, tma=True),
    "fifths": WgmmaRingTile(320, 1, 2, 1, 1, 4, parts=4, running=1, tma=True),
    "long thirds": WgmmaRingTile(384, 1, 1, 1, 1, 3, parts=2, running=1, tma=True),
}


def make_case(
    M: int, N: int, K: int, G: int, dtype: torch.dtype, asymmetric: bool, device: str = "cpu"
) -> testing.W4A16Case:
    return testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device=device
    )


def on_numpy() -> gluon.OnNumPy:
    return gluon.OnNumPy(w4a16_wgmma_tma_kernel, wgmma.run_fed)


@pytest.mark.parametrize(
    ("tile", "M", "N", "K", "G", "dtype", "asymmetric", "grid"),
    [
        ("one", 16, 64, 512, 128, torch.bfloat16, False, (1, 1, 1)),
        ("one", 5, 80, 1088, 32, torch.float16, True, (2, 1, 1)),
        ("one", 7, 64, 1408, 128, torch.bfloat16, True, (1, 1, 1)),
        ("two", 50, 272, 1088, 64, torch.float16, True, (3, 1, 1)),
        ("two", 70, 128, 768, -1, torch.bfloat16, True, (1, 1, 2)),
        ("wide", 64, 144, 640, 128, torch.bfloat16, False, (2, 1, 1)),
        ("split", 33, 144, 1088, 32, torch.bfloat16, True, (2, 3, 2)),
        ("half", 20, 64, 1152, 128, torch.float16, False, (1, 2, 1)),
        ("half", 20, 64, 576, 64, torch.bfloat16, True, (1, 2, 1)),
        ("half", 9, 80, 1088, 32, torch.float16, True, (2, 2, 1)),
        ("half", 20, 64, 1664, 128, torch.float16, True, (1, 2, 1)),
        ("grouped", 40, 272, 512, 64, torch.bfloat16, True, (5 * 3, 2, 1)),
        ("grouped", 16, 144, 512, 128, torch.float16, False, (3, 2, 1)),
        ("thirds", 200, 272, 640, 128, torch.bfloat16, False, (3 * 3, 1, 1)),
        ("thirds", 97, 144, 576, 64, torch.float16, True, (2 * 2, 1, 1)),
        ("thirds", 50, 128, 512, 32, torch.bfloat16, True, (1, 1, 1)),
        ("thirds", 20, 128, 512, -1, torch.float16, False, (1, 1, 1)),
        ("wide thirds", 250, 64, 576, 64, torch.bfloat16, True, (1, 1, 2)),
        ("ninths", 300, 80, 576, 64, torch.float16, True, (2, 1, 2)),
        ("ninths", 40, 64, 512, 128, torch.bfloat16, False, (1, 1, 1)),
        ("ninths", 31, 64, 512, 128, torch.bfloat16, True, (1, 1, 1)),
        ("fifths", 321, 144, 512, 32, torch.bfloat16, True, (2, 1, 2)),
        ("long thirds", 384, 64, 512, -1, torch.float16, True, (1, 1, 1)),
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
    kernel = on_numpy()
    monkeypatch.setattr(w4a16_wgmma_tma, "_KERNEL", launcher.Launcher(kernel))
    case = make_case(M, N, K, G, dtype, asymmetric)
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(TILES[tile], *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert kernel.grid == grid
    assert not operands[5].any(), "arrivals must be 0 again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_m": 3}, r"group_m must be one of \(0, 2, 4, 8, 16\), got 3"),
        ({"tma": False, "group_m": 2}, r"group_m must be one of \(0,\), got 2"),
        ({"tma": False, "block_m": 96}, r"block_m must be one of \(16, 32, 64, 128, 256\), got 96"),
        (
            {"block_m": 48},
            r"block_m must be one of \(16, 32, 64, 128, 256, 96, 192, 288, 320, 384\), got 48",
        ),
        ({"block_m": 192, "split_k": 2}, "block_m 192 takes no split_k, got 2"),
    ],
)
def test_tile_refuses_what_the_kernel_cannot_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TILES["two"], **change)


def test_launch_refuses_fewer_features_than_a_tile_has_rows() -> None:
    operands = make_case(16, 48, 512, 64, torch.bfloat16, False).operands()
    with pytest.raises(ValueError, match="takes 64 features at least, got 48"):
        w4a16_launch.launch(TILES["one"], *operands)


def test_kernel_reads_rows_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a16_wgmma_tma, "_KERNEL", launcher.Launcher(on_numpy()))
    case = make_case(20, 80, 512, 64, torch.bfloat16, False)
    x, *others = case.operands()
    wide = torch.full((20, 768), float("nan"), dtype=x.dtype)
    wide[:, :512] = x
    with testing.nan_poison():
        actual = w4a16_launch.launch(TILES["one"], wide[:, :512], *others)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())


@pytest.mark.parametrize(
    ("block_m", "M"),
    [(64, M) for M in (33, 40, 63, 64, 65, 96, 127, 128, 130)]
    + [(96, M) for M in (33, 65, 95, 96, 97, 128, 192, 200)]
    + [(288, M) for M in (33, 287, 288, 289, 320)],
)
def test_no_row_beyond_the_tokens_is_asked_for(
    block_m: int, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMA fills such rows with zeros, which takes it longer than to load rows."""
    asked = set()
    read = hopper.Descriptor.read

    def watched(self: hopper.Descriptor, first: tuple[int, ...]) -> Any:
        if len(first) == 2:
            asked.update(range(first[0], first[0] + self.block_shape[0]))
        return read(self, first)

    monkeypatch.setattr(hopper.Descriptor, "read", watched)
    monkeypatch.setattr(w4a16_wgmma_tma, "_KERNEL", launcher.Launcher(on_numpy()))
    case = make_case(M, 64, 512, 128, torch.bfloat16, False)
    change = {"chunks_per_step": 1, "running": 1} if block_m > 256 else {}
    tile = dataclasses.replace(TILES["two"], group_tiles=1, block_m=block_m, **change)
    with testing.nan_poison():
        actual = w4a16_launch.launch(tile, *case.operands())
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert asked == set(range(M))


def test_table_refuses_a_tile_that_its_own_shape_could_not_launch() -> None:
    def table(N: int, max_m: int, **change: Any) -> str:
        tile = tiles_wgmma.as_fields(dataclasses.replace(TILES["two"], **change))
        row = {"N": N, "K": 4096, "max_m": max_m, "us": 1.5} | tile
        return json.dumps({"gpu": "card", "source": "test", "rows": [row]})

    parsed = tiles_wgmma.parse(table(128, 64), "t.json")
    assert parsed.choices[128, 4096, 2, DEFAULT] == TILES["two"]
    with pytest.raises(ValueError, match=r"t.json: kernel=tma N=112 K=4096 .* takes 128 features"):
        tiles_wgmma.parse(table(112, 64), "t.json")
    # 272 rows in 64s at 512 tokens in 64s: 5 · 8 meetings, 17 are counted.
    change = {"group_tiles": 1, "split_k": 2}
    with pytest.raises(ValueError, match="split_k: 40 tiles meet, arrivals counts 17"):
        tiles_wgmma.parse(table(272, 512, **change), "t.json")
    assert tiles_wgmma.parse(table(272, 128, **change), "t.json")


def test_every_measured_tile_can_be_launched_at_its_most_tokens() -> None:
    """The op's own path: no table's choice raises for want of arrivals or features."""
    fed = 0
    for table in tiles_wgmma.tables().values():
        for (N, _, bucket, _), choice in table.choices.items():
            if isinstance(choice, WgmmaRingTile):
                assert choice.why_not(N, (*BUCKETS, 4096)[bucket]) is None
                fed += choice.tma
    assert fed >= 13


def test_candidates_fit_the_card_and_the_layer() -> None:
    for (N, K), M in itertools.product(PRODUCTS.values(), (16, 32, 64, 128, 256, 512, 4096)):
        found = list(tma_candidates(N, K, M))
        assert bool(found) == (M >= 32)
        assert len(found) == len(set(found))
        for tile in found:
            assert tile.stages_that_fit(128, has_zeros=True) == tile.stages
            assert tile.why_not(N, M) is None
            threads = 32 * tile.num_warps + 128
            resident = REGISTERS // (tile.registers * threads)
            assert resident * tile.stages * tile.stage_bytes(0, has_zeros=False) < SHARED_BYTES
            assert tune_w4a16_wgmma.regime_of(tile) == "tma"
            places = 132 * resident
            programs = -(-N // tile.rows) * -(-M // tile.block_m) * tile.split_k
            assert tile.split_k == 1 or programs <= places


def test_fullest_card_comes_first() -> None:
    # 64 tiles of 64 rows: two splits fill 128 of 132 places, one fills half of that.
    tile = WgmmaRingTile(64, 1, 1, 4, 1, 5, tma=True)
    assert well_filled(tile, 4096, 4096, 64, 1) == [(2, 8)]
    splits = [split for split, _ in well_filled(tile, 4096, 4096, 64, 2)]
    assert splits[0] == 4


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(
    ("tile", "M"),
    [(t, blocks * TILES[t].block_m - less) for t in TILES for blocks, less in ((2, 9), (1, 5))],
)
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
            actual = w4a16_launch.launch(TILES[tile], *operands)
        testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
        for _ in range(5):
            again = w4a16_launch.launch(TILES[tile], *operands)
            assert torch.equal(again, actual), "bits differ between runs"
        assert not operands[5].any(), "arrivals must be 0 again"


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_a_product_of_a_product_waits_for_its_activations() -> None:
    operands = make_case(60, 1024, 1024, 128, torch.bfloat16, False, "cuda").operands()
    tile = TILES["split"]
    expected = w4a16_launch.launch(tile, w4a16_launch.launch(tile, *operands), *operands[1:])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [
            w4a16_launch.launch(tile, w4a16_launch.launch(tile, *operands), *operands[1:])
            for _ in range(8)
        ]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(one, expected) for one in found)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("M", [300, 385, 512])
@pytest.mark.parametrize("group_m", [2, 8])
def test_gpu_the_order_of_blocks_changes_no_bit(M: int, group_m: int) -> None:
    operands = make_case(M, 1040, 1152, 128, torch.bfloat16, True, "cuda").operands()
    tile = dataclasses.replace(TILES["split"], block_m=128, registers=168)
    expected = w4a16_launch.launch(tile, *operands)
    with testing.nan_poison():
        grouped = w4a16_launch.launch(dataclasses.replace(tile, group_m=group_m), *operands)
    assert torch.equal(grouped, expected)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("M", [1, 17, 64])
def test_gpu_reads_rows_that_lie_apart(M: int) -> None:
    case = make_case(M, 1040, 1152, 128, torch.bfloat16, True, "cuda")
    x, *others = case.operands()
    wide = torch.full((M, 2048), float("nan"), dtype=x.dtype, device="cuda")
    wide[:, :1152] = x
    actual = w4a16_launch.launch(TILES["two"], wide[:, :1152], *others)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
