"""Sizes of the decoders that people serve, from their published configurations.

What the verdicts of :mod:`taut_kernels.gemm.w4a16.verdict` have to cover: every product of these
models, whole and cut for 2, 4 and 8 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's sizes.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads: query heads.
        kv_heads: key and value heads.
        ranks: tensor-parallel size.
        head_dim: columns of a head.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    ranks: int = 1
    head_dim: int = 128

    @property
    def divides(self) -> bool:
        """Whether vLLM can cut it for so many ranks: heads evenly, key heads evenly or repeated."""
        whole = self.heads % self.ranks == 0 and self.intermediate % self.ranks == 0
        return whole and (self.kv_heads % self.ranks == 0 or self.ranks % self.kv_heads == 0)

    def products(self) -> dict[str, tuple[int, int]]:
        """Return layer → (N, K) on one rank: qkv and gate_up cut along N, o and down along K."""
        heads = self.heads // self.ranks
        kv_heads = max(1, self.kv_heads // self.ranks)
        return {
            "gate_up": (2 * self.intermediate // self.ranks, self.hidden),
            "down": (self.hidden, self.intermediate // self.ranks),
            "qkv": ((heads + 2 * kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, heads * self.head_dim),
        }


BENCHMARKED = {
    "llama3-8b": Model(4096, 14336, 32, 8),
    "qwen2.5-7b": Model(3584, 18944, 28, 4),
    "qwen2.5-32b": Model(5120, 27648, 40, 8),
    "llama3-70b": Model(8192, 28672, 64, 8),
}
"""What most figures are of."""
OTHERS = {
    "llama3.2-1b": Model(2048, 8192, 32, 8, head_dim=64),
    "llama3.2-3b": Model(3072, 8192, 24, 8),
    "ministral-8b": Model(4096, 12288, 32, 8),
    "mistral-nemo-12b": Model(5120, 14336, 32, 8),
    "mistral-small-24b": Model(5120, 32768, 32, 8),
    "mistral-large-123b": Model(12288, 28672, 96, 8),
    "qwen2.5-0.5b": Model(896, 4864, 14, 2, head_dim=64),
    "qwen2.5-1.5b": Model(1536, 8960, 12, 2),
    "qwen2.5-3b": Model(2048, 11008, 16, 2),
    "qwen2.5-14b": Model(5120, 13824, 40, 8),
    "qwen2.5-72b": Model(8192, 29568, 64, 8),
    "qwen3-0.6b": Model(1024, 3072, 16, 8),
    "qwen3-1.7b": Model(2048, 6144, 16, 8),
    "qwen3-4b": Model(2560, 9728, 32, 8),
    "qwen3-8b": Model(4096, 12288, 32, 8),
    "qwen3-14b": Model(5120, 17408, 40, 8),
    "qwen3-32b": Model(5120, 25600, 64, 8),
    "gemma2-2b": Model(2304, 9216, 8, 4, head_dim=256),
    "gemma2-9b": Model(3584, 14336, 16, 8, head_dim=256),
    "gemma2-27b": Model(4608, 36864, 32, 16),
    "gemma3-4b": Model(2560, 10240, 8, 4, head_dim=256),
    "gemma3-12b": Model(3840, 15360, 16, 8, head_dim=256),
    "gemma3-27b": Model(5376, 21504, 32, 16),
    "phi3-mini": Model(3072, 8192, 32, 32, head_dim=96),
    "phi4": Model(5120, 17920, 40, 10),
    "smollm2-1.7b": Model(2048, 8192, 32, 32, head_dim=64),
    "smollm3-3b": Model(2048, 11008, 16, 4),
    "olmo2-7b": Model(4096, 11008, 32, 32),
    "olmo2-13b": Model(5120, 13824, 40, 40),
    "granite3-8b": Model(4096, 12800, 32, 8),
    "yi-34b": Model(7168, 20480, 56, 8),
    "falcon3-7b": Model(3072, 23040, 12, 4, head_dim=256),
    "glm4-9b": Model(4096, 13696, 32, 2),
}
RANKS = (1, 2, 4, 8)
LEAST_WHOLE = {4: 2048, 8: 4096}
"""Narrower models are not cut so often: a card holds them whole many times over."""


def cut(model: Model, ranks: int) -> Model:
    """Return one rank's part of a whole model.

    Args:
        model: of one rank.
        ranks: tensor-parallel size.
    """
    return replace(model, ranks=ranks)


def every_model() -> Iterator[tuple[str, Model]]:
    """Yield name → sizes of every model and every way it is cut; ``-tp2`` is one rank of two."""
    for ranks in RANKS:
        for name, model in (BENCHMARKED | OTHERS).items():
            part = cut(model, ranks)
            if part.divides and model.hidden >= LEAST_WHOLE.get(ranks, 0):
                yield (name if ranks == 1 else f"{name}-tp{ranks}"), part


def every_product(group_size: int) -> Counter[tuple[int, int]]:
    """Count the models, whole and cut, that have a product: (N, K) → models.

    Args:
        group_size: weights a scale covers along K; products that it does not divide are left out.
    """
    found: Counter[tuple[int, int]] = Counter()
    for _, model in every_model():
        found.update({(N, K) for N, K in model.products().values() if K % group_size == 0})
    return found
