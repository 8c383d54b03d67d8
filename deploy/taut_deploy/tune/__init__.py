"""Which kernel is the faster one for a model on this card: measured once, kept, read by workers."""

from taut_deploy.tune.products import ShardProduct, ranks_of, shard_products
from taut_deploy.tune.verdicts import (
    Verdicts,
    find_verdicts,
    follow_verdicts,
    measure_for_worker,
    named_verdicts,
)

__all__ = [
    "ShardProduct",
    "Verdicts",
    "find_verdicts",
    "follow_verdicts",
    "measure_for_worker",
    "named_verdicts",
    "ranks_of",
    "shard_products",
]
