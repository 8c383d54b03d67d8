"""`taut::w4a16_gemm`: specification, op contract, refusals, and on a GPU every regime."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from taut_bench import testing
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.lookup import WgmmaTile
from taut_kernels.gemm.w4a16.op import w4a16_gemm, w4a16_gemm_ref
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.launch import launcher

DTYPES = (torch.float16, torch.bfloat16)


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
    [(1, 64, 128, 32), (3, 48, 576, 64), (16, 80, 1152, 128), (63, 32, 192, -1)],
)
def test_reference_matches_the_formula(
    M: int, N: int, K: int, G: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    case = make_case(M, N, K, G, dtype, asymmetric)
    gold = case.gold()
    actual = w4a16_gemm_ref(*case.operands())
    # fp32 accumulation leaves one rounding to the activation dtype and nothing else to speak of.
    assert testing.max_error(actual, gold) <= torch.finfo(dtype).eps * gold.abs().max().item()


@pytest.mark.parametrize("asymmetric", [False, True])
def test_op_contract(asymmetric: bool) -> None:
    case = make_case(3, 48, 128, 32, torch.bfloat16, asymmetric)
    op = torch.ops.taut.w4a16_gemm.default
    torch.library.opcheck(op, case.operands())
    torch.library.opcheck(op, (case.x.t().contiguous().t(), *case.operands()[1:]))


def test_compiles_without_graph_breaks_for_every_number_of_tokens() -> None:
    case = make_case(3, 48, 128, 32, torch.bfloat16, asymmetric=True)
    _, qweight, scales, zeros, bias, arrivals, group = case.operands()

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = w4a16_gemm(x, qweight, scales, zeros, group_size=group, arrivals=arrivals, bias=bias)
        return y * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5, 9):
        x = torch.randn(M, 128).to(torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


def test_keeps_leading_dimensions() -> None:
    case = make_case(6, 48, 64, -1, torch.float16, asymmetric=False)
    _, qweight, scales, _, _, arrivals, _ = case.operands()
    flat = w4a16_gemm(case.x, qweight, scales, group_size=-1, arrivals=arrivals)
    folded = w4a16_gemm(case.x.view(2, 3, 64), qweight, scales, group_size=64, arrivals=arrivals)
    assert folded.shape == (2, 3, 48)
    assert torch.equal(folded.view(6, 48), flat)


def bad(**change: Any) -> dict[str, Any]:
    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bad(x=torch.tensor(1.0)), "x must have at least one dimension"),
        (bad(x=torch.zeros(2, 128)), "^x: activations must be float16 or bfloat16, got float32"),
        (
            bad(x=torch.zeros(2, 96, dtype=torch.float16)),
            "^x and qweight: .* multiple of 64, a lane's 16-byte load",
        ),
        (bad(group_size=48), "^group_size: group size must be 32, 64, 128"),
        (
            bad(x=torch.zeros(2, 192, dtype=torch.float16), group_size=128),
            "^group_size: group size 128 does not divide the 192 input features",
        ),
        (bad(x=torch.zeros(2, 128, dtype=torch.float16, device="meta")), "qweight must be on meta"),
        (
            bad(qweight=torch.zeros(3, 2, 4, 32, dtype=torch.int32).transpose(2, 3)),
            "qweight must be contiguous",
        ),
        (
            bad(qweight=torch.zeros(3, 2, 32, dtype=torch.int32)),
            "qweight must have four dimensions",
        ),
        (bad(qweight=torch.zeros(3, 1, 32, 4, dtype=torch.int32)), "qweight must have shape"),
        (bad(qweight=torch.zeros(3, 2, 32, 4)), "qweight must be torch.int32"),
        (bad(scales=torch.zeros(3, 2, 8, 4, 2, dtype=torch.float16)), "scales must have shape"),
        (bad(scales=torch.zeros(3, 1, 8, 4, 2)), "scales must be torch.float16"),
        (bad(zeros=torch.zeros(3, 1, 8, 4, 2, dtype=torch.float16)), "zeros must have shape"),
        (bad(zeros=torch.zeros(3, 1, 8, dtype=torch.float16)), "zeros must be torch.int32"),
        (bad(bias=torch.zeros(47, dtype=torch.float16)), "bias must have shape"),
        (bad(bias=torch.zeros(48, dtype=torch.float16, device="meta")), "bias must be on cpu"),
        (bad(arrivals=torch.zeros(2, dtype=torch.int32)), "arrivals must have shape"),
        (bad(x=torch.zeros(2, 128, dtype=torch.float16, requires_grad=True)), "forward only"),
    ],
)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    case = make_case(2, 48, 128, 32, torch.float16, asymmetric=True)
    names = ("x", "qweight", "scales", "zeros", "bias", "arrivals", "group_size")
    arguments = dict(zip(names, case.operands(), strict=True))
    assert w4a16_gemm(**arguments).shape == (2, 48)
    with pytest.raises(ValueError, match=message):
        w4a16_gemm(**arguments | change)


def test_layers_without_a_layout_say_why() -> None:
    assert w4a16.why_not_supported(64, 128, 32, torch.float16) is None
    assert "multiple of 16" in str(w4a16.why_not_supported(24, 128, 32, torch.float16))
    assert "multiple of 64" in str(w4a16.why_not_supported(64, 96, 32, torch.float16))
    assert "31 bits" in str(w4a16.why_not_supported(2**18, 2**17, 128, torch.float16))


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
    aligned = launcher.aligned(view(x))
    assert torch.equal(aligned, x)
    assert (aligned.stride(1), aligned.stride(0) % 8, aligned.data_ptr() % 16) == (1, 0, 0)


def test_error_budget_rejects_a_wrong_kernel() -> None:
    case = make_case(8, 48, 64, 32, torch.float16, asymmetric=False)
    gold, reference = case.gold(), w4a16_gemm_ref(*case.operands())
    testing.assert_within_budget(reference, gold, reference)
    for wrong in (reference * 1.01, reference.roll(1, dims=1), reference * float("nan")):
        with pytest.raises(AssertionError):
            testing.assert_within_budget(wrong, gold, reference)


def check(case: testing.W4A16Case) -> torch.Tensor:
    operands = case.operands()
    with testing.nan_poison():
        actual = torch.ops.taut.w4a16_gemm(*operands)
    reference = w4a16_gemm_ref(*operands)
    if case.x.shape[0] > 16:
        # From there on the dequantised weight is rounded, as the regimes' contracts say.
        reference = case.rounded_reference()
    testing.assert_within_budget(actual, case.gold(), reference)
    assert not operands[5].any(), "arrivals must be 0 again"
    return actual


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("M", [0, 1, 8, 16, 17, 33, 65, 129, 257, 2049])
@pytest.mark.parametrize(
    ("N", "K", "G"), [(64, 128, 32), (1008, 576, 64), (4096, 4096, 128), (96, 576, -1)]
)
def test_gpu_every_regime(
    M: int, N: int, K: int, G: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    check(make_case(M, N, K, G, dtype, asymmetric, "cuda"))


RING = WgmmaRingTile(64, 2, 1, 2, 1, 5, parts=2, running=2)
FED = WgmmaRingTile(64, 2, 1, 2, 1, 4, parts=2, running=2, tma=True)
REGIMES: dict[str, tuple[Any, int]] = {
    "decode": (DecodeTile(1, 1, 1, 4, 4, 1, False), 5),
    "decode, split": (DecodeTile(2, 2, 3, 4, 4, 2, True), 8),
    "decode ring": (RingTile(2, 8, 2, 1, 4), 16),
    "decode ring, split": (RingTile(2, 4, 2, 2, 4), 24),
    "wgmma": (WgmmaTile(64, 4, 2, 3, reordered=False, early_wait=True), 64),
    "wgmma ring": (RING, 50),
    "wgmma ring, split": (WgmmaRingTile(64, 2, 1, 2, 3, 4, parts=2, running=2), 70),
    "wgmma by TMA": (FED, 50),
    "wgmma by TMA, split": (
        WgmmaRingTile(32, 1, 2, 2, 3, 4, parts=2, running=2, tma=True),
        33,
    ),
    "pairs of tiles": (
        WavesTile(
            FED,
            WgmmaRingTile(64, 1, 1, 2, 1, 4, parts=2, running=2, tma=True),
            20,
        ),
        513,
    ),
    "dense": ("dense", 40),
}
"""A tile and a number of tokens for each way to run a product."""
ROUNDS_LATE = ("decode", "decode, split", "decode ring", "decode ring, split")
"""Those that multiply by scales in fp32 only; the others round the dequantised weight."""


def test_pairs_of_tiles_have_a_tail() -> None:
    for tile, M in REGIMES.values():
        assert not isinstance(tile, WavesTile) or 0 < tile.head_rows(M, 640) < 640


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("regime", REGIMES)
def test_gpu_bias_without_zero_points_and_zero_points_without_bias(
    regime: str, asymmetric: bool
) -> None:
    tile, M = REGIMES[regime]
    for dtype in DTYPES:
        case = testing.make_w4a16_case(
            M,
            640,
            1152,
            128,
            dtype=dtype,
            asymmetric=asymmetric,
            with_bias=not asymmetric,
            device="cuda",
        )
        assert (case.zeros is None) != (case.bias is None)
        operands = case.operands()
        with testing.nan_poison():
            actual = w4a16_launch.launch(tile, *operands)
        reference = case.reference() if regime in ROUNDS_LATE else case.rounded_reference()
        testing.assert_within_budget(actual, case.gold(), reference)
        assert not operands[5].any(), "arrivals must be 0 again"


@pytest.mark.gpu
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("M", [1, 16, 64, 300, 1344])
def test_gpu_op_with_bias_or_zero_points_alone(M: int, asymmetric: bool) -> None:
    """By the tables' tiles; the first is what a qkv of Qwen has."""
    check(
        testing.make_w4a16_case(
            M,
            4096,
            4096,
            128,
            dtype=torch.bfloat16,
            asymmetric=asymmetric,
            with_bias=not asymmetric,
            device="cuda",
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("asymmetric", [False, True])
def test_gpu_op_contract(asymmetric: bool) -> None:
    """The fake result against the launchers' own, which allocate without the dispatcher."""
    op = torch.ops.taut.w4a16_gemm.default
    for M in (3, 16, 40, 300):
        case = make_case(M, 64, 128, 32, torch.bfloat16, asymmetric, "cuda")
        torch.library.opcheck(op, case.operands())
        permuted = case.x.t().contiguous().t()
        torch.library.opcheck(op, (permuted, *case.operands()[1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [5, 40, 300])
def test_gpu_strided_activations(M: int) -> None:
    case = make_case(M, 64, 256, 64, torch.bfloat16, False, "cuda")
    wide = torch.empty((M, 600), dtype=torch.bfloat16, device="cuda")
    for start in (8, 3):
        wide.fill_(float("nan"))
        wide[:, start : start + 256] = case.x
        check(dataclasses.replace(case, x=wide[:, start : start + 256]))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [4, 16, 32, 64, 128, 300, 768, 1024, 2048])
def test_gpu_graph_replays_on_new_activations(M: int) -> None:
    check_replays(make_case(M, 4096, 4096, 128, torch.bfloat16, False, "cuda"), 10)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "G"), [(4, 128), (16, 32), (32, 128), (64, 32), (300, 128), (1024, 32)]
)
def test_gpu_graph_replays_with_zero_points(M: int, G: int) -> None:
    check_replays(make_case(M, 4096, 4096, G, torch.bfloat16, True, "cuda"), 3)


def check_replays(case: testing.W4A16Case, seeds: int) -> None:
    operands = case.operands()
    torch.ops.taut.w4a16_gemm(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.taut.w4a16_gemm(*operands)
    for seed in range(seeds):
        case.x.copy_(torch.randn(case.x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        testing.assert_within_budget(y, case.gold(), case.rounded_reference())
        assert torch.equal(y, torch.ops.taut.w4a16_gemm(*operands)), "bits differ between runs"


@pytest.mark.gpu
def test_gpu_addresses_beyond_31_bits() -> None:
    case = make_case(2, 32, 128, 32, torch.float16, False, "cuda")
    rows = torch.empty(2, 2**31 // 2 + 4096, dtype=torch.float16, device="cuda")
    x = rows[:, -128:]
    x.copy_(case.x)
    check(dataclasses.replace(case, x=x))
