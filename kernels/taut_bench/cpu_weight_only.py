"""A token's W4A16 or W8A16 products on one thread of this CPU: ours, torch's int4, bf16.

Usage: ``OMP_NUM_THREADS=1 python -m taut_bench.cpu_weight_only [GROUP [BITS]]``; groups of 64 and 4
bits by default. Of 8 bits torch has no product.
All products of SmolLM2-135M, 106 million weights (:mod:`.cpu_products`). Without AMX:
``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16``; without AVX-512: ``ATEN_CPU_CAPABILITY=avx2
ONEDNN_MAX_CPU_ISA=AVX2``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from taut_bench import cpu_products
from taut_bench.cpu_products import Product
from taut_kernels.gemm.w4a16 import cpu as _aten  # noqa: F401  defines the op
from taut_kernels.gemm.w4a16 import disk
from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.gemm.weight_only.cpu_linear import Isa

_TOKENS = (1, 2, 4, 8, 16, 64)


def _scales(codes: Tensor, group: int) -> Tensor:
    return torch.full((len(codes), codes.shape[1] // group), 0.01, dtype=torch.bfloat16)


def _ours(codes: Tensor, *, isa: Isa, group: int, bits: int) -> Product:
    packed, N = cpu_linear.pack(codes, _scales(codes, group), None, bits), len(codes)
    op = torch.ops.taut.weight_only_linear_cpu.default
    return lambda x: op(x, *packed, None, N, int(isa))


def _torch(codes: Tensor, *, group: int) -> Product:
    packed = disk.pack_weight(codes)
    layout = disk.repack_for_cpu(packed, _scales(codes, group), None, codes.shape[1])
    op = torch.ops.taut.w4a16_gemm_cpu.default
    return lambda x: op(x, *layout, None, group)


def _bf16(codes: Tensor) -> Product:
    """As vLLM multiplies a layer that is not quantised; oneDNN has no bf16 without AVX-512."""
    weight = codes.bfloat16()
    if cpu_linear.best_isa() is Isa.AVX2:
        return lambda x: torch.nn.functional.linear(x, weight)
    from vllm import _custom_ops

    handler = _custom_ops.create_onednn_mm(weight.t(), 32)

    def multiply(x: Tensor, kept: Tensor = weight) -> object:
        return _custom_ops.onednn_mm(handler, x, None)

    return multiply


def main() -> None:
    """Print a line for each way: milliseconds at each number of tokens."""
    if (reason := cpu_linear.why_not_here()) is not None:
        sys.exit(f"taut's op cannot run here: {reason}")
    given = [int(word) for word in sys.argv[1:]]
    group, bits = given + [64, 4][len(given) :]
    if bits not in cpu_linear.BITS:
        sys.exit(f"BITS: there are 4 and 8, got {bits}")
    ways: dict[str, Callable[[Tensor], Product]] = {
        f"ours, {isa.name}": partial(_ours, isa=isa, group=group, bits=bits)
        for isa in Isa
        if isa <= cpu_linear.best_isa()
    }
    if bits == 4:
        ways["torch's int4"] = partial(_torch, group=group)
    ways["bf16 (vLLM)"] = _bf16
    cpu_products.compare(ways, 1 << (bits - 1), _TOKENS, bits + 16 / group)


if __name__ == "__main__":
    main()
