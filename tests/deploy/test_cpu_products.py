"""Products of 16-bit types where the CPU has none: the same numbers, by fp32's products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from taut_deploy import cpu_products
from taut_deploy.cpu_products import WideProducts, has_products

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def old_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "has_products", lambda dtype: False)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Types that products are computed in, from inside the mode on."""
    seen: list[torch.dtype] = []
    widened = cpu_products._widened

    def note(operand: object) -> object:
        wide = widened(operand)
        if isinstance(wide, torch.Tensor):
            seen.append(wide.dtype)
        return wide

    monkeypatch.setattr(cpu_products, "_widened", note)
    return seen


@pytest.mark.usefixtures("old_cpu")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_linear_layers_are_rounded_once(
    dtype: torch.dtype, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(96, 48, bias=with_bias, dtype=dtype)
    x = torch.randn(5, 7, 96, generator=generator).to(dtype)
    exact = x.double() @ layer.weight.double().T
    if layer.bias is not None:
        exact = exact + layer.bias.double()
    seen = watched(monkeypatch)
    with torch.inference_mode(), WideProducts():
        y = layer(x)
    assert y.dtype is dtype
    assert seen == [torch.float32] * (3 if with_bias else 2)
    # One rounding of a sum that fp32 holds to 96 of its roundings.
    step = torch.finfo(dtype).eps / 2 * exact.abs()
    slack = 96 * torch.finfo(torch.float32).eps * (x.double().abs() @ layer.weight.double().T.abs())
    assert ((y.double() - exact).abs() <= step + slack).all()


@pytest.mark.usefixtures("old_cpu")
@pytest.mark.parametrize("dtype", HALF)
def test_attention_is_no_less_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 4, 33, 64, generator=generator).to(dtype) for _ in range(3))
    attend: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
    exact = attend(q.double(), k.double(), v.double(), is_causal=True)
    native = attend(q, k, v, is_causal=True)
    with WideProducts():
        wide = attend(q, k, v, is_causal=True)
    assert wide.dtype is dtype
    error, before = ((y.double() - exact).norm() for y in (wide, native))
    assert error <= 1.01 * before


@pytest.mark.usefixtures("old_cpu")
def test_other_types_and_functions_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)
    x = torch.randn(3, 8)
    with WideProducts():
        assert torch.equal(functional.linear(x, x), x @ x.T)
        assert torch.equal(x.bfloat16() + x.bfloat16(), (x.bfloat16() * 2))
        meta = torch.empty(3, 8, dtype=torch.bfloat16, device="meta")
        assert functional.linear(meta, meta).dtype is torch.bfloat16
    assert seen == []


def test_a_cpu_that_has_them_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "has_products", lambda dtype: True)
    seen = watched(monkeypatch)
    x = torch.randn(3, 8).bfloat16()
    with WideProducts():
        assert functional.linear(x, x).dtype is torch.bfloat16
    assert seen == []


@pytest.mark.parametrize(
    ("machine", "instructions", "expected"),
    [
        ("x86_64", (), False),
        ("x86_64", ("_is_avx512_bf16_supported",), True),
        ("x86_64", ("_is_amx_tile_supported",), True),
        ("aarch64", (), True),
    ],
)
def test_bf16_on_x86_needs_instructions_of_its_own(
    machine: str, instructions: tuple[str, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN says yes to AVX-512 alone, too."""
    monkeypatch.setattr(cpu_products.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in instructions)
    assert has_products(torch.bfloat16) is expected


@pytest.mark.parametrize("answer", [False, True])
def test_fp16_is_what_onednn_says(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: answer)
    assert has_products(torch.float16) is answer
