"""Whether tensors hold numbers: NaN and infinity are in the weights of no model."""

import torch


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is a finite number; true of integers and of nothing."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:  # fp8 has no reductions
        tensor = tensor.to(torch.float32)
    # One pass and no copy: NaN goes through both ends.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
