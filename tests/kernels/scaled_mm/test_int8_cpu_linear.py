"""W8A8 compiled on the CPU it runs on: exact for every code and shape, in both instruction sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from taut_kernels.gemm.scaled_mm import cpu_linear
from taut_kernels.launch import cpp_library

_WHY_NOT = cpu_linear.why_not_here()
needs_op = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
VNNI = pytest.param(
    True, marks=pytest.mark.skipif(not cpu_linear.has_vnni(), reason="this CPU has no AVX512-VNNI")
)
both_sets = pytest.mark.parametrize("vnni", [VNNI, False])
SHAPES = [
    (960, 576, 1),
    (33, 37, 3),
    (50, 1536, 8),
    (1, 1, 33),
    (16, 100, 7),
    (70, 6, 12),
    (5, 9, 0),
]


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _codes(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _multiply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    *given: torch.Tensor | None,
    symmetric: bool = True,
    vnni: bool = False,
) -> torch.Tensor:
    packed, sums = cpu_linear.pack(codes)
    rest = (*given, None, None, None)[:3]
    y: torch.Tensor = torch.ops.taut.int8_linear_cpu(x, packed, scale, sums, *rest, symmetric, vnni)
    return y


@needs_op
@both_sets
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
def test_op_equals_its_reference_to_the_bit(
    N: int, K: int, M: int, with_bias: bool, static: bool, symmetric: bool, vnni: bool
) -> None:
    x, codes = _random(M, K, seed=1).bfloat16(), _codes(N, K, seed=2)
    scale = _random(N, seed=3).abs()
    bias = _random(N, seed=4).bfloat16() if with_bias else None
    given = (torch.tensor([0.013]), None if symmetric else torch.tensor([-9], dtype=torch.int32))
    rest = (bias, *given) if static else (bias, None, None)
    y = _multiply(x, codes, scale, *rest, symmetric=symmetric, vnni=vnni)
    expected = cpu_linear.int8_linear_cpu_ref(x, codes, scale, *rest, symmetric=symmetric)
    assert torch.equal(y, expected)


@needs_op
@both_sets
@pytest.mark.parametrize("code", [-128, 127])
def test_the_largest_sums_stay_exact(code: int, vnni: bool) -> None:
    """Each neighbouring pair leaves 16 bits, and all of 65,536 products of one sign are added."""
    K = cpu_linear.MOST_FEATURES
    x = torch.full((2, K), -128.0).bfloat16()
    codes = torch.full((17, K), code, dtype=torch.int8)
    y = _multiply(x, codes, torch.ones(17), None, torch.ones(1), vnni=vnni)
    assert torch.equal(y, torch.full((2, 17), -128.0 * code * K).bfloat16())


@needs_op
@both_sets
def test_rows_of_zeros_and_rows_that_are_no_numbers(vnni: bool) -> None:
    x = torch.ones(4, 24).bfloat16()
    x[0], x[2, 3] = 0, float("nan")
    codes, bias = _codes(20, 24, seed=5), torch.arange(20).bfloat16()
    y = _multiply(x, codes, torch.ones(20), bias, vnni=vnni)
    assert torch.equal(y[0], bias)
    assert y[2].isnan().all() and not y[[0, 1, 3]].isnan().any()
    scale = torch.zeros(20)
    assert torch.equal(
        _multiply(x[1:2], codes, scale, None, vnni=vnni), torch.zeros(1, 20).bfloat16()
    )


@needs_op
@both_sets
def test_an_outlier_beyond_a_static_scale_is_clamped(vnni: bool) -> None:
    x = torch.tensor([[3e38, -3e38, 1.0, 0.0]]).bfloat16()
    codes = torch.eye(4, dtype=torch.int8)
    y = _multiply(x, codes, torch.ones(4), None, torch.ones(1), vnni=vnni)
    assert y.tolist() == [[127.0, -128.0, 1.0, 0.0]]


@needs_op
def test_rows_do_not_depend_on_their_neighbours_or_the_number_of_threads() -> None:
    x, codes = _random(33, 576, seed=6).bfloat16(), _codes(960, 576, seed=7)
    scale, vnni = torch.rand(960), cpu_linear.has_vnni()
    whole = _multiply(x, codes, scale, vnni=vnni)
    alone = torch.cat([_multiply(row[None], codes, scale, vnni=vnni) for row in x])
    assert torch.equal(whole, alone)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(whole, _multiply(x, codes, scale, vnni=vnni))
    finally:
        torch.set_num_threads(threads)


@needs_op
def test_op_is_traced_with_the_shape_it_returns() -> None:
    x, codes = _random(3, 32, seed=8).bfloat16(), _codes(24, 32, seed=9)
    packed, sums = cpu_linear.pack(codes)
    operands = (x, packed, torch.rand(24), sums, None, None, None, True, False)
    torch.library.opcheck(torch.ops.taut.int8_linear_cpu.default, operands)


@needs_op
def test_op_refuses_operands_it_would_misread() -> None:
    packed, sums = cpu_linear.pack(_codes(24, 32, seed=9))
    rest = (torch.rand(24), sums, None, None, None, True, False)
    good = _random(3, 32, seed=8).bfloat16()
    for x in (good.float(), good.T.contiguous().T, good[0]):
        with pytest.raises(RuntimeError, match="x must be"):
            torch.ops.taut.int8_linear_cpu(x, packed, *rest)
    with pytest.raises(RuntimeError, match="weight is not packed for 24 outputs of 64 inputs"):
        torch.ops.taut.int8_linear_cpu(good.repeat(1, 2), packed, *rest)


def test_pack_refuses_what_the_op_cannot_multiply() -> None:
    with pytest.raises(ValueError, match="int8"):
        cpu_linear.pack(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="65536 input features, got 65537"):
        cpu_linear.pack(torch.zeros(1, 65537, dtype=torch.int8))


def test_a_library_that_cannot_be_built_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("int f( {")
    said = cpp_library.load(wrong)
    assert said is not None and "could not compile wrong.cpp" in said and "\n" not in said
    monkeypatch.setenv("CXX", "no-such-compiler")
    other = tmp_path / "other.cpp"
    other.write_text("")
    said = cpp_library.load(other)
    assert said is not None and "no C++ compiler for other.cpp" in said
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_library_is_made_of_its_headers_too(tmp_path: Path) -> None:
    source, header = tmp_path / "one.cpp", tmp_path / "of_one.h"
    source.write_text('#include "of_one.h"')
    header.write_text("int f();")
    before = cpp_library.text_of(source)
    header.write_text("int f(int);")
    assert cpp_library.text_of(source) != before
