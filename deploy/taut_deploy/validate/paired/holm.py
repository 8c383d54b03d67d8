"""Holm's adjustment of several tests.

Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics
6, 1979: the chance of a single false alarm among all tests stays at the level, whatever their
dependence.
"""

from collections.abc import Mapping


def holm_adjusted(values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values, in the order given.

    Args:
        values: name to p-value.

    Returns:
        Name to the smallest level at which the procedure still rejects.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    ordered = sorted(values, key=lambda name: values[name])
    for rank, name in enumerate(ordered):
        largest = max(largest, (len(values) - rank) * values[name])
        adjusted[name] = min(largest, 1.0)
    return {name: adjusted[name] for name in values}
