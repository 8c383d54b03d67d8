"""Rows of a packed table: what compressed-tensors' ``pack-quantized`` embeddings stand for.

A row holds K signed codes of ``bits`` bits, offset by half their range, from the low end of int32
words; G = K / group scales follow the groups along K, one where a row has one::

    out[t, k] = (code(packed[t, k // (32 / bits)], k) - 2 ** (bits - 1)) * scale[t, k // group]

computed in fp32. Plain torch, any device.
"""

from __future__ import annotations

import torch


def dequantised_rows(packed: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of packed rows, [T, K] fp32.

    Args:
        packed: [T, K * bits / 32] int32.
        scale: [T, G].
        bits: of a code; divides 32.
    """
    codes = signed_codes(packed, bits)
    rows, groups = scale.shape
    return (codes.view(rows, groups, -1).float() * scale.float().unsqueeze(-1)).reshape(rows, -1)


def signed_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of packed rows, [T, K] int32.

    Args:
        packed: [T, K * bits / 32] int32.
        bits: of a code; divides 32.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    # Shifting a negative word fills with ones, which the mask takes off again.
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (codes - (1 << (bits - 1))).flatten(1)
