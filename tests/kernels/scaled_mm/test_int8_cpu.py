"""Int8 products on CPUs without VNNI: codes in halves, codes in fp32, saturation noticed."""

from __future__ import annotations

import pytest
import torch

from taut_kernels.gemm.scaled_mm import cpu_int8 as int8_cpu


def _saturating(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply as oneDNN does without VNNI: pairs of products of x + 128 added in 16 bits."""
    unsigned = x.int() + 128
    products = unsigned[:, None, :] * w.int()[None, :, :]
    pairs = products.view(*products.shape[:2], -1, 2).sum(-1).clamp(-(2**15), 2**15 - 1)
    return (pairs.sum(-1) - 128 * w.int().sum(1)).float()


def _codes(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def test_halves_add_up_and_stay_in_reach() -> None:
    weight = torch.arange(-128, 128, dtype=torch.int8).view(16, 16)
    halves = int8_cpu.split_codes(weight)
    assert halves.shape == (16, 32) and halves.dtype is torch.int8
    assert torch.equal(halves[:, :16].int() + halves[:, 16:].int(), weight.int())
    assert int(halves.abs().max()) == int8_cpu.MOST_EXACT


def test_halves_are_exact_where_pairs_saturate() -> None:
    x, w = _codes(8, 64, seed=1), _codes(24, 64, seed=2)
    exact = (x.int() @ w.int().T).float()
    assert not torch.equal(_saturating(x, w), exact)
    twice = torch.cat((x, x), dim=1)
    assert torch.equal(_saturating(twice, int8_cpu.split_codes(w)), exact)


def test_one_more_than_the_largest_half_saturates() -> None:
    x = torch.full((1, 2), 127, dtype=torch.int8)
    for code, exact in ((int8_cpu.MOST_EXACT, True), (int8_cpu.MOST_EXACT + 1, False)):
        w = torch.full((1, 2), code, dtype=torch.int8)
        assert torch.equal(_saturating(x, w), (x.int() @ w.int().T).float()) is exact


def test_known_pair_tells_saturating_products_from_exact_ones() -> None:
    assert not int8_cpu.is_exact(int8_cpu.int8_product_error(_saturating))
    exact = int8_cpu.int8_product_error(lambda x, w: (x.int() @ w.int().T).float())
    assert exact == 0.0 and int8_cpu.is_exact(exact)


@pytest.mark.parametrize("layout", ["fp16", "fp32"])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_op_equals_integer_arithmetic(
    layout: str, zero_points: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "fp16" and not int8_cpu.multiplies_fp16():
        pytest.skip("FBGEMM does not multiply fp16 on this CPU")
    monkeypatch.setattr(int8_cpu, "multiplies_fp16", lambda: layout == "fp16")
    M, N, K = 5, 12, 96
    x, w = _codes(M, K, seed=3), _codes(N, K, seed=4)
    x_scale, w_scale = torch.rand(M, 1) + 0.5, torch.rand(N) + 0.5
    azp = torch.arange(M, dtype=torch.int32)[:, None] - 2 if zero_points else None
    bias = torch.randn(N) if with_bias else None
    shifted = x.long() - (0 if azp is None else azp.long())
    gold = (shifted @ w.long().T).double() * x_scale.double() * w_scale.double()
    gold += 0 if bias is None else bias.double()
    operands = (x, int8_cpu.pack_codes(w), x_scale, w_scale, azp, bias, torch.float32)
    y = torch.ops.taut.int8_gemm_cpu(*operands)
    # Sums of integers below 2²⁴ are exact; two products and a sum round to fp32.
    torch.testing.assert_close(y.double(), gold, rtol=3 * 2.0**-23, atol=1e-3)
    if layout == "fp32":  # FBGEMM's handle cannot be cloned, which opcheck does
        torch.library.opcheck(torch.ops.taut.int8_gemm_cpu.default, operands)
    compiled = torch.compile(torch.ops.taut.int8_gemm_cpu, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands), y)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_any_number_of_rows_is_exact_up_to_the_largest_sums(rows: int) -> None:
    """K = 518 is the most whose sums of the largest codes stay below 2²⁴."""
    x, w = torch.full((rows, 518), 127, dtype=torch.int8), torch.full((3, 518), -128).to(torch.int8)
    scales = torch.ones(rows, 1), torch.ones(3)
    packed = int8_cpu.pack_codes(w)
    y = torch.ops.taut.int8_gemm_cpu(x, packed, *scales, None, None, torch.float32)
    assert torch.equal(y, torch.full((rows, 3), -518.0 * 127 * 128))
