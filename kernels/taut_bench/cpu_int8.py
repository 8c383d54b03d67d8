"""A token's W8A8 products on one thread of this CPU: ours, oneDNN's, FBGEMM's, and their floor.

Usage: ``OMP_NUM_THREADS=1 python -m taut_bench.cpu_int8``. All products of SmolLM2-135M (106 MB of
codes; :mod:`.cpu_products`), quantisation of the activations in it. Without AVX-512:
``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from taut_bench import cpu_products
from taut_bench.cpu_products import Product
from taut_kernels.gemm.scaled_mm import cpu_int8, cpu_linear

_TOKENS = (1, 8, 64)


def _ours(codes: Tensor, *, vnni: bool) -> Product:
    packed, sums = cpu_linear.pack(codes)
    scale, op = torch.full((len(codes),), 0.01), torch.ops.taut.int8_linear_cpu.default
    return lambda x: op(x, packed, scale, sums, None, None, None, True, vnni)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    from vllm import _custom_ops

    x_q, scale, _ = _custom_ops.onednn_scaled_int8_quant(x, None, None, True)
    return x_q, scale


def _onednn(codes: Tensor) -> Product:
    from vllm import _custom_ops

    turned, scale = codes.t(), torch.full((len(codes), 1), 0.01)
    handler = _custom_ops.create_onednn_scaled_mm(turned, scale, torch.bfloat16, True, False, 32)

    def multiply(x: Tensor, kept: tuple[Tensor, ...] = (turned, scale)) -> None:
        x_q, x_scale = _quantised(x)
        y = torch.empty((x.shape[0], len(codes)), dtype=x.dtype)
        _custom_ops.onednn_scaled_mm(handler, x_q, y, x_scale, None, None, None)

    return multiply


def _fbgemm(codes: Tensor) -> Product:
    packed, scale = cpu_int8.pack_codes(codes), torch.full((len(codes),), 0.01)
    op = torch.ops.taut.int8_gemm_cpu.default

    def multiply(x: Tensor) -> None:
        x_q, x_scale = _quantised(x)
        op(x_q, packed, x_scale, scale, None, None, x.dtype)

    return multiply


def _ways() -> dict[str, Callable[[Tensor], Product]]:
    ways: dict[str, Callable[[Tensor], Product]] = {"oneDNN (vLLM)": _onednn}
    if cpu_int8.multiplies_fp16():
        ways["FBGEMM, codes in fp16"] = _fbgemm
    if (reason := cpu_linear.why_not_here()) is not None:
        sys.exit(f"taut's op cannot run here: {reason}")
    ways["ours, AVX2"] = partial(_ours, vnni=False)
    if cpu_linear.has_vnni():
        ways["ours, AVX-512 VNNI"] = partial(_ours, vnni=True)
    return ways


def main() -> None:
    """Print a line for each way: milliseconds at each number of tokens."""
    cpu_products.compare(_ways(), 127, _TOKENS, 8)


if __name__ == "__main__":
    main()
