"""Codebook weights: ``w[n, k] = book[b(n), code[n, k]] · scale[n, g(k)]``.

Shapes    codes [N, K]   scale [N, G], G groups of K/G neighbours   book [B, entries], one for each
          N/B rows
On disk   ``weight_packed`` [N, K·bits/8] uint8: the codes of a row one after another, ``bits``
          each, the least significant bit first, without gaps; a row is whole bytes
Numerics  one product in fp32
Source    codebooks with a scale a group: GPTVQ, arXiv:2402.15319, §3.2; the packing is ours
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTE = 8


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack the codes of each row into bytes.

    Args:
        codes: [N, K] uint8 below ``2 ** bits``.
        bits: of a code.

    Returns:
        [N, K·bits/8] uint8.

    Raises:
        ValueError: a row is not whole bytes.
    """
    n, k = codes.shape
    if k * bits % _BYTE:
        raise ValueError(f"{k} codes of {bits} bits are not whole bytes")
    each = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = (codes[..., None] >> each) & 1
    places = torch.arange(_BYTE, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (stream.view(n, -1, _BYTE) << places).sum(-1, dtype=torch.uint8)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack_codes`.

    Args:
        packed: [N, K·bits/8] uint8.
        bits: of a code.

    Returns:
        [N, K] uint8.
    """
    places = torch.arange(_BYTE, dtype=torch.uint8, device=packed.device)
    stream = (packed[..., None] >> places) & 1
    each = torch.arange(bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (stream.view(packed.shape[0], -1, bits) << each).sum(-1, dtype=torch.uint8)
    return codes


def dequantise(codes: Tensor, scale: Tensor, book: Tensor) -> Tensor:
    """Return the weight that codes stand for.

    Args:
        codes: [N, K] uint8.
        scale: [N, G], any float dtype.
        book: [B, entries], any float dtype; B divides N.

    Returns:
        [N, K] fp32.
    """
    n, k = codes.shape
    rows = book.float().repeat_interleave(n // book.shape[0], 0)
    values = rows.gather(1, codes.long()).view(n, scale.shape[1], -1)
    return (values * scale.float()[..., None]).view(n, k)
