"""A token's W8A8 products on one thread of this CPU: ours, oneDNN's, FBGEMM's, and their floor.

Usage: ``OMP_NUM_THREADS=1 python -m taut_bench.cpu_int8``. CPU time of the thread, the least of the
rounds, all products of SmolLM2-135M (106 MB of codes), quantisation of the activations in it. The
ways take turns within a round. Without AVX-512: ``ATEN_CPU_CAPABILITY=avx2
ONEDNN_MAX_CPU_ISA=AVX2``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from taut_kernels.gemm.scaled_mm import cpu_int8, cpu_linear

_LAYERS = 30
_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
_TOKENS = (1, 8, 64)
_ROUNDS = 7

Product = Callable[[Tensor], object]


def _codes() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(_LAYERS):
        for N, K in _SHAPES:
            yield torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)


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


def _spent(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def main() -> None:
    """Print a line for each way: milliseconds at each number of tokens."""
    torch.set_num_threads(1)
    ways, size = _ways(), _LAYERS * sum(N * K for N, K in _SHAPES)
    read = torch.ones(size // 4)
    layers = {name: [make(codes) for codes in _codes()] for name, make in ways.items()}
    columns = [K for _ in range(_LAYERS) for _, K in _SHAPES]
    least: dict[tuple[str, int], float] = {}
    for M in _TOKENS:
        inputs = {K: torch.randn(M, K).bfloat16() for _, K in _SHAPES}
        for _ in range(_ROUNDS):
            for name, products in layers.items():
                run = partial(_multiply, products, [inputs[K] for K in columns])
                least[name, M] = min(least.get((name, M), float("inf")), _spent(run))
            floor = _spent(read.sum)
            least["floor", 0] = min(least.get(("floor", 0), float("inf")), floor)
    floor = least["floor", 0]
    say = sys.stdout.write
    rate = f"{size / 1e6:.0f} MB at {size / floor / 1e9:.1f} GB/s, {floor * 1e3:.1f} ms"
    say(f"read by a sum, in turn with the products: {rate}\n")
    for name in ways:
        say(f"{name}: " + ", ".join(f"{M}: {least[name, M] * 1e3:.1f} ms" for M in _TOKENS) + "\n")


def _multiply(products: list[Product], inputs: list[Tensor]) -> None:
    for multiply, x in zip(products, inputs, strict=True):
        multiply(x)


if __name__ == "__main__":
    main()
