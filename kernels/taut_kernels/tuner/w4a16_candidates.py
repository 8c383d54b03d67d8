"""What is worth timing of `taut::w4a16_gemm` for one product: what runs now, then the model's best.

The cost models rank tiles on cards with `wgmma`; on others the rule that every card has is all
there is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from taut_kernels.gemm.w4a16 import decode_tile, lookup, rule
from taut_kernels.gemm.w4a16.dispatch import Tile as AnyTile
from taut_kernels.gemm.w4a16.lookup import BUCKETS, Choice
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import launcher

DENSE_TOKENS = 512
"""From so many on, dequantising the layer and a dense product may be the faster way."""
Tried = AnyTile | Choice
"""A tile or regime; up to 8 tokens a decode tile."""


@dataclass(frozen=True, slots=True, order=True)
class Product:
    """A W4A16 layer's shard.

    Attributes:
        N: output features.
        K: input features.
        weights: its format.
    """

    N: int
    K: int
    weights: WeightFormat

    def __str__(self) -> str:
        return f"{self.N}×{self.K} {self.weights}"


def candidates(product: Product, M: int, most: int, device: torch.device) -> list[Tried]:
    """Return what to time at a number of tokens.

    Args:
        product: the layer's shard.
        M: tokens; one of the tables' buckets, up to 8, or above the last bucket.
        most: tiles beside what runs now and the dense regime.
        device: where it runs.

    Returns:
        What the op runs now first, each once.
    """
    gpu, hopper = launcher.gpu_name(device), launcher.is_hopper(device)
    N, K, weights = product.N, product.K, product.weights
    if M <= decode_tile.TOKENS:
        now = decode_tile.lookup(gpu, N, K, weights, hopper=hopper)
        others: list[DecodeOrChoice] = list(decode_tile.ranked(N, K)) if hopper else []
        return _each_once(now, others[:most])
    bucket = lookup.bucket_of(M)
    chosen = lookup.lookup(gpu, N, K, bucket, weights, hopper=hopper)
    ranked: list[DecodeOrChoice] = []
    if bucket < len(BUCKETS) and hopper and K >= rule.LEAST_K and N >= rule.LEAST_N:
        ranked += rule.ranked(N, K, BUCKETS[bucket])[:most]
    if M >= DENSE_TOKENS and most:
        ranked.append("dense")
    return _each_once(chosen, ranked)


DecodeOrChoice = decode_tile.DecodeTile | Choice


def _each_once(first: DecodeOrChoice, others: list[DecodeOrChoice]) -> list[Tried]:
    return list(dict.fromkeys([first, *others]))
