"""The decode regime of `taut::w4a16_gemm` (M ≤ 16): launcher, ahead-of-time variants, GPU.

The jit kernel is inline assembly, which the Triton interpreter cannot run: it is compiled ahead of
time (test_aot.py) and runs on a GPU (marker `gpu`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from taut_bench import testing
from taut_bench.instruments.forms import w4a16 as w4a16_forms
from taut_kernels.gemm.w4a16 import decode
from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.gemm.w4a16.decode_kernel import w4a16_decode_kernel
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.op import w4a16_gemm_ref
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import launcher
from taut_kernels.launch.tile_tables import Table

DTYPES = (torch.float16, torch.bfloat16)
TILES = {
    "plain": DecodeTile(1, 1, 1, 4, 4, 1, False),
    "k_warps": DecodeTile(1, 4, 1, 4, 2, 2, True),
    "row_warps": DecodeTile(4, 1, 1, 2, 1, 1, False),
    "both": DecodeTile(2, 2, 1, 4, 4, 4, False),
    "split": DecodeTile(2, 2, 3, 4, 4, 2, True),
    "deep": DecodeTile(1, 2, 1, 8, 8, 8, False),
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
        actual = w4a16_launch.launch(tile, *arguments)
    testing.assert_within_budget(actual, case.gold(), w4a16_gemm_ref(*arguments))
    assert not arguments[5].any(), "arrivals must be 0 again"
    return actual


class Launched:
    """Stands in for the compiled kernel; keeps grids and arguments."""

    function, packed_metadata = 77, (4, 1, 0)
    arg_names = w4a16_decode_kernel.arg_names

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.calls: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Launched:
            self.compiled.append(named)
            return self

        return launch

    def run(self, *arguments: Any) -> None:
        self.calls.append((arguments[:3], arguments[9:]))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Run the op's launcher on CPU tensors, as on a card whose kernel does nothing."""
    found = Launched()
    monkeypatch.setattr(launcher, "_current_stream", lambda: lambda index: 0)
    monkeypatch.setattr(decode, "_KERNEL", launcher.Launcher(found))
    w4a16._plan.cache_clear()
    yield found
    w4a16._plan.cache_clear()


def operands(M: int, *, N: int = 4096, K: int = 4096, **options: bool) -> tuple[Any, ...]:
    case = testing.make_w4a16_case(
        M, N, K, 128, dtype=torch.bfloat16, **{"asymmetric": False, "with_bias": False} | options
    )
    return case.operands()


def test_a_planned_call_brings_its_own_tensors(launched: Launched) -> None:
    y = w4a16._launch_w4a16_gemm(*operands(3))
    for _ in range(3):
        given = operands(3)
        y = w4a16._launch_w4a16_gemm(*given)
        arguments = launched.calls[-1][1]
        addresses = [None if t is None else t.data_ptr() for t in given[:5]]
        assert list(arguments[:6]) == [*addresses, y.data_ptr()]
        assert arguments[8:11] == (3, 4096, 4096)
        assert y.shape == (3, 4096)
    assert len(launched.compiled) == 1
    assert len(launched.calls) == 3


def test_plans_keep_no_tensor_alive(launched: Launched) -> None:
    given = operands(2, asymmetric=True, with_bias=True)
    y = w4a16._launch_w4a16_gemm(*given)
    kept = [weakref.ref(tensor) for tensor in (*given[:6], y)]
    del given, y
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_every_form_has_a_plan_of_its_own(launched: Launched) -> None:
    forms: list[dict[str, bool]] = [{}, {"asymmetric": True}, {"with_bias": True}]
    for options in forms * 2:
        w4a16._launch_w4a16_gemm(*operands(4, **options))
    marks = [(named["HAS_ZEROS"], named["HAS_BIAS"]) for named in launched.compiled]
    assert marks == [(False, False), (True, False), (False, True)]
    assert len(launched.calls) == 3
    # Tokens of one tile share a form, and have grids and sizes of their own.
    for M in (1, 8):
        assert w4a16._launch_w4a16_gemm(*operands(M)).shape == (M, 4096)
        assert launched.calls[-1][1][8] == M
    assert len(launched.compiled) == len(forms)


def test_rows_that_triton_would_compile_otherwise_are_not_the_plans(launched: Launched) -> None:
    x, *rest = operands(2)
    expected = w4a16._launch_w4a16_gemm(x, *rest)
    wide = torch.zeros(2, 4096 + 8, dtype=x.dtype)[:, :4096]
    w4a16._launch_w4a16_gemm(wide, *rest)  # rows 16-byte aligned, their stride no multiple of 16
    assert (len(launched.compiled), len(launched.calls)) == (2, 0)
    odd = torch.zeros(2 * 4096 + 1, dtype=x.dtype)[1:].view(2, 4096)
    w4a16._launch_w4a16_gemm(odd, *rest)  # copied to where they are aligned
    assert (len(launched.compiled), len(launched.calls)) == (2, 1)
    assert launched.calls[0][1][0] % 16 == 0
    assert expected.shape == (2, 4096)


def test_a_tile_that_is_tried_leaves_the_op_its_own(launched: Launched) -> None:
    given = operands(2)
    w4a16._launch_w4a16_gemm(*given)
    w4a16_launch.launch(TILES["split"], *given)
    w4a16._launch_w4a16_gemm(*given)
    splits = [named["CUT"].split_k for named in launched.compiled]
    assert splits == [tiles_decode.lookup(None, 4096, 4096, hopper=False).split_k, 3]
    assert launched.calls[-1][0][1] == splits[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("K", "G"), [(1088, 32), (576, 64), (1152, 128), (704, -1), (1024, 128)])
def test_gpu_every_format(K: int, G: int, asymmetric: bool, dtype: torch.dtype) -> None:
    for M in range(1, 17):
        check(make_case(M, 80, K, G, dtype, asymmetric, "cuda"), TILES["plain"])


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("N", "K", "G"), [(80, 3072, 128), (16, 64, 64), (144, 1600, 32), (4096, 4096, -1)]
)
def test_gpu_every_cut(N: int, K: int, G: int, tile: str) -> None:
    for M in (1, 5, 8, 9, 16):
        check(make_case(M, N, K, G, torch.bfloat16, True, "cuda"), TILES[tile])


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["k_warps", "split"])
def test_gpu_graph_replays_on_new_activations(tile: str) -> None:
    case = make_case(7, 4096, 3072, 128, torch.bfloat16, False, "cuda")
    arguments = case.operands()
    w4a16_launch.launch(TILES[tile], *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = w4a16_launch.launch(TILES[tile], *arguments)
    for seed in range(20):
        case.x.copy_(torch.randn(case.x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        reference = w4a16_gemm_ref(*arguments)
        testing.assert_within_budget(y, case.gold(), reference)
        assert torch.equal(y, w4a16_launch.launch(TILES[tile], *arguments)), (
            "bits differ between runs"
        )


def test_kernel_variants_cover_every_measured_tile_and_every_format() -> None:
    variants = list(w4a16_forms.decode_variants())
    assert len(variants) == len({(v.label, v.tile, v.target) for v in variants})
    measured = {t for table in tiles_decode.tables().values() for t in table.choices.values()}
    assert measured <= {v.tile for v in variants}
    labels = " ".join(v.label for v in variants)
    for word in ("bf16", "fp16", " asym", " sym", "group=32", "group=64", "group=128", "channel"):
        assert word in labels


@pytest.mark.parametrize("name", ["g32-zp", "g64", "g128-zp"])
def test_a_row_of_a_format_is_compiled_in_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, though the rule compiles one of them in its largest format too."""
    weights = WeightFormat(name)
    odd = DecodeTile(1, 2, 1, 2, 2, 2, True)
    decodes = {(4096, 4096, weights): odd}
    decodes[32768, 1024, weights] = tiles_decode.rule(32768, 1024, hopper=True)
    tables = {"card": Table("card", decodes)}
    monkeypatch.setattr(tiles_decode, "tables", lambda: tables)
    choices: dict[Any, tiles_wgmma.Choice] = {
        (4096, 4096, 0, weights): RingTile(1, 8, 2, 5, 4),
        (4096, 4096, 2, weights): tiles_wgmma.WgmmaTile(64, 4, 2, 4, True, False),
        (4096, 4096, 3, weights): WgmmaRingTile(128, 1, 2, 2, 3, 3),
    }
    products = {"card": Table("card", choices)}
    monkeypatch.setattr(tiles_wgmma, "tables", lambda: products)
    scheme = f"{'asym' if weights.zero_points else 'sym'} group={weights.group_size} K="
    for every_variant, tiles in (
        (w4a16_forms.decode_variants, decodes.values()),
        (w4a16_forms.decode_ring_variants, [choices[4096, 4096, 0, weights]]),
        (w4a16_forms.portable_variants, [choices[4096, 4096, 2, weights]]),
        (w4a16_forms.wgmma_variants, [choices[4096, 4096, 3, weights]]),
    ):
        variants = list(every_variant())
        assert len(variants) == len({(v.label, v.tile, v.target) for v in variants})
        for tile in tiles:
            own = [v for v in variants if v.tile == tile and f"bf16 {scheme}" in v.label]
            assert own
            for variant in own:
                assert variant.constants["GROUP_SIZE"] == weights.group_size
                assert ("zeros_ptr" in variant.pointers) == weights.zero_points


@pytest.mark.parametrize("M", [1, 9, 16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, 4096])
def test_a_call_takes_its_formats_tile(
    group_size: int, has_zeros: bool, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[WeightFormat] = []
    tile = DecodeTile(1, 2, 1, 2, 2, 2, True)

    def decode_tile(*shape: Any, hopper: bool) -> DecodeTile:
        asked.append(shape[3])
        return tile

    def regime(*shape: Any, hopper: bool) -> str:
        asked.append(shape[4])
        return "decode"

    monkeypatch.setattr(tiles_decode, "lookup", decode_tile)
    monkeypatch.setattr(tiles_decode, "plain_rule", lambda *shape: tile)
    monkeypatch.setattr(tiles_wgmma, "lookup", regime)
    monkeypatch.setattr(w4a16_launch, "plan", lambda tile, call: (tile, call.weights))
    form = (group_size, torch.bfloat16, torch.device("cpu"), has_zeros, False)
    planned, weights = w4a16._plan.__wrapped__(M, 4096, 4096, *form)
    assert planned == tile
    size = group_size if group_size < 128 else 128
    assert (weights.group_size, weights.zero_points) == (size, has_zeros)
    assert asked == [weights], "the decode kernel's table or the other kernels'"


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
        ("both", 80, 16, (3, 1)),
        ("both", 16, 3, (1, 1)),
        ("split", 80, 8, (3, 3)),
    ],
)
def test_launch_covers_every_row_and_names_every_argument(
    tile: str, N: int, M: int, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(decode, "_KERNEL", launcher.Launcher(recorder))
    arguments = make_case(M, N, 1536, 128, torch.bfloat16, asymmetric=True).operands()
    y = w4a16_launch.launch(TILES[tile], *arguments)
    assert y.shape == (M, N)
    assert recorder.grid == (*grid, 1)
    named = dict(zip(recorder.arg_names, recorder.arguments, strict=False))
    given = set(named) | set(recorder.constants)
    assert given == set(recorder.arg_names) | {"num_warps", "maxnreg"}
    cut = recorder.constants["CUT"]
    assert cut.token_tiles == (1 if M <= 8 else 2)
    rows = 16 * cut.row_warps
    assert rows * grid[0] >= N
    if grid[1] == 1:
        assert named["partial_ptr"] is None
        assert named["arrivals_ptr"] is None
    else:
        tokens = 8 * cut.token_tiles
        assert named["partial_ptr"].numel() == grid[0] * grid[1] * rows * tokens
        assert named["arrivals_ptr"].numel() >= grid[0]
    assert (named["M"], named["N"], named["stride_xm"]) == (M, N, 1536)
