"""`taut::row_quant`: specification, vLLM's definition, interpreter, op contract, GPU."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.norm import rms_norm_launch
from taut_kernels.norm.rms_norm import rms_norm, rms_norm_quant
from taut_kernels.rowwise import quantize, row_quant
from taut_kernels.rowwise import tiles as tiles_fused

INTERPRET = Path(__file__).with_name("interpret_fused.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMATS = (row_quant.FP8, row_quant.INT8)


def rows(M: int, N: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Draw rows of all magnitudes, the first of several zero."""
    generator = torch.Generator().manual_seed(M + N)
    x = torch.randn(M, N, generator=generator) * 10 ** torch.linspace(-4, 4, M)[:, None]
    if M > 1:
        x[0] = 0
    return x.to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantised", FORMATS)
def test_values_times_scales_are_the_rows(quantised: torch.dtype, dtype: torch.dtype) -> None:
    x = rows(9, 96, dtype)
    q, scales = quantize.row_quant(x, dtype=quantised)
    assert (q.dtype, scales.dtype) == (quantised, torch.float32)
    assert (q.shape, scales.shape) == ((9, 96), (9, 1))
    largest = x.double().abs().amax(dim=1, keepdim=True)
    # Half a step of the largest: e4m3 has 3 bits of mantissa; below the least scale, half of that.
    step = largest / 127 / 2 if quantised is row_quant.INT8 else largest / 16
    error = (q.double() * scales.double() - x.double()).abs()
    assert (error <= 1.001 * step.clamp(min=row_quant.MIN_SCALE[quantised])).all()
    assert torch.equal(q[0].double(), torch.zeros(96, dtype=torch.float64))


def test_int8_dequantises_as_vllms_definition() -> None:
    """Scale max|x| / 127 without a least one, factor 127 / max|x|, 0 for a row of zeros."""
    x = rows(400, 512, torch.float32)
    x[1] = 127 * 2.0**-25  # below the least scale
    largest = x.abs().amax(dim=1, keepdim=True)
    theirs = largest / 127.0
    factor = torch.where(largest == 0, torch.zeros_like(largest), 127.0 / largest)
    values = (x * factor).round().clamp(-128, 127)
    q, scales = quantize.row_quant(x, dtype=row_quant.INT8)
    assert torch.equal(scales, theirs.clamp(min=2.0**-23))
    assert torch.equal(q[0] * scales[0], values[0] * theirs[0])
    assert ((q * scales - x)[1]).abs().max() <= 2.0**-24
    assert (q[2:] - values[2:]).abs().max() <= 1
    assert (q[2:] != values[2:]).float().mean() < 1e-3


@interpreter
@pytest.mark.parametrize(
    ("check", "count"), [("quantisations", 28), ("quantisation_adversarial_values", 6)]
)
def test_interpreted_kernel(check: str, count: int, run_checks: Any) -> None:
    process = run_checks(INTERPRET, check, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


@pytest.mark.parametrize("quantised", FORMATS)
def test_op_contract(quantised: torch.dtype) -> None:
    op = torch.ops.taut.row_quant.default
    wide = torch.zeros(3, 90, dtype=torch.bfloat16)[:, :80]
    for x in (rows(3, 80, torch.bfloat16), wide, torch.zeros(0, 80)):
        torch.library.opcheck(op, (x, quantised))


def test_compiles_without_graph_breaks_for_every_number_of_tokens() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        q, scales = quantize.row_quant(x + 1, dtype=torch.int8)
        return q.float() * scales

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5, 9):
        x = rows(M, 40, torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("quantised", FORMATS)
def test_has_the_bits_of_the_fused_forms(quantised: torch.dtype) -> None:
    x = rows(7, 96, torch.bfloat16)
    y = rms_norm(x, x[1], epsilon=1e-5)
    fused, fused_scales = rms_norm_quant(x, x[1], epsilon=1e-5, dtype=quantised)
    q, scales = quantize.row_quant(y, dtype=quantised)
    assert torch.equal(q.float(), fused.float())
    assert torch.equal(scales, fused_scales)


def test_keeps_leading_dimensions() -> None:
    x = rows(6, 40, torch.float16)
    q, scales = quantize.row_quant(x.view(2, 3, 40), dtype=torch.int8)
    assert (q.shape, scales.shape) == ((2, 3, 40), (2, 3, 1))
    assert torch.equal(q.view(6, 40), quantize.row_quant(x, dtype=torch.int8)[0])


X = torch.zeros(2, 64, dtype=torch.float16)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "x must be bfloat16, float16, float32, got"),
    ({"x": torch.zeros(2, 0)}, "x must have 1..262144 columns"),
    ({"x": torch.zeros(2, 262145)}, "x must have 1..262144 columns"),
    ({"x": torch.zeros(64, 2, dtype=torch.float16).t()}, "x must have its columns next to each"),
    ({"x": torch.zeros(2, 9, 64).transpose(0, 1)}, "x must have its rows at one stride"),
    ({"x": torch.zeros(2, 64, requires_grad=True)}, "x requires grad: the op is forward only"),
    ({"dtype": torch.uint8}, "dtype must be torch.float8_e4m3fn or torch.int8"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    assert quantize.row_quant(X)[0].shape == (2, 64)
    with pytest.raises(ValueError, match=message):
        quantize.row_quant(**{"x": X} | change)


def assert_is_reference(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> None:
    """Scales bit for bit, values too (zero has two signs)."""
    wanted, wanted_scales = row_quant.quantize_rows_ref(x, q.dtype)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(q.float(), wanted.float())


def every_pair(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows' largest values [L, 1] and others [V]: all that quotients in e4m3 can be made of.

    A power of two as a factor of both changes no quotient: the largest have one exponent, the
    others those from there down to where e4m3 vanishes.
    """
    mantissas = 1 / torch.finfo(dtype).eps
    largest = 1 + torch.arange(mantissas, dtype=torch.float64) / mantissas
    others = largest[None, :] * 2.0 ** torch.arange(0, -21, -1, dtype=torch.float64)[:, None]
    assert torch.equal(largest, largest.to(dtype).double())
    return largest[:, None], others.flatten()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_parts_of_the_reciprocal_divide_16_bits_as_a_division(dtype: torch.dtype) -> None:
    """`quantize` in fp64, where its fused products and sums are exact until they are rounded."""
    all_largest, y = every_pair(dtype)
    compared = 0
    for largest in all_largest.float().split(16):
        scale = largest / torch.full_like(largest, 448)
        reciprocal = 1 / scale
        error = (1 - scale.double() * reciprocal.double()).float() * reciprocal
        rest = y.float() * error
        quotient = (y * reciprocal.double() + rest.double()).float()
        wanted = y.float() / scale
        inside = wanted <= 448
        assert torch.equal(
            quotient[inside].to(row_quant.FP8).float(), wanted[inside].to(row_quant.FP8).float()
        )
        compared += int(inside.sum())
    assert compared > 20 * len(all_largest) ** 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_every_pair_of_values_divides_as_the_reference(dtype: torch.dtype) -> None:
    all_largest, others = every_pair(dtype)
    for largest in all_largest.to("cuda").split(128):
        y = torch.where(others.to("cuda") <= largest, others.to("cuda"), 0.0)
        # Powers of two that fp16 has, so that nothing of the rows is subnormal in it.
        x = (torch.cat([largest, y], dim=1) * 2.0**7).to(dtype)
        for step in x.split(16384, dim=1):
            part = torch.cat([x[:, :1], step], dim=1)
            q, scales = torch.ops.taut.row_quant(part, row_quant.FP8)
            assert_is_reference(part, q, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize(
    ("N", "dtype"),
    [
        *itertools.product((64, 4096, 14336), (torch.bfloat16, torch.float16)),
        *itertools.product((1, 1000, 28672, 50000), (torch.float32,)),
    ],
)
def test_gpu_kernel_matches_reference(N: int, dtype: torch.dtype, quantised: torch.dtype) -> None:
    for M in (1, 7, 64, 1000):
        x = rows(M, N, dtype, "cuda")
        with testing.nan_poison():
            q, scales = torch.ops.taut.row_quant(x, quantised)
        assert_is_reference(x, q, scales)


def awkward_rows(N: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Draw rows whose quotients are as the reference's, the last one beyond 2**120 in bf16."""
    x = rows(10, N, torch.float32).to(dtype)
    information = torch.finfo(dtype)
    large = information.max if dtype is torch.float32 else min(information.max, 2.0**120)
    x[1] = -0.0
    x[2] = information.smallest_normal / 4
    x[3] = -information.smallest_normal
    x[4] = large * x[9].sign()
    x[5, N // 3] = -large
    x[6] = 0
    x[6, N - 1] = information.smallest_normal
    x[7] = 0
    x[7, N - 1] = large
    x[8, ::2] = information.smallest_normal
    x[9] = information.max * x[9].sign()
    return x.to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_awkward_rows(dtype: torch.dtype, quantised: torch.dtype) -> None:
    for N in (128, 1000, 4096, 40000):
        x = awkward_rows(N, dtype, "cuda")
        with testing.nan_poison():
            q, scales = torch.ops.taut.row_quant(x, quantised)
        assert_is_reference(x[:9], q[:9], scales[:9])
        for row in (0, 1):
            assert not q[row].float().any()
            assert scales[row].item() == pytest.approx(row_quant.MIN_SCALE[quantised])
        for row in (4, 5, 7, 9):
            assert q[row].float().abs().max() == row_quant.Q_MAX[quantised]
        wanted, wanted_scales = row_quant.quantize_rows_ref(x[9:], quantised)
        assert torch.equal(scales[9:], wanted_scales)
        assert torch.equal(q[9:].float().sign(), wanted.float().sign())


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", FORMATS)
def test_gpu_op_contract(quantised: torch.dtype) -> None:
    """The fake results against the launcher's own, which allocates without the dispatcher."""
    wide = torch.zeros(3, 90, dtype=torch.bfloat16, device="cuda")[:, :80]
    x = rows(3, 80, torch.bfloat16, "cuda")
    for operand in (x, wide, torch.zeros(0, 80, device="cuda")):
        torch.library.opcheck(torch.ops.taut.row_quant.default, (operand, quantised))


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", FORMATS)
def test_gpu_strided_misaligned_and_far_rows(quantised: torch.dtype) -> None:
    base = rows(9, 4200, torch.bfloat16, "cuda")
    for view in (base[:, :4096], base[:, 3:4099], base[1::2, 8:4104], base[3:4, 1:4097]):
        with testing.nan_poison():
            q, scales = torch.ops.taut.row_quant(view, quantised)
        assert_is_reference(view, q, scales)
    # Rows 2**31 elements apart: the offset needs 64 bits.
    far = torch.empty(2, 2**31 + 4096, dtype=torch.bfloat16, device="cuda")[:, -4096:]
    far.copy_(base[7:, :4096])
    assert_is_reference(base[7:, :4096], *torch.ops.taut.row_quant(far, quantised))


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", FORMATS)
def test_gpu_every_tile_has_the_same_bits(quantised: torch.dtype) -> None:
    from taut_bench.fused_cases import Form
    from tuning import tune_fused

    out, x = row_quant.OUT[quantised], rows(300, 4096, torch.bfloat16, "cuda")
    tiles = list(tune_fused.candidates(Form("row_quant", out), 4096, 300))
    assert len(tiles) > 5
    for tile in tiles:
        q = torch.full(x.shape, 77, device="cuda").to(quantised)
        scales = torch.full((300, 1), float("nan"), device="cuda")
        quantize.launch(tile, out, x, q, scales)
        assert_is_reference(x, q, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("N", [4096, 28672, 40000])
def test_gpu_early_start_waits_for_the_kernel_in_front_in_a_graph(
    N: int, quantised: torch.dtype
) -> None:
    """The norm in front lets go at its start: who does not wait for its end reads NaN."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs sm_90")
    M, out = 256, row_quant.OUT[quantised]
    norm, quant = (
        dataclasses.replace(tiles_fused.rule(op, N, M), pdl=True)
        for op in ("rms_norm", "row_quant")
    )
    x = rows(M, N, torch.bfloat16, "cuda")
    middle, alone = torch.empty_like(x), torch.empty_like(x)
    found = [
        (torch.empty(M, N, dtype=quantised, device="cuda"), torch.empty(M, 1, device="cuda"))
        for _ in range(8)
    ]

    def chain() -> None:
        for q, scales in found:
            middle.fill_(float("nan"))
            rms_norm_launch.launch(norm, "same", x, None, None, 1e-5, middle, None)
            quantize.launch(quant, out, middle, q, scales)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    late = dataclasses.replace(norm, pdl=False)
    for seed in range(5):
        x.copy_(torch.randn(M, N, device="cuda") * (seed + 1))
        graph.replay()
        torch.cuda.synchronize()
        rms_norm_launch.launch(late, "same", x, None, None, 1e-5, alone, None)
        for q, scales in found:
            assert_is_reference(alone, q, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", FORMATS)
def test_gpu_op_in_a_graph_follows_new_data(quantised: torch.dtype) -> None:
    x = rows(64, 4096, torch.bfloat16, "cuda")
    torch.ops.taut.row_quant(x, quantised)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scales = torch.ops.taut.row_quant(x, quantised)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_is_reference(x, q, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [64, 4096, 14336])
def test_gpu_values_are_vllms(N: int, dtype: torch.dtype) -> None:
    ops = pytest.importorskip(
        "vllm._custom_ops", reason="vLLM is not installed", exc_type=ImportError
    )
    x = rows(300, N, dtype, "cuda")
    theirs, their_scales = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    q, scales = quantize.row_quant(x)
    assert torch.equal(scales, their_scales)
    assert torch.equal(q.float(), theirs.float())
    theirs, their_scales, _ = ops.scaled_int8_quant(x)
    q, scales = quantize.row_quant(x, dtype=torch.int8)
    zero = (x == 0).all(dim=1)
    assert zero[0]
    assert torch.equal(scales[~zero], their_scales[~zero].clamp(min=2.0**-23))
    assert torch.equal(q[zero] * scales[zero], theirs[zero] * their_scales[zero])
    # Rows below the least scale (fp16's zeros and subnormals) have coarser steps.
    fine = (their_scales >= 2.0**-23).flatten()
    assert fine.sum() > 200
    assert (q[fine].int() - theirs[fine].int()).abs().max() <= 1
    assert (q[fine] != theirs[fine]).float().mean() < 1e-3
