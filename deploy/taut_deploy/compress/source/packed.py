"""Checkpoints published in low precision, read as the numbers their codes stand for.

FP8 by blocks, as DeepSeek-V3 is published: ``weight`` [N, K] in e4m3 and ``weight_scale_inv``
[ceil(N / b), ceil(K / b)] fp32, the factor of each block.

MXFP4, as gpt-oss is published: ``X_blocks`` [..., G, 16] uint8, two e2m1 codes a byte, the earlier
in the low bits, and ``X_scales`` [..., G] uint8, an exponent biased by 127 for 32 codes. The tensor
it stands for has the last two dimensions joined and exchanged with the one before, [..., K, N].
Source of both formats: OCP Microscaling Formats 1.0, sections 5.3 and 6; DeepSeek-V3 report §3.3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_deploy.compress.source.soundness import StoredTensor
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import read_config

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_INV = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor that is stored as codes and scales.

    Attributes:
        name: of what it stands for.
        shape: of that.
        parts: names of the stored tensors, in the order ``unpack`` takes them.
        unpack: makes bf16 numbers of the parts; of one entry of all of them as well.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    unpack: Callable[..., torch.Tensor]


def packed_tensors(directory: Path, files: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    """Find the packed tensors of a model.

    Args:
        directory: of the model; its ``config.json`` says the size of FP8 blocks.
        files: what the shards hold, by name.

    Returns:
        By name of what they stand for.

    Raises:
        ModelError: FP8 codes of blocks whose size is not said.
    """
    found: dict[str, PackedTensor] = {}
    for name, stored in files.items():
        if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in files:
            whole = name.removesuffix(_BLOCKS)
            *outer, rows, groups, size = stored.shape
            shape = (*outer, 2 * groups * size, rows)
            found[whole] = PackedTensor(whole, shape, (name, whole + _SCALES), unpack_mxfp4)
        elif stored.dtype == "F8_E4M3" and name + _SCALE_INV in files:
            found[name] = _fp8(directory, name, stored, files)
    return found


def _fp8(
    directory: Path, name: str, stored: StoredTensor, files: Mapping[str, StoredTensor]
) -> PackedTensor:
    scale = name + _SCALE_INV
    config: dict[str, Any] = read_config(directory).get("quantization_config") or {}
    block = config.get("weight_block_size")
    sides = block if isinstance(block, list) else []
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise ModelError(
            f"{directory / 'config.json'}: quantization_config: weight_block_size: {block!r} is "
            "no pair of sizes, so FP8 weights cannot be read; give the model's own"
        )
    expected = tuple(math.ceil(n / side) for n, side in zip(stored.shape, sides, strict=False))
    if files[scale].shape != expected:
        raise ModelError(
            f"{files[scale].shard}: {scale}: stored shape {files[scale].shape} does not fit "
            f"blocks of {sides[0]}×{sides[1]}, which need {expected}"
        )

    def unpack(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return unpack_fp8(codes, scales, (sides[0], sides[1]))

    return PackedTensor(name, stored.shape, (name, scale), unpack)


def unpack_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiply FP8 codes by the scales of their blocks.

    Args:
        codes: [N, K] float8_e4m3fn.
        scales: [ceil(N / block[0]), ceil(K / block[1])].
        block: rows and columns of a block.

    Returns:
        [N, K] bf16.
    """
    rows, columns = codes.shape
    full = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (codes.float() * full[:rows, :columns]).bfloat16()


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Turn MXFP4 codes into numbers.

    Args:
        blocks: [..., N, G, S] uint8, two codes a byte.
        scales: [..., N, G] uint8, biased exponents.

    Returns:
        [..., 2 * G * S, N] bf16; exact, as bf16 holds every product.
    """
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    low, high = values[(blocks & 15).long()], values[(blocks >> 4).long()]
    numbers = torch.stack([low, high], -1).flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    numbers = torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2)
    return numbers.transpose(-1, -2).to(torch.bfloat16).contiguous()
