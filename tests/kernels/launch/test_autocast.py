"""Under autocast an op returns the bits and the type it returns without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from taut_bench import testing
from taut_kernels.attention.decode.op import paged_decode
from taut_kernels.attention.prefill.op import attention
from taut_kernels.gemm.scaled_mm.op_fp8 import fp8_gemm
from taut_kernels.gemm.w4a16 import dense as w4a16_dense
from taut_kernels.gemm.w4a16.op import w4a16_gemm
from taut_kernels.loss.cross_entropy import cross_entropy
from taut_kernels.loss.projection import add_product
from taut_kernels.primitives.convolution import conv2d
from taut_kernels.primitives.gemm import matmul

TYPE = torch.float16
Result = torch.Tensor | tuple[torch.Tensor, ...]


@contextmanager
def autocast() -> Iterator[None]:
    """Ask for a type that no operand below has."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = TYPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend() -> Result:
    return attention(draw(2, 9, 4, 64), draw(2, 9, 2, 64, seed=1), draw(2, 9, 2, 64, seed=2))


def attend_backward() -> Result:
    q, k, v, do = (draw(2, 9, 2, 64, seed=seed) for seed in range(4))
    settings = (None, None, 9, 9, True, 0, 0.125)
    o, lse = torch.ops.taut.attention(q, k, v, *settings)
    found: Result = torch.ops.taut.attention_backward(do, q, k, v, o, lse, *settings)
    return found


def decode() -> Result:
    k_cache, v_cache = (draw(4, 16, 2, 64, seed=seed) for seed in (1, 2))
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    lengths = torch.tensor([30, 7], dtype=torch.int32)
    return paged_decode(draw(2, 4, 64), k_cache, v_cache, table, lengths)


def multiply_fp8() -> Result:
    x, weight = (draw(rows, 64, seed=rows).to(torch.float8_e4m3fn) for rows in (5, 32))
    scales = torch.full((1,), 0.37), torch.full((32,), 0.19)
    return fp8_gemm(x, weight, *scales, out_dtype=TYPE)


def multiply_w4a16() -> Result:
    case = testing.make_w4a16_case(5, 64, 128, 64, dtype=TYPE, with_bias=True)
    *operands, bias, arrivals, group_size = case.operands()
    return w4a16_gemm(*operands, bias=bias, arrivals=arrivals, group_size=group_size)


def multiply_dense_weights() -> Result:
    plain, with_bias = torch.empty(5, 32, dtype=TYPE), torch.empty(5, 32, dtype=TYPE)
    x, weight = draw(5, 64), draw(32, 64, seed=1)
    w4a16_dense._linear(x, weight, None, plain)
    w4a16_dense._linear(x, weight, draw(32, seed=2), with_bias)
    return plain, with_bias


def add_products() -> Result:
    total = torch.empty(5, 32)
    for first in (True, False):
        add_product(total, draw(5, 64), draw(64, 32, seed=1), first)
    return total


def lose() -> Result:
    return cross_entropy(draw(5, 64), torch.arange(5), reduction="none")


def multiply() -> Result:
    return matmul(draw(5, 64), draw(64, 32, seed=1), bias=draw(32, seed=2), activation="silu")


def convolve() -> Result:
    return conv2d(draw(2, 8, 6, 6), draw(16, 8, 3, 3, seed=1), padding=1)


@pytest.mark.parametrize(
    "call",
    [
        attend,
        attend_backward,
        decode,
        multiply_fp8,
        multiply_w4a16,
        multiply_dense_weights,
        add_products,
        lose,
        multiply,
        convolve,
    ],
)
def test_ops_compute_as_their_contract_says(call: Callable[[], Result]) -> None:
    wanted = call()
    with autocast():
        found = call()
        # As it was for the caller.
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, wanted)), strict=True)
    for ours, right in pairs:
        assert ours.dtype is right.dtype
        assert torch.equal(ours, right)
