"""Rounding to floats of few bits, without leaving fp32."""

import torch

_EXPONENT = 0x7F800000
_FRACTION_OF_FP32 = 23


def round_small_float(
    values: torch.Tensor, *, fraction_bits: int, least_normal: float, largest: float
) -> torch.Tensor:
    """The nearest numbers of a small float, ties to the even one; beyond the range its end.

    torch widens such numbers one at a time on a CPU, so that a cast there and back takes most of
    the time of rounding.

    Args:
        values: any shape, fp32; NaN stays NaN.
        fraction_bits: stored bits of the fraction.
        least_normal: below it numbers are as far apart as right above it.
        largest: end of the range.

    Returns:
        The same shape, fp32.
    """
    values = values.clamp(-largest, largest)
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=least_normal)
    # The sum has no room for more bits than the fraction has: fp32 rounds there.
    power.mul_(1.5 * 2.0 ** (_FRACTION_OF_FP32 - fraction_bits))
    return values.add_(power).sub_(power)
