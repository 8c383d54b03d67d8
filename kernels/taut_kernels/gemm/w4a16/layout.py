"""The 4-bit weights of the GPU kernels (:mod:`.op`), in MMA fragment order.

Weights lie in the order in which a warp's lanes want them as operand A of `mma.m16n8k16` (or of
`wgmma.m64nNk16`, four of them), so that every load is 16 bytes a lane and 512 consecutive bytes a
warp. ``N`` is output features, ``K``
input features, ``G`` the group size; N % 16 == 0 and K % 64 == 0.

``qweight``  [N/16, K/64, 32, 4] int32. Word (tile, chunk, lane = 4g + t, w = 2i + j), bits
             4p..4p+3 with p = 4b + 2h + r, hold the stored nibble of row 16·tile + 8r + g and of
             column 64·chunk + 32h + 8t + 4i + 2j + b. The pair (b = 0, 1) is one register of two
             values; r and j are the four registers of operand A; (h, i) is the instruction. Lane t
             of four thereby reads 16 consecutive bytes of activations for two instructions.
``scales``   [N/16, ceil(K/G/4), 8, 4, 2] float16 or bfloat16: scale of row 16·tile + 8r + g and
             group 4·quad + i at (tile, quad, g, i, r). Groups beyond K/G are 0.
``zeros``    [N/16, ceil(K/G/4), 8] int32. Word (tile, quad, g), bits 4i + 16r..4i + 16r + 3, hold
             the stored zero point of row 16·tile + 8r + g and group 4·quad + i. Groups beyond K/G
             are 0. ``(word >> 4i) & 0x000F000F | M`` is -(m + zero) of both rows, r = 0 in the low
             half: M = 0xC300C300, m = 128 (bf16) or M = 0xE400E400, m = 1024 (fp16), exact in
             either type. The conversion leaves m + q; one fused multiply-add makes it q - zero.

Bytes a weight at G = 128: 0.5 + 2/128, with zero points + 0.5/128 more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import disk as formats

ROW_TILE = 16
CHUNK = 64
GROUPS_PER_QUAD = 4
SCALE_DTYPES = (torch.bfloat16, torch.float16)


def why_no_layout(N: int, K: int) -> str | None:
    """Say why a layer's shard has no such layout, None where it has one.

    Args:
        N: output features.
        K: input features.
    """
    if N % ROW_TILE or not N:
        return f"output features must be a multiple of {ROW_TILE}, the rows of one MMA, got {N}"
    if K % CHUNK or not K:
        return f"input features must be a multiple of {CHUNK}, a lane's 16-byte load, got {K}"
    if N * K // 8 >= 2**31:
        return f"{N} × {K} weights need more than 31 bits to address words"
    return None


def repack_weight(weight_packed: Tensor, K: int) -> Tensor:
    """Convert disk weights to the GPU layout.

    Args:
        weight_packed: [N, K/8] int32, any device.
        K: input features.

    Returns:
        ``qweight`` [N/16, K/64, 32, 4] int32, contiguous, same device.

    Raises:
        ValueError: the shape has no such layout.
    """
    N = weight_packed.shape[0]
    if reason := why_no_layout(N, K):
        raise ValueError(reason)
    nibbles = (formats.unpack_weight(weight_packed, K) + formats.SYMMETRIC_ZERO).to(torch.uint8)
    # Axes: tile, r, g, chunk, h, t, i, j, b.
    axes = nibbles.view(N // 16, 2, 8, K // 64, 2, 4, 2, 2, 2)
    ordered = axes.permute(0, 3, 2, 5, 6, 7, 8, 4, 1).reshape(-1, 8)
    words = torch.zeros(ordered.shape[0], dtype=torch.int32, device=nibbles.device)
    for position in range(8):
        # Nibble by nibble: eight int32 a word at once would take 32 times the packed size.
        words |= ordered[:, position].to(torch.int32) << (4 * position)
    return words.view(N // 16, K // 64, 32, 4)


def unpack_weight(qweight: Tensor) -> Tensor:
    """Invert :func:`repack_weight`.

    Args:
        qweight: [N/16, K/64, 32, 4] int32.

    Returns:
        [N, K] uint8, stored nibbles 0..15.
    """
    tiles, chunks = qweight.shape[:2]
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=qweight.device)
    nibbles = ((qweight.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8)
    # Axes: tile, chunk, g, t, i, j, b, h, r; see repack_weight.
    axes = nibbles.view(tiles, chunks, 8, 4, 2, 2, 2, 2, 2)
    return axes.permute(0, 8, 2, 1, 7, 3, 4, 5, 6).reshape(tiles * 16, chunks * 64)


def _pair_rows(values: Tensor) -> Tensor:
    """Bring [N, groups] to [N/16, quads, 8, 4, 2], zeros beyond the last group."""
    N, groups = values.shape
    quads = -(-groups // GROUPS_PER_QUAD)
    padded = torch.nn.functional.pad(values, (0, quads * GROUPS_PER_QUAD - groups))
    axes = padded.view(N // 16, 2, 8, quads, GROUPS_PER_QUAD)
    return axes.permute(0, 3, 2, 4, 1).contiguous()


def unpair_rows(pairs: Tensor, groups: int) -> Tensor:
    """Bring ``scales`` [N/16, quads, 8, 4, 2], or zero points so ordered, back to [N, groups]."""
    tiles, quads = pairs.shape[:2]
    axes = pairs.permute(0, 4, 2, 1, 3).reshape(tiles * 16, quads * GROUPS_PER_QUAD)
    return axes[:, :groups]


def repack_scale(weight_scale: Tensor) -> Tensor:
    """Convert disk scales [N, K/G], fp16 or bf16, to ``scales``.

    Raises:
        ValueError: another dtype, or N not a multiple of 16.
    """
    _check_scale(weight_scale)
    return _pair_rows(weight_scale)


def repack_zero_point(weight_zero_point: Tensor, N: int) -> Tensor:
    """Convert disk zero points to ``zeros``.

    Args:
        weight_zero_point: [ceil(N/8), K/G] int32.
        N: output features, a multiple of 16.

    Returns:
        ``zeros`` [N/16, quads, 8] int32.

    Raises:
        ValueError: the tensor does not hold N rows.
    """
    signed = formats.unpack_zero_point(weight_zero_point, N)
    pairs = _pair_rows(signed.to(torch.int32) + formats.SYMMETRIC_ZERO)
    # Nibbles of different bits: their sum is their union.
    return (pairs << _zero_shifts(pairs.device)).sum((3, 4), dtype=torch.int32)


def stored_zero_points(zeros: Tensor, groups: int) -> Tensor:
    """Return the stored zero points [N, groups] uint8, 0..15, behind ``zeros``."""
    pairs = (zeros[..., None, None] >> _zero_shifts(zeros.device)) & 0xF
    return unpair_rows(pairs, groups).to(torch.uint8)


def _zero_shifts(device: torch.device) -> Tensor:
    """Return the bit at which a word of ``zeros`` holds group i of row r: [4, 2] int32."""
    groups = torch.arange(0, 16, 4, dtype=torch.int32, device=device)
    return groups[:, None] + torch.tensor([0, 16], dtype=torch.int32, device=device)


def _check_scale(weight_scale: Tensor) -> None:
    if weight_scale.dim() != 2 or weight_scale.dtype not in SCALE_DTYPES:
        shape = tuple(weight_scale.shape)
        raise ValueError(
            f"weight_scale must be 2-D float16 or bfloat16, got {weight_scale.dtype} {shape}"
        )
    if weight_scale.shape[0] % ROW_TILE:
        raise ValueError(f"weight_scale must have a multiple of {ROW_TILE} rows")
