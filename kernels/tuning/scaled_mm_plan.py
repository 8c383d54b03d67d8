"""What :mod:`.tune_scaled_mm` tries, and which of it is compiled first."""

from __future__ import annotations

from collections.abc import Sequence

from taut_bench import shapes
from taut_bench.scaled_mm_layer import ALL_KINDS, BLOCK_KIND, KINDS
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from tuning.scaled_mm_candidates import block_candidates, candidates
from tuning.scaled_mm_compile import Job
from tuning.scaled_mm_known_tiles import known_tiles

FEW_TOKENS = 64
"""Most for which the second kind tries only what did best for the first."""
Bucket = tuple[int | None, tuple[int, ...]]
"""Most tokens of a bucket, and those measured."""
Tiles = dict[tuple[str, str, Bucket], list[ScaledMmTile]]
"""What to try, by kind, shape and bucket."""


def plan_of(
    kinds: Sequence[str], names: Sequence[str], buckets: Sequence[Bucket], known: bool, early: bool
) -> Tiles:
    """Return every cell's candidates."""
    plan: Tiles = {}
    for kind in kinds:
        for name in names:
            (N, K), op = shapes.PRODUCTS[name], ALL_KINDS[kind]
            for bucket in buckets:
                Ms = bucket[1]
                if known:
                    # Its lower end may want another tile, but for few tokens.
                    ends = Ms if Ms[0] > FEW_TOKENS else Ms[-1:]
                    found = [tile for M in ends for tile in known_tiles(op, N, K, M)]
                elif kind == BLOCK_KIND:
                    found = list(block_candidates(N, K, Ms[-1], early=early))
                else:
                    found = list(candidates(N, K, Ms[-1], early=early, fp8=op == KINDS["fp8"]))
                plan[kind, name, bucket] = list(dict.fromkeys(found))
    return plan


def borrows(kind: str, first_kind: str) -> bool:
    """Say whether what did best for the first kind does for this one, where bytes count."""
    return kind != first_kind and BLOCK_KIND not in (kind, first_kind)


def first_jobs(plan: Tiles, at_once: bool) -> list[Job]:
    """Return what to compile before anything is timed.

    Args:
        plan: what to try.
        at_once: also what the second kind may need at few tokens.
    """
    first_kind = next(iter(plan))[0]
    return [
        (ALL_KINDS[kind], tile)
        for (kind, _, (_, Ms)), tiles in plan.items()
        if at_once or not borrows(kind, first_kind) or Ms[-1] > FEW_TOKENS
        for tile in tiles
    ]
