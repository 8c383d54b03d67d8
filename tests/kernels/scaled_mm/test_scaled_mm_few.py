"""The 8-bit products' kernel of few tokens that TMA feeds: its body on NumPy, and the GPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from emulator import gluon, hopper

from taut_bench import testing
from taut_bench.testing.scaled_mm import ScaledMmCase, make_scaled_mm_case
from taut_bench.testing.scaled_mm import launch_case as run
from taut_kernels.gemm.scaled_mm import few as scaled_mm_few
from taut_kernels.gemm.scaled_mm.dispatch import launch, make_arrivals
from taut_kernels.gemm.scaled_mm.few_kernel import scaled_mm_few_kernel
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile, tiles_of_few
from taut_kernels.launch import launcher

NARROW = ScaledMmTile("few", 128, 64, 256, 4, 4)
TILES = (
    *tiles_of_few(),
    dataclasses.replace(NARROW, split_k=5),
    ScaledMmTile("few", 128, 64, 128, 4, 2, split_k=4),
    ScaledMmTile("few", 64, 64, 256, 4, 6, split_k=2),
    ScaledMmTile("few", 64, 128, 256, 4, 2),
    ScaledMmTile("few", 64, 256, 128, 4, 3),
)


def each_tile(*cases: tuple[Any, ...]) -> list[Any]:
    """Return parameters: every tile with every case."""
    return [
        pytest.param(tile, *case, id="-".join(map(str, (tile, *case))))
        for tile, case in itertools.product(TILES, cases)
    ]


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> gluon.OnNumPy:
    kernel = gluon.OnNumPy(scaled_mm_few_kernel, hopper.run)
    monkeypatch.setattr(scaled_mm_few, "_few", launcher.Launcher(kernel))
    return kernel


def check(tile: ScaledMmTile, case: ScaledMmCase, *, exact: bool = True) -> None:
    """Hold a result to the reference, int8 to its bits, and a second one to the first."""
    with testing.nan_poison():
        actual = run(tile, case)
    reason = case.why_wrong(actual)
    assert reason is None, reason
    if case.op == "w8a8_gemm" and exact:
        assert torch.equal(actual, case.reference()), "int8 sums are exact: same bits"
    assert not case.arrivals.any(), "for the next call"
    assert torch.equal(actual, run(tile, case)), "the same bits from run to run"


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize(
    ("tile", "op", "M", "N", "K", "scaling", "zero_points", "out_dtype"),
    each_tile(
        ("fp8_gemm", 100, 136, 1040, "row", "none", torch.bfloat16),
        ("w8a8_gemm", 65, 328, 784, "row", "token", torch.float16),
        ("w8a8_gemm", 141, 264, 272, "tensor", "static", torch.bfloat16),
        ("fp8_gemm", 1, 8, 16, "tensor", "none", torch.float16),
    ),
)
def test_body_on_numpy_is_the_reference(
    tile: ScaledMmTile,
    op: str,
    M: int,
    N: int,
    K: int,
    scaling: str,
    zero_points: str,
    out_dtype: torch.dtype,
) -> None:
    tokens = min(M, tile.block_m - 3) if tile.split_k > 1 else M
    case = make_scaled_mm_case(
        op,
        tokens,
        N,
        K,
        scaling=scaling,
        zero_points=zero_points,
        with_bias=M % 2 == 1,
        out_dtype=out_dtype,
    )
    check(tile, case)


def test_nothing_is_compiled_by_the_number_of_tokens(
    on_numpy: gluon.OnNumPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no block is asked for that has no token."""
    asked: list[int] = []
    load_block = hopper.load_block

    def record(descriptor: Any, at: Any, *more: Any) -> None:
        if descriptor.shape[0] == scaled_mm_few.TOKENS:
            asked.append(int(at[0]))
        load_block(descriptor, at, *more)

    monkeypatch.setattr(hopper, "load_block", record)
    found = {}
    for M in (1, 32, 65, 96, 97, 129):
        asked.clear()
        check(NARROW, make_scaled_mm_case("w8a8_gemm", M, 64, 128))
        found[M] = sorted({*asked})
        assert on_numpy.grid == (1, 1, -(-M // 128))
    assert found == {
        1: [0],
        32: [0],
        65: [0, 32, 33],
        96: [0, 32, 64],
        97: [0, 32, 64, 65],
        129: [0, 32, 64, 96, 97],
    }
    assert len(scaled_mm_few._few._forms) == 1


@pytest.mark.usefixtures("on_numpy")
def test_parts_without_a_step_add_nothing() -> None:
    tile = dataclasses.replace(NARROW, split_k=8)
    check(tile, make_scaled_mm_case("fp8_gemm", 70, 64, 768))


@pytest.mark.usefixtures("on_numpy")
def test_rows_apart_are_read_in_place() -> None:
    case = make_scaled_mm_case("w8a8_gemm", 70, 72, 144)
    x = torch.zeros(70, 192, dtype=torch.int8)[:, 16:160]
    x.copy_(case.x)
    check(NARROW, dataclasses.replace(case, x=x))


def test_a_split_tile_needs_arrivals() -> None:
    case = make_scaled_mm_case("w8a8_gemm", 70, 136, 512)
    tile = dataclasses.replace(NARROW, split_k=2)
    for arrivals in (None, make_arrivals(64, torch.device("cpu"))):
        with pytest.raises(ValueError, match="arrivals must hold 3 elements"):
            launch(tile, *case.operands()[:-2], arrivals, torch.float16)


@pytest.mark.parametrize("M", [1, 100, 128])
@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(
    ("tile", "op", "scaling", "zero_points"),
    each_tile(
        ("fp8_gemm", "tensor", "none"),
        ("fp8_gemm", "row", "none"),
        ("w8a8_gemm", "row", "none"),
        ("w8a8_gemm", "row", "static"),
        ("w8a8_gemm", "tensor", "token"),
    ),
)
def test_gpu_matches_the_reference(
    tile: ScaledMmTile, op: str, scaling: str, zero_points: str, M: int
) -> None:
    tokens = min(M, tile.block_m) if tile.split_k > 1 else M
    for N, K in ((1104, 400), (8, 16), (3000, 4112), (4096, 2048)):
        case = make_scaled_mm_case(
            op,
            tokens,
            N,
            K,
            scaling=scaling,
            zero_points=zero_points,
            with_bias=N == 1104,
            out_dtype=torch.bfloat16 if N == 1104 else torch.float16,
            device="cuda",
        )
        # Exact sums; the bias may be fused into a multiplication.
        check(tile, case, exact=N != 1104)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", [t for t in TILES if t.split_k == 1], ids=str)
def test_gpu_any_number_of_token_tiles(tile: ScaledMmTile) -> None:
    for M in (65, 129, 333, 2100):
        check(tile, make_scaled_mm_case("w8a8_gemm", M, 1104, 784, device="cuda"))


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gpu_saturated_sums_are_exact(tile: ScaledMmTile) -> None:
    case = make_scaled_mm_case("w8a8_gemm", 64, 136, 65408, device="cuda")
    case.x.fill_(-128)
    case.weight.fill_(127)
    case.x_scale.fill_(2.0**-20)
    case.weight_scale.fill_(2.0**-8)
    check(tile, case)


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_rows_apart_are_read_in_place() -> None:
    case = make_scaled_mm_case("w8a8_gemm", 100, 136, 2064, device="cuda")
    x = torch.full((100, 4096), 77, dtype=torch.int8, device="cuda")[:, 16:2080]
    x.copy_(case.x)
    wide = torch.full((136, 2112), 77, dtype=torch.int8, device="cuda")
    weight = wide[:, :2064]
    weight.copy_(case.weight)
    for tile in TILES:
        if tile.split_k == 1 or tile.block_m == 128:
            check(tile, dataclasses.replace(case, x=x, weight=weight))


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("op", ["fp8_gemm", "w8a8_gemm"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gpu_graph_replays_on_new_activations(tile: ScaledMmTile, op: str) -> None:
    case = make_scaled_mm_case(op, 64, 1032, 4096, device="cuda")
    run(tile, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(tile, case)
        # The second call must see what the first one wrote before it.
        case.x_scale.mul_(y[:, :1].abs().float() + 0.5)
        again = run(tile, case)
    start = case.x_scale.clone()
    for seed in (1, 2):
        case.x_scale.copy_(start)
        case.x.copy_(make_scaled_mm_case(op, 64, 1032, 4096, device="cuda", seed=seed).x)
        graph.replay()
        assert torch.equal(again, run(tile, case))
        case.x_scale.copy_(start)
        assert torch.equal(y, run(tile, case))
        assert not case.arrivals.any()


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_one_form_runs_any_number_of_tokens() -> None:
    """In an order that leaves other tokens' blocks, NaN among them, in shared memory."""
    case = make_scaled_mm_case("fp8_gemm", 128, 1032, 2048, device="cuda")
    noise = dataclasses.replace(case, x=torch.full_like(case.x.float(), torch.nan).to(case.x.dtype))
    for M in (128, 1, 33, 65, 96, 127, 2):
        run(NARROW, noise)
        x, x_scale = case.x[:M], case.x_scale[:M]
        check(NARROW, dataclasses.replace(case, x=x, x_scale=x_scale))
