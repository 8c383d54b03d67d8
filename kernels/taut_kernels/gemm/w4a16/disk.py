"""4-bit weight formats: the compressed-tensors disk layout, and what kernels read on a CPU.

``N`` is output features, ``K`` input features, ``G`` the group size along K (``G = K``: one group a
channel). A stored nibble is ``value + 8`` with value in -8..7, for weights and zero points alike; a
weight is ``(stored - stored_zero) * scale`` with ``stored_zero = 8`` where the scheme is symmetric.

On disk (compressed-tensors ``pack-quantized``)
    ``weight_packed``      [N, ceil(K/8)] int32: bits 4i..4i+3 of word j hold column 8j + i
    ``weight_scale``       [N, K/G] float
    ``weight_zero_point``  [ceil(N/8), K/G] int32: bits 4i..4i+3 of word j hold row 8j + i
    Nibbles beyond N or K are 0.

GPU kernel layout: :mod:`.layout`

CPU kernel layout (:func:`repack_for_cpu`)
    ``qweight_cpu``       [N, K/2] uint8, opaque: ATen chooses it for the vector width of this
                          machine
    ``scales_and_zeros``  [K/G', N, 2] float: the scale, and ``(8 - stored_zero) * scale``; G' ≤ 256
    Never written to disk.

Source: compressed-tensors 0.17, ``compressors/pack_quantized`` (Apache-2.0), read for the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

NIBBLES_PER_WORD = 8
SYMMETRIC_ZERO = 8
CPU_GROUP_SIZES = (256, 128, 64, 32)
"""Groups ATen's int4 CPU kernel takes, largest first."""


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device)


def _pack_columns(nibbles: Tensor) -> Tensor:
    rows, columns = nibbles.shape
    pad = -columns % NIBBLES_PER_WORD
    padded = torch.nn.functional.pad(nibbles.to(torch.int32), (0, pad))
    words = padded.view(rows, -1, NIBBLES_PER_WORD) << _shifts(nibbles.device)
    # The eight terms share no bit, so the sum is their union; int32 wraps for a top nibble ≥ 8, as
    # intended.
    return words.sum(dim=-1, dtype=torch.int32)


def _unpack_columns(words: Tensor, columns: int) -> Tensor:
    nibbles = (words.unsqueeze(-1) >> _shifts(words.device)) & 0xF
    return nibbles.flatten(1)[:, :columns].to(torch.uint8)


def _check_int4(values: Tensor, name: str) -> None:
    if values.dim() != 2 or values.dtype is not torch.int8:
        shape = tuple(values.shape)
        raise ValueError(f"{name} must be a 2-D int8 tensor, got {values.dtype} {shape}")
    if values.numel() and (int(values.min()) < -8 or int(values.max()) > 7):
        raise ValueError(f"{name} must lie in -8..7")


def _check_words(words: Tensor, columns: int, name: str) -> None:
    expected = -(-columns // NIBBLES_PER_WORD)
    if words.dim() != 2 or words.dtype is not torch.int32 or words.shape[1] != expected:
        raise ValueError(
            f"{name} must be int32 with {expected} words along the packed side, "
            f"got {words.dtype} {tuple(words.shape)}"
        )


def pack_weight(values: Tensor) -> Tensor:
    """Pack signed 4-bit weights for disk.

    Args:
        values: [N, K] int8 in -8..7.

    Returns:
        ``weight_packed`` [N, ceil(K/8)] int32.

    Raises:
        ValueError: wrong dtype, rank or range.
    """
    _check_int4(values, "values")
    return _pack_columns(values + SYMMETRIC_ZERO)


def unpack_weight(weight_packed: Tensor, K: int) -> Tensor:
    """Invert :func:`pack_weight`.

    Args:
        weight_packed: [N, ceil(K/8)] int32.
        K: input features.

    Returns:
        [N, K] int8 in -8..7.

    Raises:
        ValueError: the tensor does not hold K columns.
    """
    _check_words(weight_packed, K, "weight_packed")
    return _unpack_columns(weight_packed, K).to(torch.int8) - SYMMETRIC_ZERO


def pack_zero_point(values: Tensor) -> Tensor:
    """Pack signed zero points for disk.

    Args:
        values: [N, K/G] int8 in -8..7.

    Returns:
        ``weight_zero_point`` [ceil(N/8), K/G] int32, contiguous.

    Raises:
        ValueError: wrong dtype, rank or range.
    """
    _check_int4(values, "values")
    return _pack_columns((values + SYMMETRIC_ZERO).t()).t().contiguous()


def unpack_zero_point(weight_zero_point: Tensor, N: int) -> Tensor:
    """Invert :func:`pack_zero_point`.

    Args:
        weight_zero_point: [ceil(N/8), K/G] int32.
        N: output features.

    Returns:
        [N, K/G] int8 in -8..7.

    Raises:
        ValueError: the tensor does not hold N rows.
    """
    _check_words(weight_zero_point.t(), N, "weight_zero_point")
    return _unpack_columns(weight_zero_point.t(), N).to(torch.int8).t() - SYMMETRIC_ZERO


def dequantise(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    K: int,
    rows: slice,
) -> Tensor:
    """Compute some output features' weights as they are meant, from the disk layout.

    Args:
        weight_packed: [N, ceil(K/8)] int32.
        weight_scale: [N, K/G] float.
        weight_zero_point: [ceil(N/8), K/G] int32, or None.
        K: input features.
        rows: output features wanted.

    Returns:
        [rows, K] fp32.
    """
    scale = weight_scale[rows].float()
    values = unpack_weight(weight_packed[rows], K).float().view(*scale.shape, -1)
    if weight_zero_point is not None:
        zeros = unpack_zero_point(weight_zero_point, weight_scale.shape[0])[rows]
        values = values - zeros.float().unsqueeze(-1)
    return (values * scale.unsqueeze(-1)).view(scale.shape[0], K)


def cpu_group_size(K: int, group_size: int) -> int | None:
    """Return the group size the CPU layout uses for a layer, None if there is none.

    A channel scale is repeated over the largest group ATen takes that divides K, which changes no
    value.

    Args:
        K: input features.
        group_size: 32, 64, 128, or K for one group a channel.
    """
    if group_size != K:
        return group_size if group_size in CPU_GROUP_SIZES and K % group_size == 0 else None
    return next((group for group in CPU_GROUP_SIZES if K % group == 0), None)


def repack_for_cpu(
    weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None, K: int
) -> tuple[Tensor, Tensor]:
    """Convert a disk layer to the CPU kernel layout of this machine.

    Args:
        weight_packed: [N, ceil(K/8)] int32 on CPU, N % 16 == 0.
        weight_scale: [N, K/G] bfloat16.
        weight_zero_point: [ceil(N/8), K/G] int32 or None for a symmetric layer.
        K: input features, divisible by a size in `CPU_GROUP_SIZES`.

    Returns:
        ``qweight_cpu`` and ``scales_and_zeros`` as in the module's layout table.

    Raises:
        ValueError: N or the group size does not fit the layout.
    """
    N, groups = weight_scale.shape
    group = cpu_group_size(K, K // groups)
    if group is None or N % 16:
        raise ValueError(f"no CPU layout for N={N}, K={K}, group_size={K // groups}")
    nibbles = (unpack_weight(weight_packed, K) + SYMMETRIC_ZERO).to(torch.int32)
    # innerKTiles (2) is a CUDA notion that the CPU version of this ATen function checks and
    # ignores.
    qweight_cpu = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 2)
    zeros = torch.zeros_like(weight_scale)
    if weight_zero_point is not None:
        # The product is formed in fp32 and rounded once; it is exact for zero points within 2 of
        # the middle.
        offset = -unpack_zero_point(weight_zero_point, N).float()
        zeros = (offset * weight_scale.float()).to(weight_scale.dtype)
    pairs = torch.stack((weight_scale.t(), zeros.t()), dim=-1)
    return qweight_cpu, pairs.repeat_interleave(K // groups // group, dim=0).contiguous()
