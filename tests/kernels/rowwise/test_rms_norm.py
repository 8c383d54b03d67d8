"""`taut::rms_norm` and its quantised forms: specification, interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.launch import tile_tables
from taut_kernels.norm import rms_norm as rn
from taut_kernels.norm import rms_norm_launch
from taut_kernels.norm.rms_norm import rms_norm, rms_norm_quant
from taut_kernels.rowwise import row_quant
from taut_kernels.rowwise import tiles as tiles_fused

INTERPRET = Path(__file__).with_name("interpret_fused.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPSILON = 1e-5


def operands(
    M: int, N: int, dtype: torch.dtype, *, residual: bool = True, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(M + N)
    x = torch.randn(M, N, generator=generator).to(dtype).to(device)
    weight = (torch.rand(N, generator=generator) + 0.5).to(dtype).to(device)
    other = torch.randn(M, N, generator=generator).to(dtype).to(device)
    return x, weight, other if residual else None


def gold(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    t = x.double() if residual is None else x.double() + residual.double()
    y = t / (t.pow(2).mean(dim=1, keepdim=True) + EPSILON).sqrt()
    return y if weight is None else y * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_reference_matches_the_formula(dtype: torch.dtype, with_residual: bool) -> None:
    x, weight, residual = operands(5, 300, dtype, residual=with_residual)
    expected = gold(x, weight, residual)
    summed = None if residual is None else (x.float() + residual.float()).to(dtype)
    y = rn.rms_norm_ref(x, weight, residual, EPSILON)
    # Two roundings: before the weight and after it.
    assert testing.max_error(y, expected) <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    if residual is not None:
        assert summed is not None
        assert torch.equal(residual, summed)


def test_reference_on_fp64_is_gold() -> None:
    x, weight, residual = operands(3, 100, torch.float64)
    expected = gold(x, weight, residual)
    assert testing.max_error(rn.rms_norm_ref(x, weight, residual, EPSILON), expected) < 1e-13


@pytest.mark.parametrize("dtype", [row_quant.FP8, row_quant.INT8])
def test_row_scales_follow_the_largest_value(dtype: torch.dtype) -> None:
    y = torch.tensor([[1.0, -4.0], [0.0, 0.0], [1e-9, -1e-9]])
    q, scales = row_quant.quantize_rows_ref(y, dtype)
    least = row_quant.MIN_SCALE[dtype]
    expected = [[4 / row_quant.Q_MAX[dtype]], [least], [least]]
    assert torch.allclose(scales, torch.tensor(expected), rtol=1e-6)
    assert q[0, 1].float() == -row_quant.Q_MAX[dtype]
    assert q[1].float().tolist() == [0.0, 0.0]


def test_int8_rounds_half_to_even() -> None:
    y = torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.5]])
    q, scales = row_quant.quantize_rows_ref(y, row_quant.INT8)
    assert scales.item() == 1.0
    assert q.tolist() == [[127, 0, 2, -2, 126]]


def test_jit_constants_are_the_formats() -> None:
    # The jit functions cannot read module globals: their literals are these.
    assert row_quant.MIN_SCALE[row_quant.INT8] == 1.1920928955078125e-07
    assert row_quant.MIN_SCALE[row_quant.FP8] == 4.359654017857143e-06


@interpreter
@pytest.mark.parametrize(
    ("check", "count"),
    [
        ("norm_shapes", 96),
        ("norm_of_another_weight_type", 1),
        ("norm_adversarial_values", 5),
        ("norm_keeps_other_rows_from_an_infinity", 2),
        ("empty_batch", 1),
        ("launchers_write_every_element", 3),
    ],
)
def test_interpreted_kernel(check: str, count: int, run_checks: Any) -> None:
    process = run_checks(INTERPRET, check, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


@pytest.mark.parametrize("with_residual", [False, True])
def test_op_contract(with_residual: bool) -> None:
    x, weight, residual = operands(3, 48, torch.bfloat16, residual=with_residual)
    ops = torch.ops.taut
    wide = torch.zeros(3, 50, dtype=torch.bfloat16)[:, :48]
    for rows in (x, wide):
        torch.library.opcheck(ops.rms_norm.default, (rows, weight, residual, EPSILON))
        for dtype in (torch.int8, torch.float8_e4m3fn):
            arguments = (rows, weight, residual, EPSILON, dtype)
            torch.library.opcheck(ops.rms_norm_quant.default, arguments)
        scale = torch.tensor([0.1])
        arguments = (rows, weight, residual, EPSILON, scale)
        torch.library.opcheck(ops.rms_norm_static_quant.default, arguments)
        if not with_residual:
            torch.library.opcheck(ops.rms_norm.plain, (rows, weight, EPSILON))
            torch.library.opcheck(ops.rms_norm_static_quant.plain, (rows, weight, EPSILON, scale))


def test_compiles_without_graph_breaks_and_updates_the_residual() -> None:
    _, weight, _ = operands(1, 64, torch.bfloat16)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, scales = rms_norm_quant(
            x * 2, weight, epsilon=EPSILON, residual=residual, dtype=torch.int8
        )
        return q.float() * scales, residual + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5, 9):
        x, _, residual = operands(M, 64, torch.bfloat16)
        assert residual is not None
        ours, theirs = residual.clone(), residual.clone()
        for found, expected in zip(compiled(x, ours), layer(x, theirs), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, residual)


def test_inductor_takes_the_forms_with_one_result() -> None:
    x, weight, residual = operands(3, 64, torch.bfloat16)
    assert residual is not None
    scale = torch.tensor([0.1])

    def layer(x: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
        options: dict[str, Any] = {"epsilon": EPSILON}
        q, _ = rms_norm_quant(x * 2, weight, scale=scale, **options)
        first = rms_norm(x * 2, weight, **options)
        second = rms_norm(first * 2, weight, residual=residual, **options)
        return [q.float(), first, second]

    expected = layer(x, residual.clone())
    ours = residual.clone()
    for found, wanted in zip(torch.compile(layer, fullgraph=True)(x, ours), expected, strict=True):
        assert torch.equal(found, wanted)
    assert not torch.equal(ours, residual)


def test_keeps_leading_dimensions() -> None:
    x, weight, residual = operands(6, 40, torch.float16)
    assert residual is not None
    folded = rms_norm(
        x.view(2, 3, 40), weight, epsilon=EPSILON, residual=residual.clone().view(2, 3, 40)
    )
    flat = rms_norm(x, weight, epsilon=EPSILON, residual=residual.clone())
    assert torch.equal(folded.view(6, 40), flat)
    q, scales = rms_norm_quant(x.view(2, 3, 40), weight, epsilon=EPSILON, dtype=torch.int8)
    assert (q.shape, scales.shape) == ((2, 3, 40), (2, 3, 1))


def test_static_scale_comes_back() -> None:
    x, weight, _ = operands(2, 40, torch.float16)
    scale = torch.tensor([0.05])
    q, returned = rms_norm_quant(x, weight, epsilon=EPSILON, scale=scale)
    assert returned is scale
    y = rms_norm(x, weight, epsilon=EPSILON)
    assert torch.equal(q.float(), row_quant.quantize_static_ref(y, scale).float())


X = torch.zeros(2, 64, dtype=torch.float16)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "x must be bfloat16, float16, float32, got"),
    ({"x": torch.tensor(1.0)}, r"x must have 1..262144 columns, got shape \(\)"),
    ({"x": torch.zeros(2, 0)}, "x must have 1..262144 columns"),
    ({"x": torch.zeros(64, 2, dtype=torch.float16).t()}, "x must have its columns next to each"),
    ({"x": torch.zeros(2, 9, 64).transpose(0, 1)}, "x must have its rows at one stride"),
    ({"x": torch.zeros(2, 64, requires_grad=True)}, "x requires grad: the op is forward only"),
    ({"weight": torch.zeros(63, dtype=torch.float16)}, r"weight must have shape \(64,\)"),
    ({"weight": torch.zeros(64, dtype=torch.bfloat16)}, "weight must be torch.float16 or"),
    ({"weight": torch.zeros(128, dtype=torch.float16)[::2]}, "weight must be contiguous"),
    ({"weight": torch.zeros(64, dtype=torch.float16, device="meta")}, "weight must be on cpu"),
    ({"residual": torch.zeros(2, 63, dtype=torch.float16)}, "residual must be"),
    ({"residual": torch.zeros(2, 64)}, "residual must be .* got .*float32"),
    (
        {"residual": torch.zeros(2, 64, dtype=torch.float16, device="meta")},
        "residual must be .* on cpu, got .* on meta",
    ),
    ({"dtype": torch.uint8}, "dtype must be torch.float8_e4m3fn or torch.int8"),
    ({"scale": torch.zeros(2)}, "scale must be one float32 element"),
    ({"scale": torch.zeros(1, dtype=torch.float16)}, "scale must be one float32 element"),
    ({"scale": torch.zeros(1, device="meta")}, "scale must be on cpu"),
    ({"scale": torch.zeros(1), "dtype": torch.int8}, "scale is for dtype torch.float8_e4m3fn only"),
    ({"epsilon": -1e-6}, "epsilon must be at least 0 and finite, got -1e-06"),
    ({"epsilon": float("nan")}, "epsilon must be at least 0 and finite, got nan"),
    ({"epsilon": float("inf")}, "epsilon must be at least 0 and finite, got inf"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": X[0], "epsilon": EPSILON}
    assert rms_norm_quant(**arguments)[0].shape == (2, 64)
    with pytest.raises(ValueError, match=message):
        rms_norm_quant(**arguments | change)


def test_plain_norm_refuses_the_same_epsilons() -> None:
    with pytest.raises(ValueError, match=r"epsilon must be at least 0 and finite, got -1\.0"):
        rms_norm(X, epsilon=-1.0)


def test_variants_cover_every_form() -> None:
    from taut_bench.instruments.forms import rowwise

    found = list(rowwise.kernel_variants())
    assert len(found) == len({(v.label, v.tile, v.target) for v in found})
    labels = " ".join(v.label for v in found)
    for form in (
        "add_rms_norm same",
        "rms_norm_quant int8",
        "silu_mul gpt-oss",
        "row_quant int8",
        "rope neox",
    ):
        assert form in labels
    assert all(v.target == "sm_90" for v in found if "fp8" in v.label)


def assert_quantised_alike(
    q: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor, wanted_scales: torch.Tensor
) -> None:
    """Equal but for the last bit of the statistics: two kernels may add the squares in two orders.

    That moves a value of y by at most one rounding of its type, and the 8-bit value, in few places,
    by one step.
    """
    assert torch.allclose(scales, wanted_scales, rtol=2**-7)
    q32, wanted32 = q.float(), wanted.float()
    step = 1.0 if q.dtype is row_quant.INT8 else wanted32.abs().clamp(min=2**-6) * 2**-2
    assert ((q32 - wanted32).abs() <= step).all()
    assert (q32 != wanted32).float().mean() <= 0.01


def copy_of(residual: torch.Tensor | None) -> torch.Tensor | None:
    return None if residual is None else residual.clone()


def check_on_gpu(M: int, N: int, dtype: torch.dtype, with_residual: bool) -> None:
    x, weight, residual = operands(M, N, dtype, residual=with_residual, device="cuda")
    expected = gold(x, weight, residual)
    ours, theirs = copy_of(residual), copy_of(residual)
    with testing.nan_poison():
        y = torch.ops.taut.rms_norm(x, weight, ours, EPSILON)
    testing.assert_within_budget(y, expected, rn.rms_norm_ref(x, weight, theirs, EPSILON))
    if ours is not None and theirs is not None:
        assert torch.equal(ours, theirs)
    scale = torch.tensor([0.02], device="cuda")
    for quantised in (row_quant.FP8, row_quant.INT8):
        with testing.nan_poison():
            q, scales = torch.ops.taut.rms_norm_quant(
                x, weight, copy_of(residual), EPSILON, quantised
            )
        wanted, wanted_scales = row_quant.quantize_rows_ref(y, quantised)
        assert_quantised_alike(q, scales, wanted, wanted_scales)
    static = torch.ops.taut.rms_norm_static_quant(x, weight, copy_of(residual), EPSILON, scale)
    wanted = row_quant.quantize_static_ref(y, scale)
    assert_quantised_alike(static, scale, wanted, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    ("M", "N"), [(1, 4096), (3, 1), (17, 128), (300, 576), (63, 5120), (5, 14336), (2, 50000)]
)
def test_gpu_kernel_matches_reference(
    M: int, N: int, with_residual: bool, dtype: torch.dtype
) -> None:
    check_on_gpu(M, N, dtype, with_residual)


AWKWARD_ROWS = (
    "zeros",
    "minus zeros",
    "subnormal",
    "least normal",
    "huge",
    "infinity",
    "one outlier",
    "nan",
    "outlier among zeros",
    "cancelled",
    "random",
)
"""Neighbours of an infinity and of a NaN are among those that a program may hold beside them."""
NOT_FINITE = ("infinity", "nan")
NOTHING = ("zeros", "minus zeros")


def awkward_rows(
    N: int, dtype: torch.dtype, *, residual: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return operands whose row i is AWKWARD_ROWS[i]; the residual is half of x, or its opposite.

    Squares of the largest add up to less than fp32's largest: beyond, the specification is 0.
    """
    x, weight, _ = operands(len(AWKWARD_ROWS), N, dtype)
    row = dict(zip(AWKWARD_ROWS, x, strict=True))
    information = torch.finfo(dtype)
    huge = min(information.max / 2, 2.0**52)
    row["zeros"].zero_()
    row["minus zeros"].fill_(-0.0)
    row["subnormal"].fill_(information.smallest_normal / 4)
    row["least normal"].copy_(row["random"].sign() * information.smallest_normal)
    row["huge"].copy_(row["random"].sign() * huge)
    row["infinity"][N // 2] = float("inf")
    row["one outlier"][N // 3] = -huge
    row["nan"][N // 2] = float("nan")
    row["outlier among zeros"].zero_()
    row["outlier among zeros"][N - 1] = huge
    other = x / 2
    other[AWKWARD_ROWS.index("cancelled")] = -row["cancelled"]
    return x.to(device), weight.to(device), other.to(device) if residual else None


def check_awkward_rows(N: int, with_residual: bool, dtype: torch.dtype) -> None:
    x, weight, residual = awkward_rows(N, dtype, residual=with_residual, device="cuda")
    expected = gold(x, weight, residual)
    ours, theirs = copy_of(residual), copy_of(residual)
    with testing.nan_poison():
        y = torch.ops.taut.rms_norm(x, weight, ours, EPSILON)
    reference = rn.rms_norm_ref(x, weight, theirs, EPSILON)
    scale = torch.tensor([0.01], device="cuda")
    with testing.nan_poison():
        static = torch.ops.taut.rms_norm_static_quant(x, weight, copy_of(residual), EPSILON, scale)
        dynamic = [
            torch.ops.taut.rms_norm_quant(x, weight, copy_of(residual), EPSILON, quantised)
            for quantised in (row_quant.FP8, row_quant.INT8)
        ]
    for i, name in enumerate(AWKWARD_ROWS):
        if name in NOT_FINITE:
            continue
        one = slice(i, i + 1)
        nothing = name in NOTHING or (name == "cancelled" and with_residual)
        testing.assert_within_budget(y[one], expected[one], reference[one])
        assert bool(y[one].any()) != nothing, name
        if ours is not None and theirs is not None:
            assert torch.equal(ours[one], theirs[one]), name
        for q, scales in dynamic:
            wanted, wanted_scales = row_quant.quantize_rows_ref(y[one], q.dtype)
            assert_quantised_alike(q[one], scales[one], wanted, wanted_scales)
            assert bool(q[one].float().any()) == bool(wanted.float().any()), name
            if nothing:
                assert scales[one].item() == pytest.approx(row_quant.MIN_SCALE[q.dtype]), name
            elif wanted_scales.item() > 2 * row_quant.MIN_SCALE[q.dtype]:
                assert q[one].float().abs().max() == row_quant.Q_MAX[q.dtype], name
        wanted = row_quant.quantize_static_ref(y[one], scale)
        assert_quantised_alike(static[one], scale, wanted, scale)
    outlier = static[AWKWARD_ROWS.index("outlier among zeros")].float()
    assert outlier[-1] == 448.0, "saturated"
    assert not outlier[:-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_gpu_awkward_rows(with_residual: bool, dtype: torch.dtype) -> None:
    """Each row is held to a budget of its own. (fp32 has no assembly: the interpreter runs it.)"""
    for N in (128, 1000, 4096, 40000):
        check_awkward_rows(N, with_residual, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_quant", "rms_norm_static_quant"])
def test_gpu_op_contract(op: str) -> None:
    """The fake results against the launchers' own, which allocate without the dispatcher."""
    x, weight, residual = operands(3, 48, torch.bfloat16, device="cuda")
    wide = torch.randn(3, 50, device="cuda").to(torch.bfloat16)[:, :48]
    scale = torch.tensor([0.1], device="cuda")
    more: dict[str, list[tuple[Any, ...]]] = {
        "rms_norm": [()],
        "rms_norm_quant": [(torch.int8,), (torch.float8_e4m3fn,)],
        "rms_norm_static_quant": [(scale,)],
    }
    packet = getattr(torch.ops.taut, op)
    for rest in more[op]:
        for rows, other in ((x, residual), (wide, residual), (x, None)):
            torch.library.opcheck(packet.default, (rows, weight, other, EPSILON, *rest))
        if op != "rms_norm_quant":
            torch.library.opcheck(packet.plain, (wide, weight, EPSILON, *rest))


@pytest.mark.gpu
def test_gpu_every_tile_of_the_tables_is_right() -> None:
    name = torch.cuda.get_device_name()
    table = tile_tables.of_card(tiles_fused.tables(), name)
    for (op, N), rows in table.choices.items() if table else ():
        if "rms_norm" not in op:
            continue
        for limit, tile in rows:
            x, weight, residual = operands(
                limit or 300, N, torch.bfloat16, residual=op.startswith("add_"), device="cuda"
            )
            y = torch.full_like(x, float("nan"))
            expected = gold(x, weight, residual)
            theirs = None if residual is None else residual.clone()
            rms_norm_launch.launch(tile, "same", x, weight, residual, EPSILON, y, None)
            reference = rn.rms_norm_ref(x, weight, theirs, EPSILON)
            testing.assert_within_budget(y, expected, reference)


@pytest.mark.gpu
def test_gpu_strided_misaligned_and_far_rows() -> None:
    base = torch.randn(9, 4200, device="cuda").to(torch.bfloat16)
    weight = torch.rand(4096, device="cuda").to(torch.bfloat16)
    for view in (base[:, :4096], base[:, 3:4099], base[1::2, 8:4104]):
        with testing.nan_poison():
            y = rms_norm(view, weight, epsilon=EPSILON)
        reference = rn.rms_norm_ref(view, weight, None, EPSILON)
        testing.assert_within_budget(y, gold(view, weight, None), reference)
    # Rows 2**31 elements apart: the offset needs 64 bits.
    far = torch.empty(2, 2**31 + 4096, dtype=torch.bfloat16, device="cuda")[:, -4096:]
    far.copy_(base[:2, :4096])
    assert torch.equal(
        rms_norm(far, weight, epsilon=EPSILON), rms_norm(base[:2, :4096], weight, epsilon=EPSILON)
    )


@pytest.mark.gpu
def test_gpu_graph_replays_on_new_data_with_the_same_bits_every_time() -> None:
    x, weight, residual = operands(64, 4096, torch.bfloat16, device="cuda")
    assert residual is not None
    start = residual.clone()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        residual.copy_(start)
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.taut.rms_norm_quant(
            x, weight, residual, EPSILON, torch.int8
        )
        return result

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scales = call()
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
        eager_q, eager_scales = call()
        assert torch.equal(q, eager_q)
        assert torch.equal(scales, eager_scales)


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_gpu_forms_with_one_result_follow_new_data_in_a_graph(
    with_residual: bool, static: bool
) -> None:
    x, weight, residual = operands(64, 4096, torch.bfloat16, residual=with_residual, device="cuda")
    scale = torch.tensor([0.02], device="cuda")

    def call(other: torch.Tensor | None) -> torch.Tensor:
        if static:
            options: dict[str, Any] = {"epsilon": EPSILON, "residual": other, "scale": scale}
            return rms_norm_quant(x, weight, **options)[0]
        return rms_norm(x, weight, epsilon=EPSILON, residual=other)

    call(residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(residual)
    for seed in range(3):
        fresh, other, _ = operands(64, 4096 + seed, torch.bfloat16, device="cuda")
        x.copy_(fresh[:, :4096])
        weight.copy_(other[:4096])
        scale.fill_(0.01 * (seed + 2))
        theirs = None
        if residual is not None:
            residual.copy_(fresh[:, -4096:].flip(1))
            theirs = residual.clone()
        graph.replay()
        assert torch.equal(y.float(), call(theirs).float())
        if residual is not None and theirs is not None:
            assert torch.equal(residual, theirs)


@pytest.mark.gpu
def test_gpu_dependent_launch_waits_for_the_kernel_in_front() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs sm_90")
    tile = tiles_fused.FusedTile(1, 1024, 4, pdl=True)
    x, weight, _ = operands(2048, 4096, torch.bfloat16, device="cuda")
    middle, y, expected = (torch.empty_like(x) for _ in range(3))
    # The same tile without it: another one adds the squares in another order.
    alone = tiles_fused.FusedTile(1, 1024, 4)
    rms_norm_launch.launch(alone, "same", x, weight, None, EPSILON, middle, None)
    rms_norm_launch.launch(alone, "same", middle, weight, None, EPSILON, expected, None)
    for _ in range(20):
        middle.fill_(float("nan"))
        rms_norm_launch.launch(tile, "same", x, weight, None, EPSILON, middle, None)
        rms_norm_launch.launch(tile, "same", middle, weight, None, EPSILON, y, None)
        assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [row_quant.FP8, row_quant.INT8])
@pytest.mark.parametrize("with_residual", [False, True])
def test_gpu_quantised_values_are_vllms(with_residual: bool, dtype: torch.dtype) -> None:
    ops = pytest.importorskip(
        "vllm._custom_ops", reason="vLLM is not installed", exc_type=ImportError
    )
    x, weight, residual = operands(200, 4096, torch.bfloat16, residual=with_residual, device="cuda")
    theirs = None if residual is None else residual.clone()
    expected, expected_scales = ops.rms_norm_dynamic_per_token_quant(
        x, weight, EPSILON, dtype, None, theirs
    )
    q, scales = rms_norm_quant(x, weight, epsilon=EPSILON, residual=residual, dtype=dtype)
    # Sums of squares are added in another order: the last bit of a rounding may differ, and the
    # 8-bit value with it, in few places and by one step.
    assert torch.allclose(scales, expected_scales, rtol=2**-7)
    assert (q.float() != expected.float()).float().mean() < 0.01
    dequantised, wanted = q.float() * scales, expected.float() * expected_scales
    assert (dequantised - wanted).abs().max() <= 0.15 * wanted.abs().max()
    if residual is not None:
        assert torch.equal(residual, theirs)
