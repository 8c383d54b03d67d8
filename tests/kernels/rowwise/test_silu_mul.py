"""`taut::silu_mul` and its quantised forms: specification, interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.activation import silu_mul as sm
from taut_kernels.activation.silu_mul import silu_mul, silu_mul_quant
from taut_kernels.rowwise import row_quant

INTERPRET = Path(__file__).with_name("interpret_fused.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SILU = (1.0, 0.0, None)
GPT_OSS = (1.702, 1.0, 7.0)


def gates_and_ups(M: int, N: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(M + N)
    return (4 * torch.randn(M, 2 * N, generator=generator)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_silu_times_up(dtype: torch.dtype) -> None:
    x = gates_and_ups(5, 96, dtype)
    gate, up = x.double().chunk(2, dim=1)
    gold = gate / (1 + (-gate).exp()) * up
    error = testing.max_error(sm.silu_mul_ref(x, *SILU, False), gold)
    assert error <= 2 * torch.finfo(dtype).eps * gold.abs().max().item()


def test_reference_is_the_tanh_form_of_gpt_oss() -> None:
    x = gates_and_ups(5, 96, torch.float64)
    gate, up = x[:, ::2].clamp(max=7.0), x[:, 1::2].clamp(-7.0, 7.0)
    h = gate / 2
    s = h * torch.tanh(1.702 * h) + h
    gold = s * up + s
    assert testing.max_error(sm.silu_mul_ref(x, *GPT_OSS, True), gold) < 1e-13
    assert (x.abs() > 7).any()


@interpreter
@pytest.mark.parametrize(
    ("check", "count"), [("activation_shapes", 112), ("activation_adversarial_values", 5)]
)
def test_interpreted_kernel(check: str, count: int, run_checks: Any) -> None:
    process = run_checks(INTERPRET, check, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


@pytest.mark.parametrize(("form", "interleaved"), [(SILU, False), (GPT_OSS, True)])
def test_op_contract(form: tuple[float, float, float | None], interleaved: bool) -> None:
    ops = torch.ops.taut
    x = gates_and_ups(3, 40, torch.bfloat16)
    wide = torch.zeros(3, 90, dtype=torch.bfloat16)[:, :80]
    for rows in (x, wide):
        torch.library.opcheck(ops.silu_mul.default, (rows, *form, interleaved))
        for dtype in (torch.int8, torch.float8_e4m3fn):
            torch.library.opcheck(ops.silu_mul_quant.default, (rows, *form, interleaved, dtype))
        arguments = (rows, *form, interleaved, torch.tensor([0.1]))
        torch.library.opcheck(ops.silu_mul_static_quant.default, arguments)


def test_compiles_without_graph_breaks_for_every_number_of_tokens() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        q, scales = silu_mul_quant(x + 1, dtype=torch.int8)
        return q.float() * scales

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5, 9):
        x = gates_and_ups(M, 40, torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


def test_keeps_leading_dimensions() -> None:
    x = gates_and_ups(6, 40, torch.float16)
    assert torch.equal(silu_mul(x.view(2, 3, 80)).view(6, 40), silu_mul(x))
    q, scales = silu_mul_quant(x.view(2, 3, 80))
    assert (q.shape, scales.shape) == ((2, 3, 40), (2, 3, 1))


X = torch.zeros(2, 64, dtype=torch.float16)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "x must be bfloat16, float16, float32, got"),
    ({"x": torch.zeros(2, 63, dtype=torch.float16)}, "x must have an even number of columns"),
    ({"x": torch.zeros(64, 2, dtype=torch.float16).t()}, "x must have its columns next to each"),
    ({"x": torch.zeros(2, 9, 64).transpose(0, 1)}, "x must have its rows at one stride"),
    ({"x": torch.zeros(2, 64, requires_grad=True)}, "x requires grad: the op is forward only"),
    ({"limit": 0.0}, "limit must be positive or None"),
    ({"limit": float("nan")}, "limit must be positive or None"),
    ({"dtype": torch.float16}, "dtype must be torch.float8_e4m3fn or torch.int8"),
    ({"scale": torch.zeros(2)}, "scale must be one float32 element"),
    ({"scale": torch.zeros(1), "dtype": torch.int8}, "scale is for dtype torch.float8_e4m3fn only"),
    ({"scale": torch.zeros(1, device="meta")}, "scale must be on cpu"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    assert silu_mul_quant(X)[0].shape == (2, 32)
    with pytest.raises(ValueError, match=message):
        silu_mul_quant(**{"x": X} | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "interleaved"), [(SILU, False), (GPT_OSS, True), (SILU, True)])
@pytest.mark.parametrize(
    ("M", "N"), [(1, 14336), (3, 1), (17, 96), (300, 576), (63, 2880), (2, 50000)]
)
def test_gpu_kernel_matches_reference(
    M: int, N: int, form: tuple[float, float, float | None], interleaved: bool, dtype: torch.dtype
) -> None:
    x = gates_and_ups(M, N, dtype, "cuda")
    gold = sm.silu_mul_ref(x.double(), *form, interleaved)
    with testing.nan_poison():
        y = torch.ops.taut.silu_mul(x, *form, interleaved)
    testing.assert_within_budget(y, gold, sm.silu_mul_ref(x, *form, interleaved))
    for quantised in (row_quant.FP8, row_quant.INT8):
        with testing.nan_poison():
            q, scales = torch.ops.taut.silu_mul_quant(x, *form, interleaved, quantised)
        # The quantised form is the unquantised one, quantised: equal values (zero has two signs).
        wanted, wanted_scales = row_quant.quantize_rows_ref(y, quantised)
        assert torch.equal(scales, wanted_scales)
        assert torch.equal(q.float(), wanted.float())
    scale = torch.tensor([0.2], device="cuda")
    with testing.nan_poison():
        q = torch.ops.taut.silu_mul_static_quant(x, *form, interleaved, scale)
    wanted = row_quant.quantize_static_ref(y, scale)
    assert torch.equal(q.float(), wanted.float())


AWKWARD_ROWS = (
    "zeros",
    "minus zeros",
    "subnormal gates",
    "subnormal ups",
    "gates of the least sigmoid",
    "gates whose exponential is infinite",
    "largest negative gates",
    "large",
    "infinity",
    "one outlier",
    "nan",
    "random",
)
NOT_FINITE = ("infinity", "nan")


def awkward_gates_and_ups(N: int, dtype: torch.dtype, interleaved: bool, device: str) -> Any:
    """Return x whose row i is AWKWARD_ROWS[i]; no product overflows."""
    halves = gates_and_ups(len(AWKWARD_ROWS), N, dtype)
    gates, ups = (
        dict(zip(AWKWARD_ROWS, half, strict=True)) for half in (halves[:, :N], halves[:, N:])
    )
    information = torch.finfo(dtype)
    large = min(information.max, 2.0**104) / 512
    for name, value in (
        ("zeros", 0.0),
        ("minus zeros", -0.0),
        ("subnormal gates", information.smallest_normal / 4),
        ("gates of the least sigmoid", -88.0),
        ("gates whose exponential is infinite", -89.0),
        ("largest negative gates", information.min),
        ("large", large),
    ):
        gates[name].fill_(value)
    ups["zeros"].zero_()
    ups["subnormal ups"].fill_(-information.smallest_normal / 4)
    ups["large"].copy_(ups["random"].sign() * 256)
    ups["one outlier"][N // 3] = large
    gates["one outlier"][N // 3] = 100.0
    gates["infinity"][N // 2] = float("inf")
    ups["nan"][N // 2] = float("nan")
    if interleaved:
        halves = torch.stack((halves[:, :N], halves[:, N:]), dim=2).flatten(1)
    return halves.to(device)


def check_awkward_rows(
    N: int, form: tuple[float, float, float | None], interleaved: bool, dtype: torch.dtype
) -> None:
    x = awkward_gates_and_ups(N, dtype, interleaved, "cuda")
    gold = sm.silu_mul_ref(x.double(), *form, interleaved)
    reference = sm.silu_mul_ref(x, *form, interleaved)
    scale = torch.tensor([2.0**-7], device="cuda")
    with testing.nan_poison():
        y = torch.ops.taut.silu_mul(x, *form, interleaved)
        static = torch.ops.taut.silu_mul_static_quant(x, *form, interleaved, scale)
        dynamic = [
            torch.ops.taut.silu_mul_quant(x, *form, interleaved, quantised)
            for quantised in (row_quant.FP8, row_quant.INT8)
        ]
    for i, name in enumerate(AWKWARD_ROWS):
        if name in NOT_FINITE:
            continue
        one = slice(i, i + 1)
        testing.assert_within_budget(y[one], gold[one], reference[one])
        assert name not in ("zeros", "minus zeros") or not y[one].any(), name
        for q, scales in dynamic:
            # The quantised form is the unquantised one, quantised: equal values.
            wanted, wanted_scales = row_quant.quantize_rows_ref(y[one], q.dtype)
            assert torch.equal(scales[one], wanted_scales), name
            assert torch.equal(q[one].float(), wanted.float()), name
            if not y[one].any():
                assert scales[one].item() == pytest.approx(row_quant.MIN_SCALE[q.dtype]), name
            elif wanted_scales.item() > 2 * row_quant.MIN_SCALE[q.dtype]:
                assert q[one].float().abs().max() == row_quant.Q_MAX[q.dtype], name
        wanted = row_quant.quantize_static_ref(y[one], scale)
        assert torch.equal(static[one].float(), wanted.float()), name
    large = static[AWKWARD_ROWS.index("large")].float()
    assert (large.abs() == 448.0).all(), "saturated"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("form", "interleaved"), [(SILU, False), (GPT_OSS, True)])
def test_gpu_awkward_rows(
    form: tuple[float, float, float | None], interleaved: bool, dtype: torch.dtype
) -> None:
    """Each row is held to a budget of its own. (fp32 has no assembly but `ex2`, whose argument is
    rounded: what it loses at -88 is not within a budget of fp32.)
    """
    for N in (128, 1000, 14336, 40000):
        check_awkward_rows(N, form, interleaved, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["silu_mul", "silu_mul_quant", "silu_mul_static_quant"])
def test_gpu_op_contract(op: str) -> None:
    """The fake results against the launchers' own, which allocate without the dispatcher."""
    x = gates_and_ups(3, 40, torch.bfloat16, "cuda")
    wide = torch.nn.functional.pad(x, (0, 10))[:, :80]
    more: dict[str, list[tuple[Any, ...]]] = {
        "silu_mul": [()],
        "silu_mul_quant": [(torch.int8,), (torch.float8_e4m3fn,)],
        "silu_mul_static_quant": [(torch.tensor([0.1], device="cuda"),)],
    }
    for rest in more[op]:
        for rows in (x, wide):
            for form, interleaved in ((SILU, False), (GPT_OSS, True)):
                arguments = (rows, *form, interleaved, *rest)
                torch.library.opcheck(getattr(torch.ops.taut, op).default, arguments)


@pytest.mark.gpu
def test_gpu_strided_and_misaligned_rows() -> None:
    base = gates_and_ups(9, 1100, torch.bfloat16, "cuda")
    for view in (base[:, :2048], base[:, 3:2051], base[1::2, 8:2056]):
        for interleaved in (False, True):
            with testing.nan_poison():
                y = silu_mul(view, interleaved=interleaved)
            gold = sm.silu_mul_ref(view.double(), *SILU, interleaved)
            reference = sm.silu_mul_ref(view, *SILU, interleaved)
            testing.assert_within_budget(y, gold, reference)


@pytest.mark.gpu
def test_gpu_graph_replays_on_new_data_with_the_same_bits_every_time() -> None:
    x = gates_and_ups(64, 14336, torch.bfloat16, "cuda")
    torch.ops.taut.silu_mul_quant(x, *SILU, False, torch.int8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scales = torch.ops.taut.silu_mul_quant(x, *SILU, False, torch.int8)
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
        eager_q, eager_scales = torch.ops.taut.silu_mul_quant(x, *SILU, False, torch.int8)
        assert torch.equal(q, eager_q)
        assert torch.equal(scales, eager_scales)


@pytest.mark.gpu
def test_gpu_values_are_vllms() -> None:
    pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed", exc_type=ImportError)
    x = gates_and_ups(200, 14336, torch.bfloat16, "cuda")
    theirs = torch.empty(200, 14336, dtype=torch.bfloat16, device="cuda")
    torch.ops._C.silu_and_mul(theirs, x)
    y = silu_mul(x)
    # exp and division are approximated to the last bits of fp32: a rounding may differ.
    assert (y != theirs).float().mean() < 0.01
    assert torch.allclose(y.float(), theirs.float(), rtol=2**-6, atol=1e-6)
    torch.ops._C.swigluoai_and_mul(theirs, x, 1.702, 7.0)
    y = silu_mul(x, alpha=1.702, beta=1.0, limit=7.0, interleaved=True)
    assert (y != theirs).float().mean() < 0.01
    assert torch.allclose(y.float(), theirs.float(), rtol=2**-6, atol=1e-6)
