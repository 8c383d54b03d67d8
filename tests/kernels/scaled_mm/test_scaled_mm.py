"""`taut::w8a8_gemm` and `taut::fp8_gemm`: specification, kernels interpreted, contract, GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import scaled_mm_rivals, testing
from taut_bench.instruments.forms import scaled_mm as scaled_mm_forms
from taut_bench.scaled_mm_layer import SHAPES, make_layer
from taut_bench.testing.scaled_mm import (
    EXTREMES,
    ScaledMmCase,
    cut_results,
    extreme_case,
    make_scaled_mm_case,
)
from taut_kernels.gemm.scaled_mm import dispatch as scaled_mm_launch
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.scaled_mm.dispatch import launch, launch_block
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch import launcher as launching
from taut_kernels.launch import triton_abi

INTERPRET = Path(__file__).with_name("interpret_scaled_mm.py")
OUT_DTYPES = (torch.bfloat16, torch.float16)
VARIETIES = [
    ("w8a8_gemm", "tensor", "none"),
    ("w8a8_gemm", "row", "none"),
    ("w8a8_gemm", "tensor", "static"),
    ("w8a8_gemm", "row", "token"),
    ("fp8_gemm", "tensor", "none"),
    ("fp8_gemm", "row", "none"),
    ("fp8_gemm", "block", "none"),
]
OPS = {"w8a8_gemm": torch.ops.taut.w8a8_gemm, "fp8_gemm": torch.ops.taut.fp8_gemm}


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize(("op", "scaling", "zero_points"), VARIETIES)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 64, 128), (3, 40, 576), (17, 200, 272)])
def test_reference_matches_the_formula(
    M: int, N: int, K: int, op: str, scaling: str, zero_points: str, out_dtype: torch.dtype
) -> None:
    case = make_scaled_mm_case(
        op,
        M,
        N,
        K,
        scaling=scaling,
        zero_points=zero_points,
        with_bias=N == 40,
        out_dtype=out_dtype,
    )
    gold, actual = case.gold(), OPS[op](*case.operands())
    assert actual.dtype == out_dtype
    # One rounding to the result's type; the rest happens in fp32, which fp16 resolves 2**13 times.
    assert testing.max_error(actual, gold) <= torch.finfo(out_dtype).eps * gold.abs().max().item()


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
@pytest.mark.parametrize(
    ("check", "count"),
    [
        ("e4m3_is_right", 254),
        ("ring", 32),
        ("zero_points", 4),
        ("blocks", 16),
        ("saturated", 3),
        ("fp8_adversarial_values", 6),
        ("strided_and_offset_inputs", 3),
        ("empty_batch", 2),
    ],
)
def test_interpreted_kernel(check: str, count: int, run_checks: Any) -> None:
    process = run_checks(INTERPRET, check, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


@pytest.mark.parametrize(("op", "scaling", "zero_points"), VARIETIES)
def test_op_contract(op: str, scaling: str, zero_points: str) -> None:
    case = make_scaled_mm_case(
        op, 3, 136, 144, scaling=scaling, zero_points=zero_points, with_bias=scaling == "row"
    )
    # opcheck's schema test multiplies its inputs, which torch does not do in e4m3.
    checks = [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    ][op == "fp8_gemm" :]
    permuted = case.x.t().contiguous().t()
    for x in (case.x, permuted):
        torch.library.opcheck(OPS[op].default, (x, *case.operands()[1:]), test_utils=checks)


def _public(case: ScaledMmCase, **changes: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "x": case.x,
        "weight": case.weight,
        "x_scale": case.x_scale,
        "weight_scale": case.weight_scale,
        "bias": case.bias,
        "out_dtype": case.out_dtype,
    }
    if case.op == "w8a8_gemm":
        arguments |= {"azp_adj": case.azp_adj, "azp": case.azp}
        return w8a8.w8a8_gemm(**arguments | changes)
    return fp8.fp8_gemm(**arguments | changes)


@pytest.mark.parametrize(("op", "scaling", "zero_points"), VARIETIES)
def test_compiles_without_graph_breaks_for_every_number_of_tokens(
    op: str, scaling: str, zero_points: str
) -> None:
    cases = [
        make_scaled_mm_case(op, M, 136, 144, scaling=scaling, zero_points=zero_points, seed=0)
        for M in (3, 5, 9)
    ]
    weight, weight_scale = cases[0].weight, cases[0].weight_scale
    static = cases[0].azp_adj

    def layer(x: torch.Tensor, x_scale: torch.Tensor, azp: torch.Tensor | None) -> torch.Tensor:
        changes = {"x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale}
        if op == "w8a8_gemm":
            changes |= {"azp": azp, "azp_adj": static}
        return _public(cases[0], **changes) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for case in cases:
        operands = (case.x, case.x_scale, case.azp)
        assert torch.equal(compiled(*operands), layer(*operands))


@pytest.mark.parametrize("op", OPS)
def test_keeps_leading_dimensions(op: str) -> None:
    case = make_scaled_mm_case(op, 6, 40, 64)
    flat = _public(case)
    folded = _public(case, x=case.x.view(2, 3, 64), x_scale=case.x_scale.view(2, 3, 1))
    assert folded.shape == (2, 3, 40)
    assert torch.equal(folded.view(6, 40), flat)


HALF, I32, F32 = torch.float16, torch.int32, torch.float32
BAD_FOR_BOTH = [
    ({"x": torch.zeros(2, 64)}, r"x must be torch\.(int8|float8_e4m3fn), got torch.float32"),
    ({"x": torch.tensor(1.0)}, "at least one dimension"),
    ({"x": torch.zeros(2, 48)}, "x must have 64 columns like weight, got 48"),
    ({"weight": torch.zeros(40)}, "weight must have two dimensions, got 1"),
    ({"weight": torch.zeros(40, 64)}, "weight must be"),
    ({"x_scale": torch.zeros(3)}, r"x_scale must have 2 or 1 elements, got \(3,\)"),
    ({"x_scale": torch.zeros(2, dtype=HALF)}, "x_scale must be torch.float32"),
    ({"x_scale": torch.zeros(2, device="meta")}, "x_scale must be on cpu, got meta"),
    ({"x_scale": torch.zeros(4)[::2]}, "x_scale must be contiguous"),
    ({"x_scale": torch.zeros(2, requires_grad=True)}, "forward only"),
    ({"weight_scale": torch.zeros(39)}, "weight_scale must have 40 or 1 elements"),
    ({"weight_scale": torch.zeros(40, dtype=HALF)}, "weight_scale must be torch.float32"),
    ({"weight_scale": torch.zeros(40, device="meta")}, "weight_scale must be on cpu, got meta"),
    ({"bias": torch.zeros(40)}, "bias must be torch.float16"),
    ({"bias": torch.zeros(39, dtype=HALF)}, "bias must have 40 elements"),
    ({"bias": torch.zeros(40, dtype=HALF, device="meta")}, "bias must be on cpu, got meta"),
    ({"arrivals": torch.zeros(1, dtype=I32)}, "arrivals must have 2 elements"),
    ({"arrivals": torch.zeros(2)}, "arrivals must be torch.int32"),
    ({"out_dtype": torch.float32}, "out_dtype must be torch.bfloat16 or torch.float16"),
]
BAD_ZERO_POINTS = [
    ({"azp_adj": torch.zeros(39, dtype=I32)}, "azp_adj must have 40 elements"),
    ({"azp_adj": torch.zeros(40)}, "azp_adj must be torch.int32"),
    ({"azp_adj": torch.zeros(40, dtype=I32, device="meta")}, "azp_adj must be on cpu, got meta"),
    ({"azp": torch.zeros(3, dtype=I32)}, "azp must have 2 elements"),
    ({"azp_adj": None}, "azp needs azp_adj"),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("change", "message"), BAD_FOR_BOTH)
def test_rejects_bad_inputs(change: dict[str, Any], message: str, op: str) -> None:
    case = make_scaled_mm_case(op, 2, 40, 64, with_bias=True)
    assert _public(case).shape == (2, 40)
    with pytest.raises(ValueError, match=message):
        _public(case, **change)


@pytest.mark.parametrize("op", OPS)
def test_rejects_a_weight_on_another_device(op: str) -> None:
    case = make_scaled_mm_case(op, 2, 40, 64)
    for changes, message in (
        ({"weight": case.weight.to("meta")}, "^weight must be on cpu, got meta"),
        ({"x": case.x.to("meta")}, "^weight must be on meta, got cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            _public(case, **changes)


@pytest.mark.parametrize(("change", "message"), BAD_ZERO_POINTS)
def test_rejects_bad_zero_points(change: dict[str, Any], message: str) -> None:
    case = make_scaled_mm_case("w8a8_gemm", 2, 40, 64, zero_points="token")
    assert _public(case).shape == (2, 40)
    with pytest.raises(ValueError, match=message):
        _public(case, **change)


@pytest.mark.parametrize("op", OPS)
def test_rejects_weights_it_cannot_read_in_rows(op: str) -> None:
    case = make_scaled_mm_case(op, 2, 48, 64)
    with pytest.raises(ValueError, match="contiguous rows aligned to 16 bytes"):
        _public(case, weight=case.weight.t().contiguous().t())
    wide = torch.zeros(48, 72, dtype=torch.int8).view(case.weight.dtype)
    with pytest.raises(ValueError, match="contiguous rows aligned to 16 bytes"):
        _public(case, weight=wide[:, :64])
    with pytest.raises(ValueError, match=r"^weight: input features must be .* multiple of 16"):
        _public(case, x=case.x[:, :40], weight=case.weight[:, :40])


def test_rejects_sums_that_may_overflow() -> None:
    case = make_scaled_mm_case("w8a8_gemm", 1, 16, 65536)
    with pytest.raises(ValueError, match=r"^weight: input features must be at most 65535"):
        _public(case)
    assert w8a8.why_not_supported(65520) is None
    assert "at most 65535" in str(w8a8.why_not_supported(65536))
    assert fp8.why_not_supported(65536) is None


def test_rejects_block_scales_of_the_wrong_shape() -> None:
    case = make_scaled_mm_case("fp8_gemm", 2, 200, 272, scaling="block")
    assert _public(case).shape == (2, 200)
    for x_scale, message in (
        (torch.zeros(2, 2), r"x_scale must have shape \(2, 3\)"),
        (torch.zeros(2, 3, dtype=HALF), "x_scale must be torch.float32"),
        (torch.zeros(2, 3, device="meta"), "x_scale must be on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            _public(case, x_scale=x_scale)


def test_a_tile_that_splits_needs_arrivals() -> None:
    case = make_scaled_mm_case("w8a8_gemm", 2, 200, 128)
    tile = ScaledMmTile("ring", 16, 64, 64, 4, 3, split_k=2)
    operands = case.operands()
    for arrivals in (None, case.arrivals[:3]):
        with pytest.raises(ValueError, match="arrivals must hold 4 elements"):
            launch(tile, *operands[:7], arrivals, operands[8])


class _Recorder:
    """Stands for a jit function and for what it compiles to; keeps the arguments by name."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names = kernel.arg_names
        self.calls: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def call(*arguments: Any, **named: Any) -> _Recorder:
            found = dict(zip(self.arg_names, arguments, strict=False)) | named
            self.calls.append({name: found[name] for name in self.arg_names} | {"grid": grid})
            return self

        return call


def _recorded(recorder: _Recorder) -> triton_abi.Route:
    """Return a way to launch that records."""

    def call(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        recorder[x, y, z](*arguments)

    return triton_abi.Route(call, (), packed=False)


@pytest.mark.parametrize(("op", "scaling", "zero_points"), VARIETIES)
def test_a_remembered_launch_hands_over_the_same_arguments(
    op: str, scaling: str, zero_points: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_scaled_mm_case(op, 5, 200, 256, scaling=scaling, zero_points=zero_points)
    name = "_BLOCK" if scaling == "block" else "_RING"
    launcher = getattr(scaled_mm_launch, name)
    recorder = _Recorder(launcher.kernel)
    monkeypatch.setattr(scaled_mm_launch, name, type(launcher)(recorder))
    monkeypatch.setattr(triton_abi, "route", _recorded)
    monkeypatch.setattr(launching, "_current_stream", lambda: lambda device: 0)
    scaled_mm_launch._prepared_ring.cache_clear()  # it keeps forms of the launcher that was
    tile = ScaledMmTile("ring", 16, 64, 128, 4, 3, split_k=2)
    for _ in range(2):
        _launch_case(tile, case)
    other = make_scaled_mm_case(op, 5, 200, 256, scaling=scaling, with_bias=True)
    _launch_case(tile, other)
    scaled_mm_launch._prepared_ring.cache_clear()
    first, second, third = recorder.calls
    fresh = {"y_ptr", "partial_ptr"}
    assert set(first) == {*recorder.arg_names, "grid"}
    for n in set(first) - fresh:
        # What is remembered gets a tensor's address.
        known = first[n].data_ptr() if isinstance(first[n], torch.Tensor) else first[n]
        assert known == second[n], n
    assert first["grid"] == (1, 4, 2)
    expected = {"M": 5, "N": 200, "K": 256, "stride_xm": 256, "stride_wn": 256, "BLOCK_N": 64}
    assert {n: second[n] for n in expected} == expected
    assert (second["HAS_BIAS"], second["bias_ptr"]) == (False, None)
    assert (third["HAS_BIAS"], third["bias_ptr"]) == (True, other.bias)


def test_weights_at_an_odd_address_are_refused() -> None:
    case = make_scaled_mm_case("w8a8_gemm", 2, 32, 64)
    odd = torch.zeros(32 * 64 + 8, dtype=torch.int8)[8:].view(32, 64)
    with pytest.raises(ValueError, match="address aligned to 16 bytes"):
        launch(FORMS[0], case.x, odd, *case.operands()[2:])


def test_fp8_refuses_a_card_without_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    why = fp8._why_not_on.__wrapped__
    assert "compute capability 8.9 or later, cuda:0 has (8, 0)" in str(why(torch.device("cuda:0")))
    assert why(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why(torch.device("cuda:0")) is None


def test_error_budget_rejects_a_wrong_product() -> None:
    case = make_scaled_mm_case("fp8_gemm", 8, 40, 64)
    gold, reference = case.gold(), case.reference()
    testing.assert_within_budget(reference, gold, reference)
    assert case.why_wrong(reference) is None
    for wrong in (reference * 1.01, reference.roll(1, dims=1), reference * float("nan")):
        assert case.why_wrong(wrong) is not None
        with pytest.raises(AssertionError):
            testing.assert_within_budget(wrong, gold, reference)


def test_kernel_variants_cover_every_tile_of_the_tables() -> None:
    variants = list(scaled_mm_forms.kernel_variants())
    keys = {(v.label, v.tile) for v in variants}
    assert len(variants) == len({(v.label, v.tile, v.target) for v in variants})
    for table in tiles_scaled_mm.tables().values():
        for (op, _, _), rows in table.choices.items():
            for bucket in itertools.chain.from_iterable(pair for _, pair in rows):
                assert any(label.startswith(op) and tile == bucket.tile for label, tile in keys)
    early = {v.label.split()[0] for v in variants if v.tile.early}
    assert early == {"w8a8_gemm", "fp8_gemm", "fp8_block"}
    assert all(v.target == "sm_90" for v in variants if v.label.startswith("fp8"))


FORMS = [
    ScaledMmTile("ring", 16, 64, 256, 4, 4, split_k=2),
    ScaledMmTile("ring", 16, 64, 128, 4, 6, split_k=4, early=True, prefetch=4),
    ScaledMmTile("ring", 64, 128, 128, 4, 4),
    ScaledMmTile("hopper", 128, 256, 128, 4, 4, group_m=8),
    ScaledMmTile("hopper", 128, 128, 128, 4, 6, group_m=2),
]
BLOCK_FORMS = [
    ScaledMmTile("ring", 16, 64, 128, 4, 6, split_k=4),
    ScaledMmTile("ring", 64, 64, 128, 4, 4),
    ScaledMmTile("ring", 128, 128, 128, 8, 3),
]


def _launch_case(tile: ScaledMmTile, case: ScaledMmCase) -> torch.Tensor:
    operands = case.operands()
    if case.op == "w8a8_gemm":
        return launch(tile, *operands)
    if fp8.is_block_wise(case.weight, case.weight_scale):
        return launch_block(tile, *operands)
    return launch(tile, *operands[:4], None, None, *operands[4:])


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", FORMS, ids=str)
@pytest.mark.parametrize(("op", "scaling", "zero_points"), VARIETIES[:-1])
def test_gpu_kernels_match_reference(
    op: str, scaling: str, zero_points: str, tile: ScaledMmTile
) -> None:
    rows = (1, 13, tile.block_m) if tile.split_k > 1 else (1, 63, 300)
    for M, N, K in [(M, N, K) for M in rows for N, K in ((200, 1024), (1032, 2000))]:
        case = make_scaled_mm_case(
            op,
            M,
            N,
            K,
            scaling=scaling,
            zero_points=zero_points,
            with_bias=scaling == "row",
            out_dtype=torch.bfloat16 if K == 1024 else torch.float16,
            device="cuda",
        )
        with testing.nan_poison():
            actual = _launch_case(tile, case)
        assert case.why_wrong(actual) is None
        if op == "w8a8_gemm":
            # Exact sums; the two multiplications round alike, the bias may be fused into one.
            assert case.bias is not None or torch.equal(actual, case.reference())
        assert not case.arrivals.any()


FP8_FORMS = [
    *FORMS[:3],
    ScaledMmTile("few", 128, 64, 256, 4, 4),
    ScaledMmTile("few", 64, 64, 256, 4, 6, split_k=2),
    *BLOCK_FORMS,
]
FP8_EXTREMES = [name for name, (op, *_) in EXTREMES.items() if op == "fp8_gemm"]


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", FP8_FORMS, ids=str)
def test_gpu_fp8_extreme_values(tile: ScaledMmTile) -> None:
    """Features with and without outliers are held to budgets of their own."""
    scaling, K = ("block", 2000) if tile in BLOCK_FORMS else ("row", 2064)
    for name in FP8_EXTREMES:
        case = extreme_case(name, 13, 200, K, scaling=scaling, device="cuda")
        gold, cut = case.gold(), cut_results(case)
        with testing.nan_poison():
            actual = _launch_case(tile, case)
        for first in (0, 1):
            reference = cut[:, first : first + 1].expand_as(gold[:, first::2])
            testing.assert_within_budget(actual[:, first::2], gold[:, first::2], reference)
        assert "zeros" not in name or not actual[:, 1::2].any(), name
        assert not case.arrivals.any()


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", FP8_FORMS, ids=str)
def test_gpu_fp8_outliers_and_scales_at_the_ends(tile: ScaledMmTile) -> None:
    """A row of outliers leaves the others their budgets; one of two scales may be subnormal."""
    scaling, K = ("block", 2000) if tile in BLOCK_FORMS else ("row", 2064)

    def check(case: ScaledMmCase, rows: slice) -> None:
        with testing.nan_poison():
            actual = _launch_case(tile, case)
        # Rows do not see each other: those of a smaller product have a smaller budget.
        part = dataclasses.replace(case, x=case.x[rows], x_scale=case.x_scale[rows])
        assert part.why_wrong(actual[rows]) is None
        assert actual[rows].any()

    for x_scale, weight_scale in ((1.0, 2.0**-6), (2.0**-130, 2.0**120), (2.0**120, 2.0**-130)):
        case = make_scaled_mm_case("fp8_gemm", 13, 200, K, scaling=scaling, device="cuda")
        case.x_scale.fill_(x_scale)
        case.weight_scale.fill_(weight_scale)
        if x_scale == 1.0:
            case.x[3] = 448.0
        check(case, slice(4, 13))
        check(case, slice(3, 4))


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(("op", "scaling", "zero_points"), VARIETIES)
def test_gpu_op_contract(op: str, scaling: str, zero_points: str) -> None:
    """The fake results against the launchers' own, which allocate without the dispatcher."""
    case = make_scaled_mm_case(
        op,
        3,
        136,
        144,
        scaling=scaling,
        zero_points=zero_points,
        with_bias=scaling == "row",
        device="cuda",
    )
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"][op == "fp8_gemm" :]
    permuted = case.x.t().contiguous().t()
    for x in (case.x, permuted):
        torch.library.opcheck(OPS[op].default, (x, *case.operands()[1:]), test_utils=checks)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("tile", BLOCK_FORMS, ids=str)
def test_gpu_block_kernel_matches_reference(tile: ScaledMmTile) -> None:
    for M, N, K in [(1, 256, 1024), (13, 200, 2000), (tile.block_m, 1000, 4096)]:
        case = make_scaled_mm_case(
            "fp8_gemm", M, N, K, scaling="block", with_bias=True, device="cuda"
        )
        with testing.nan_poison():
            actual = _launch_case(tile, case)
        assert case.why_wrong(actual) is None


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(("op", "scaling", "zero_points"), VARIETIES)
@pytest.mark.parametrize("M", [1, 16, 64, 300])
def test_gpu_ops_match_reference_on_a_model_shape(
    op: str, scaling: str, zero_points: str, M: int
) -> None:
    case = make_scaled_mm_case(
        op, M, 4096, 4096, scaling=scaling, zero_points=zero_points, device="cuda"
    )
    with testing.nan_poison():
        actual = OPS[op](*case.operands())
    assert case.why_wrong(actual) is None
    again = OPS[op](*case.operands())
    assert torch.equal(actual, again), "the same bits from run to run"


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_gpu_int8_products_have_the_bits_of_cutlass(shape: str) -> None:
    """Both sums are exact, and both multiply by the weights' scale first."""
    layer = make_layer("w8a8_gemm", *SHAPES[shape], 1024)
    ours, theirs = (
        scaled_mm_rivals.PREPARE[name](layer, layer.weight) for name in ("taut", "CUTLASS")
    )
    for M in (1, 5, 16, 17, 40, 64, 65, 96, 128, 200, 512, 640, 1024):
        assert torch.equal(ours(M), theirs(M)), M


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_saturated_sums_are_exact() -> None:
    for tile in FORMS:
        case = make_scaled_mm_case("w8a8_gemm", 16, 64, 65408, device="cuda")
        case.x.fill_(-128)
        case.weight.fill_(127)
        case.x_scale.fill_(2.0**-20)
        case.weight_scale.fill_(2.0**-8)
        assert torch.equal(_launch_case(tile, case), case.reference())


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(
    ("tile", "op", "scaling"),
    [
        *((tile, op, "row") for op in OPS for tile in FORMS),
        *((tile, "fp8_gemm", "block") for tile in BLOCK_FORMS),
    ],
    ids=str,
)
def test_gpu_graph_replays_on_new_activations(tile: ScaledMmTile, op: str, scaling: str) -> None:
    case = make_scaled_mm_case(op, 4, 256, 1024, scaling=scaling, device="cuda")
    _launch_case(tile, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _launch_case(tile, case)
        # Started early, the second call must still see what the first one wrote before it.
        case.x_scale.mul_(y[:, :1].abs().float() + 0.5)
        again = _launch_case(tile, case)
    start = case.x_scale.clone()
    for seed in (1, 2):
        fresh = make_scaled_mm_case(op, 4, 256, 1024, scaling=scaling, device="cuda", seed=seed)
        case.x.copy_(fresh.x)
        case.x_scale.copy_(start)
        graph.replay()
        expected = _launch_case(tile, case)
        assert torch.equal(again, expected)
        case.x_scale.copy_(start)
        assert torch.equal(y, _launch_case(tile, case))
        assert case.why_wrong(y) is None


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_addresses_beyond_31_bits() -> None:
    case = make_scaled_mm_case("w8a8_gemm", 2, 32, 128, device="cuda")
    rows = torch.empty(2, 2**31 + 4096, dtype=torch.int8, device="cuda")
    x = rows[:, -128:]
    x.copy_(case.x)
    wide = torch.empty(32, 2**27, dtype=torch.int8, device="cuda")
    weight = wide[:, -128:]
    weight.copy_(case.weight)
    for tile in (FORMS[0], FORMS[2], FORMS[4]):
        actual = launch(tile, x, weight, *case.operands()[2:])
        assert torch.equal(actual, case.reference())
