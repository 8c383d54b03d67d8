"""Rendezvous hashing: every replica of the gateway ranks the same names the same way, stateless.

A name's draw for a key depends on that name and the key alone. So when a name comes, goes or
changes its weight, only the keys that it wins or loses move. Sources: D. Thaler and C. Ravishankar,
"Using name-based mappings to increase hit rates", 1998; weights after J. Resch, "New hashing
algorithms for data storage", SNIA 2015.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

_SCALE = 2.0**-64
_MASK = 2**64 - 1
KNOWN_DRAWS = 4096
"""About 1 MB."""


def seed_of(data: bytes) -> int:
    """Return 64 uniform bits of a key or a name, the same on every machine."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


@lru_cache(maxsize=KNOWN_DRAWS)
def draw(key: int, name: int) -> int:
    """Return the draw of a name for a key; the highest wins.

    Args:
        key: :func:`seed_of` what is to be placed.
        name: :func:`seed_of` where it could be placed.

    Returns:
        64 bits, uniform over keys, and as good as independent between names: the finaliser of
        SplitMix64 (G. Steele et al., OOPSLA 2014), a tenth of the cost of another hash. Those of
        beginnings that come again, for which affinity is there, are remembered.
    """
    bits = key ^ name
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def rank_by_weight(key: bytes, weights: Iterable[tuple[str, float]]) -> list[str]:
    """Order names so that each comes first for its share of all keys.

    Args:
        key: what is to be placed.
        weights: names and weights; a weight of 0 is never placed.

    Returns:
        The names with a positive weight, best first.
    """
    # For a uniform draw u, -ln(u) / w is exponential with rate w; the smallest of several belongs
    # to each with probability proportional to its w.
    seed = seed_of(key)
    waits = [
        (-math.log((draw(seed, seed_of(name.encode())) + 1) * _SCALE) / weight, name)
        for name, weight in weights
        if weight
    ]
    return [name for _, name in sorted(waits)]
