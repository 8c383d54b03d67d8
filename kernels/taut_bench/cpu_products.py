"""All products of a token of SmolLM2-135M, one way to multiply beside another, on one thread.

CPU time of the thread, the least of the rounds; ways take turns within a round, and so does the
floor: a sum that reads as many bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

_LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""N, K of a block's products."""
_ROUNDS = 7
Product = Callable[[Tensor], object]


def codes(levels: int) -> Iterator[Tensor]:
    """Yield the codes [N, K] int8 of every product, drawn from -levels to levels - 1."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(_LAYERS):
        for N, K in SHAPES:
            yield torch.randint(-levels, levels, (N, K), generator=generator, dtype=torch.int8)


def compare(
    ways: Mapping[str, Callable[[Tensor], Product]], levels: int, tokens: Sequence[int], bits: float
) -> None:
    """Print a line for each way: milliseconds at each number of tokens.

    Args:
        ways: name → what makes a product of codes.
        levels: as of :func:`codes`.
        tokens: of a step.
        bits: of a weight, for the floor.
    """
    torch.set_num_threads(1)
    size = int(_LAYERS * sum(N * K for N, K in SHAPES) * bits / 8)
    read = torch.ones(size // 4)
    layers = {name: [make(one) for one in codes(levels)] for name, make in ways.items()}
    columns = [K for _ in range(_LAYERS) for _, K in SHAPES]
    least: dict[tuple[str, int], float] = {}
    for M in tokens:
        inputs = {K: torch.randn(M, K).bfloat16() for _, K in SHAPES}
        for _ in range(_ROUNDS):
            for name, products in layers.items():
                run = partial(_multiply, products, [inputs[K] for K in columns])
                least[name, M] = min(least.get((name, M), float("inf")), _spent(run))
            least["floor", 0] = min(least.get(("floor", 0), float("inf")), _spent(read.sum))
    floor, say = least["floor", 0], sys.stdout.write
    rate = f"{size / 1e6:.0f} MB at {size / floor / 1e9:.1f} GB/s, {floor * 1e3:.1f} ms"
    say(f"read by a sum, in turn with the products: {rate}\n")
    for name in ways:
        say(f"{name}: " + ", ".join(f"{M}: {least[name, M] * 1e3:.1f} ms" for M in tokens) + "\n")


def _spent(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def _multiply(products: list[Product], inputs: list[Tensor]) -> None:
    for multiply, x in zip(products, inputs, strict=True):
        multiply(x)
