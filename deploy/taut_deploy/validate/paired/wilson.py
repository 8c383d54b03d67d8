"""Wilson's score interval of a proportion.

Wilson, "Probable inference, the law of succession, and statistical inference", Journal of the
American Statistical Association 22, 1927.
"""

import math


def wilson_interval(right: float, items: float, z: float) -> tuple[float, float]:
    """Ends of the interval.

    Args:
        right: items that count, at most ``items``; need not be whole.
        items: number of items, positive.
        z: quantile of the normal distribution, 1.96 for 95 %.
    """
    centre = right + z * z / 2
    half = z * math.sqrt(right * (items - right) / items + z * z / 4)
    low, high = (centre - half) / (items + z * z), (centre + half) / (items + z * z)
    # Exact at the ends, where rounding would leave the range.
    return (0.0 if right == 0 else max(low, 0.0)), (1.0 if right == items else min(high, 1.0))
