"""What the attention benchmark runs: shapes, operands, floors, and the gate before the clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from taut_bench.instruments.attention_work import seen_pairs
from taut_kernels.attention.decode import op as decode
from taut_kernels.attention.decode.reference import paged_decode_ref
from taut_kernels.attention.prefill import op as prefill
from taut_kernels.attention.reference import attention_backward_ref, attention_ref

HEADS, HEADS_K, DIM = 32, 8, 128
"""Llama-3-8B."""
PAGE = 16
"""vLLM's default."""
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
DEVICE = "cuda"
"""Where operands are drawn; the tests draw them elsewhere."""
PARTS = ("prefill", "backward", "decode")
_SPREAD = 2.0
"""Standard deviation of the scores: a softmax that is neither flat nor one key."""
_CHECKED_TOKENS = 1024
_CHECKED_HEADS = 4
RIVAL_TOLERANCE = 0.05
"""Share of the largest result by which a rival may be off: it is asked whether it computes the same
thing. FA3 with an 8-bit cache rounds its queries to 8 bits, too."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One benchmarked size; keys of a sequence stand in ``tokens`` for prefill, too.

    Args:
        part: one of :data:`PARTS`.
        batch: sequences.
        tokens: of each: queries and keys of a prompt, or the context of a decoded token.
        cache: a key of :data:`CACHES`; bf16 but for decode.
    """

    part: str
    batch: int
    tokens: int
    cache: str = "bf16"

    def __str__(self) -> str:
        cache = f" {self.cache}" if self.part == "decode" else ""
        return f"{self.part}{cache} B={self.batch} T={self.tokens}"

    def flops(self) -> int:
        """Return the operations of the products: two forward, seven forward and backward."""
        pairs = self.batch * HEADS * seen_pairs(self._queries(), self.tokens, True, 0)
        return pairs * 2 * DIM * (7 if self.part == "backward" else 2)

    def _queries(self) -> int:
        return 1 if self.part == "decode" else self.tokens

    def bytes_read(self) -> int:
        """Return the bytes of keys and values, which a decoded token cannot avoid."""
        size = CACHES[self.cache].itemsize
        return 2 * self.batch * self.tokens * HEADS_K * DIM * size


SHAPES = (
    *(Shape("prefill", 1, tokens) for tokens in (1024, 2048, 4096, 8192, 16384)),
    *(Shape("backward", 1, tokens) for tokens in (1024, 2048, 4096, 8192, 16384)),
    *(
        Shape("decode", batch, tokens, cache)
        for cache in CACHES
        for batch, lengths in (
            (1, (1024, 4096, 8192, 32768, 131072)),
            (8, (1024, 4096, 8192, 32768)),
            (32, (1024, 4096, 8192, 32768)),
            (64, (1024, 4096, 8192)),
            (128, (1024, 4096, 8192)),
        )
        for tokens in lengths
    ),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Operands of prefill: q [1, T, 32, 128], k and v [1, T, 8, 128], and the gradient of o."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


@dataclass(frozen=True, slots=True)
class Cached:
    """Operands of decode.

    Attributes:
        q: [B, 1, 32, 128] bf16.
        k_cache: [pages, 16, 8, 128].
        v_cache: likewise.
        block_table: [B, pages of a sequence] int32, pages in no order.
        context_lens: [B] int32, all alike.
        k_scale: [1] fp32, or None for bf16.
        v_scale: likewise.
        arrivals: of :func:`~taut_kernels.attention.decode.op.make_arrivals`.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    arrivals: Tensor

    @property
    def context(self) -> int:
        """Keys of each sequence."""
        return self.block_table.shape[1] * self.k_cache.shape[1]

    def settings(self) -> decode.Settings:
        """Return what a launch is told."""
        scales = (self.k_scale, self.v_scale, self.arrivals)
        table = (self.block_table, self.context_lens)
        return decode.Settings(*table, *scales, self.context, 0, DIM**-0.5)


def make_prompt(tokens: int) -> Prompt:
    """Draw a prompt on the GPU, in bf16."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)

    def draw(heads: int, scale: float = 1.0) -> Tensor:
        shape = (1, tokens, heads, DIM)
        drawn = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        return drawn * scale

    return Prompt(draw(HEADS, _SPREAD), draw(HEADS_K), draw(HEADS_K), draw(HEADS))


def _cache(pages: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    cache = torch.empty(pages, PAGE, HEADS_K, DIM, dtype=dtype, device=DEVICE)
    step = 4096  # pages at a time: fp32 numbers of all would not fit
    for first in range(0, pages, step):
        part = cache[first : first + step]
        drawn = torch.randn(part.shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        part.copy_((drawn * 40).round().clamp(-128, 127) if dtype == torch.int8 else drawn)
    return cache


def make_cached(shape: Shape) -> Cached:
    """Draw a decode shape's operands on the GPU."""
    generator = torch.Generator(DEVICE).manual_seed(shape.tokens)
    each = shape.tokens // PAGE
    pages = shape.batch * each
    dtype = CACHES[shape.cache]
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if dtype.itemsize == 1:
        base = 1 / 40 if dtype == torch.int8 else 1.0
        scale = torch.full((1,), 0.9 * base, device=DEVICE)
        scales = (scale, 1.2 * scale)
    q = torch.randn(shape.batch, 1, HEADS, DIM, generator=generator, device=DEVICE)
    table = torch.randperm(pages, generator=generator, device=DEVICE).int()
    return Cached(
        (q * _SPREAD).bfloat16(),
        _cache(pages, dtype, generator),
        _cache(pages, dtype, generator),
        table.view(shape.batch, each),
        torch.full((shape.batch,), shape.tokens, dtype=torch.int32, device=DEVICE),
        *scales,
        decode.make_arrivals(shape.batch, HEADS, q.device),
    )


def _verdict(found: Tensor, gold: Tensor, plain: Tensor | None) -> str | None:
    """Return why a result is wrong: against the budget of ``plain``, or a rival's tolerance."""
    largest = gold.abs().max().item()
    error = (found.double() - gold).abs().max().item()
    if plain is None:
        budget = RIVAL_TOLERANCE * largest
    else:
        rounding = torch.finfo(found.dtype).eps * largest
        budget = 2 * ((plain.double() - gold).abs().max().item() + rounding)
    return None if error <= budget else f"error {error:.3e} is above the budget {budget:.3e}"


class DecodeGate:
    """Holds results to the error budget by their first and last sequence.

    Args:
        cached: the operands.
    """

    def __init__(self, cached: Cached) -> None:
        self._shape = cached.q.shape
        self._ends = [0] if len(cached.q) == 1 else [0, -1]
        small = replace(
            cached,
            q=cached.q[self._ends],
            block_table=cached.block_table[self._ends],
            context_lens=cached.context_lens[self._ends],
        )
        operands = (small.k_cache, small.v_cache, *small.settings())
        self._gold = paged_decode_ref(small.q.double(), *operands)
        self._plain = paged_decode_ref(small.q, *operands)

    def why_wrong(self, found: Tensor, ours: bool) -> str | None:
        """Return why a result [B, 32, 128] is wrong, or None.

        Args:
            found: the result.
            ours: whether our own budget applies, or a rival's tolerance.
        """
        ends = found.view(self._shape)[self._ends]
        return _verdict(ends, self._gold, self._plain if ours else None)


def checked_prompt() -> Prompt:
    """Return a prompt small enough for the reference, with 4 of the 8 key heads' groups."""
    full = make_prompt(_CHECKED_TOKENS)
    group = HEADS // HEADS_K
    heads = _CHECKED_HEADS * group
    return Prompt(
        full.q[:, :, :heads], full.k[:, :, :_CHECKED_HEADS], full.v[:, :, :_CHECKED_HEADS],
        full.do[:, :, :heads],
    )  # fmt: skip


Gradients = tuple[Tensor, Tensor, Tensor]


class PromptGate:
    """Holds o, dq, dk and dv of :func:`checked_prompt` to the error budget."""

    def __init__(self) -> None:
        self.prompt = prompt = checked_prompt()
        count = prompt.q.shape[1]
        settings = prefill.Settings(None, None, count, count, True, 0, DIM**-0.5)
        q, k, v, do = prompt.q, prompt.k, prompt.v, prompt.do
        q64, k64, v64, do64 = q.double(), k.double(), v.double(), do.double()
        gold, gold_lse = attention_ref(q64, k64, v64, *settings)
        plain, plain_lse = attention_ref(q, k, v, *settings)
        exact = attention_backward_ref(do64, q64, k64, v64, gold, gold_lse, *settings)
        rounded = attention_backward_ref(do, q, k, v, plain, plain_lse, *settings)
        self._gold, self._plain = (gold, *exact), (plain, *rounded)

    def why_wrong(
        self, found: Tensor | None, gradients: Gradients | None, ours: bool
    ) -> str | None:
        """Return what is wrong with a result, or None.

        Args:
            found: o, or None.
            gradients: dq, dk, dv, or None.
            ours: whether our own budget applies, or a rival's tolerance.
        """
        results = (found, *(gradients or (None, None, None)))
        for name, mine, right, plain in zip(
            ("o", "dq", "dk", "dv"), results, self._gold, self._plain, strict=True
        ):
            if mine is not None and (reason := _verdict(mine, right, plain if ours else None)):
                return f"{name}: {reason}"
        return None
