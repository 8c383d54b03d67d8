"""The kernels of a decoder layer's decode step, one behind another, for :mod:`decode_chain`.

Llama-3-8B's shapes, random weights: norm, qkv, RoPE, cache write, attention, o, norm, gate_up,
activation, down. A kernel alone, or among its like, does not show what it costs here: whether it
can start while the one in front of it drains, and whether its programs find even places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from taut_kernels.activation import silu_mul
from taut_kernels.attention.cache_write import op as cache_write
from taut_kernels.attention.decode import op as decode
from taut_kernels.gemm.scaled_mm import dispatch as scaled_mm_launch
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.scaled_mm.tile import PREFETCH, STARTS_EARLY, ScaledMmTile
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.launch import launcher
from taut_kernels.norm import rms_norm
from taut_kernels.rope import op as rope
from taut_kernels.rowwise import quantize

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4096, 32, 8, 128, 14336
PRODUCTS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
"""Name → (N, K)."""
SCHEMES = {"w4a16": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Name → 8-bit type of weights and activations."""
FORMS = ("table", "late", "early", "early+prefetch", "CUTLASS")
"""Of an 8-bit product: as its table says, our ring without and with an early start, vLLM's."""
PAGE = 16
_GROUP = 128
_EPSILON = 1e-5
Activations = Tensor | tuple[Tensor, Tensor]
Product = Callable[[Activations, str], Tensor]


def _w4a16_product(N: int, K: int, generator: torch.Generator) -> Product:
    """Draw a layer's weights as the op wants them; every pattern of bits is a weight."""
    words = torch.randint(
        -(2**31), 2**31 - 1, (N // 16, K // 64, 32, 4), dtype=torch.int32, device="cuda",
        generator=generator,
    )  # fmt: skip
    quads = K // _GROUP // formats_mma.GROUPS_PER_QUAD
    scales = torch.rand((N // 16, quads, 8, 4, 2), device="cuda", generator=generator) + 0.5
    scales = (scales * (0.2 / math.sqrt(K))).bfloat16()
    arrivals = w4a16.make_arrivals(N, words.device)

    def call(x: Activations, form: str) -> Tensor:
        y: Tensor = torch.ops.taut.w4a16_gemm(x, words, scales, None, None, arrivals, _GROUP)
        return y

    return call


def _in_form(tile: ScaledMmTile, form: str) -> ScaledMmTile:
    if form == "table" or tile.kernel not in STARTS_EARLY:
        return tile
    prefetch = PREFETCH if form == "early+prefetch" else 0
    return replace(tile, early=form != "late", prefetch=prefetch)


def _8_bit_product(N: int, K: int, dtype: torch.dtype, generator: torch.Generator) -> Product:
    drawn = torch.randn(N, K, device="cuda", generator=generator)
    weight = (drawn * 32).round().clamp(-127, 127).to(dtype) if dtype is torch.int8 else None
    weight = drawn.to(dtype) if weight is None else weight
    unit = 1 / 32 if dtype is torch.int8 else 1.0
    scale = (torch.rand((N, 1), device="cuda", generator=generator) + 0.5) * unit / math.sqrt(K)
    arrivals = scaled_mm_launch.make_arrivals(N, weight.device)
    op = w8a8.OP if dtype is torch.int8 else fp8.OP

    def call(x: Activations, form: str) -> Tensor:
        values, scales = x
        if form == "CUTLASS":
            from vllm import _custom_ops

            y: Tensor = _custom_ops.cutlass_scaled_mm(
                values, weight.t(), scales, scale, torch.bfloat16
            )
            return y
        gpu, M = launcher.gpu_name(values.device), values.shape[0]
        tile = _in_form(tiles_scaled_mm.lookup(op, gpu, N, K, M, in_layer=True).tile, form)
        return scaled_mm_launch.launch(
            tile, values, weight, scales, scale, None, None, None, arrivals, torch.bfloat16
        )

    return call


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers of a step share.

    Attributes:
        scheme: a key of :data:`SCHEMES`.
        tokens: sequences, a new token each.
        context: keys of each, the new one included.
        bound: the most keys a sequence may have, as far as a captured graph knows.
    """

    scheme: str
    tokens: int
    context: int
    bound: int

    @property
    def pages(self) -> int:
        """Pages of a sequence."""
        return -(-self.bound // PAGE)

    def block_table(self) -> Tensor:
        """Return [tokens, pages] int32, pages in the order of their sequences."""
        count = self.tokens * self.pages
        return torch.arange(count, dtype=torch.int32, device="cuda").view(-1, self.pages)


class Layer:
    """One decoder layer with weights, cache and tables of its own.

    Args:
        step: what it is for.
        seed: of its weights.
    """

    def __init__(self, step: Step, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.step, self.dtype = step, SCHEMES[step.scheme]
        self.products = {
            name: _w4a16_product(N, K, generator)
            if self.dtype is None
            else _8_bit_product(N, K, self.dtype, generator)
            for name, (N, K) in PRODUCTS.items()
        }
        self.norms = [torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        # Where vLLM has it: a key and its value next to each other.
        cache = torch.randn(
            step.tokens * step.pages, KV_HEADS, PAGE, 2 * HEAD_DIM, device="cuda",
            dtype=torch.bfloat16, generator=generator,
        )  # fmt: skip
        self.keys, self.values = cache.transpose(1, 2).chunk(2, dim=-1)
        self.table = step.block_table()
        last = step.context - 1
        self.slots = self.table[:, last // PAGE].long() * PAGE + last % PAGE
        self.positions = torch.full((step.tokens,), last, device="cuda")
        self.angles = torch.randn(step.bound, HEAD_DIM, device="cuda").clamp(-1, 1).bfloat16()
        self.settings = decode.Settings(
            self.table,
            torch.full((step.tokens,), step.context, dtype=torch.int32, device="cuda"),
            None,
            None,
            decode.make_arrivals(step.tokens, HEADS, self.table.device),
            step.bound,
            0,
            HEAD_DIM**-0.5,
        )

    def weight_bytes(self) -> int:
        """Return the bytes of the products' weights, without scales."""
        bits = 4 if self.dtype is None else 8
        return sum(N * K for N, K in PRODUCTS.values()) * bits // 8

    def __call__(self, x: Tensor, residual: Tensor, forms: Mapping[str, str]) -> Tensor:
        """Compute the step.

        Args:
            x: [tokens, HIDDEN] bf16, what the layer in front added to the residual.
            residual: [tokens, HIDDEN] bf16, updated.
            forms: of 8-bit products by name; those left out as their tables say.

        Returns:
            [tokens, HIDDEN].
        """

        def product(name: str, x: Activations) -> Tensor:
            return self.products[name](x, forms.get(name, "table"))

        attended = self._attend(product("qkv", self._normed(x, residual, 0)))
        y = product("o", self._quantised(attended))
        hidden = product("gate_up", self._normed(y, residual, 1))
        return product("down", self._activated(hidden))

    def _normed(self, x: Tensor, residual: Tensor, which: int) -> Activations:
        return self._fused("rms_norm", x, self.norms[which], residual, _EPSILON)

    def _quantised(self, x: Tensor) -> Activations:
        if self.dtype is None:
            return x
        values, scales = torch.ops.taut.row_quant(x, self.dtype)
        return values, scales

    def _activated(self, x: Tensor) -> Activations:
        return self._fused("silu_mul", x, 1.0, 0.0, None, False)

    def _fused(self, op: str, *arguments: Any) -> Activations:
        """Call an op, or its form that quantises where the products take 8 bits."""
        if self.dtype is None:
            y: Tensor = getattr(torch.ops.taut, op)(*arguments)
            return y
        values, scales = getattr(torch.ops.taut, f"{op}_quant")(*arguments, self.dtype)
        return values, scales

    def _attend(self, qkv: Tensor) -> Tensor:
        tokens = self.step.tokens
        heads = qkv.view(tokens, -1, HEAD_DIM)
        q, k, v = heads[:, :HEADS], heads[:, HEADS:-KV_HEADS], heads[:, -KV_HEADS:]
        q, k = torch.ops.taut.rope_apart(self.positions, q, k, self.angles, True)
        torch.ops.taut.cache_write(k, v, self.keys, self.values, self.slots, None, None)
        out = torch.empty_like(q)
        decode.decode_into(out.unsqueeze(1), q.unsqueeze(1), self.keys, self.values, self.settings)
        return out.view(tokens, -1)


OPS = (cache_write, decode, quantize, rms_norm, rope, silu_mul)
"""Modules whose ops a layer calls; importing them registers those."""
