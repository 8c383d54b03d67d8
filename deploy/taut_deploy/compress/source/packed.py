"""Checkpoints stored in low precision, read as the numbers their codes stand for.

FP8 by blocks, as DeepSeek-V3 is published: ``weight`` [N, K] in e4m3 and ``weight_scale_inv``
[ceil(N / b), ceil(K / b)] fp32, the factor of each block.

MXFP4, as gpt-oss is published: ``X_blocks`` [..., G, 16] uint8, two e2m1 codes a byte, the earlier
in the low bits, and ``X_scales`` [..., G] uint8, an exponent biased by 127 for 32 codes. The tensor
it stands for has the last two dimensions joined and exchanged with the one before, [..., K, N].
Source of both formats: OCP Microscaling Formats 1.0, sections 5.3 and 6; DeepSeek-V3 report §3.3.

compressed-tensors: integers packed into int32 words with scales, shape and perhaps zero points, or
8-bit codes with scales; its own functions multiply them out.
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
_READ_LAYOUTS = frozenset(
    {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"}
)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor that is stored as codes and scales.

    Attributes:
        name: of what it stands for.
        shape: of that.
        dtype: of the numbers, in safetensors' words.
        parts: names of the stored tensors, in the order ``unpack`` takes them.
        unpack: makes numbers of the parts; of one entry of all of them as well.
        unused: names of stored tensors that go with it and are not needed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]
    unpack: Callable[..., torch.Tensor]
    unused: tuple[str, ...] = ()


def why_not_read(entry: Mapping[str, Any], *, requantize: bool) -> str | None:
    """Why a quantised model cannot be compressed; None where its weights can be read.

    Args:
        entry: ``quantization_config`` of its ``config.json``.
        requantize: take weights that were rounded from a better model.
    """
    method = entry.get("quant_method")
    if method == "mxfp4" or (method == "fp8" and entry.get("weight_block_size")):
        return None  # published so: there is no better model
    if method != "compressed-tensors" or entry.get("format") not in _READ_LAYOUTS:
        return "compress the model it was made from"
    return (
        None
        if requantize
        else (
            "compress the model it was made from, or add --requantize to start from rounded weights"
        )
    )


def packed_tensors(
    directory: Path,
    files: Mapping[str, StoredTensor],
    read: Callable[[str], torch.Tensor],
) -> dict[str, PackedTensor]:
    """Find the packed tensors of a model.

    Args:
        directory: of the model; its ``config.json`` says how it is quantised.
        files: what the shards hold, by name.
        read: reads one stored tensor.

    Returns:
        By name of what they stand for.

    Raises:
        ModelError: FP8 codes of blocks whose size is not said.
    """
    entry = read_config(directory).get("quantization_config")
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    found: dict[str, PackedTensor | None] = {}
    for name, stored in files.items():
        if method == "mxfp4":
            found[name] = _mxfp4(name, stored, files)
        elif method == "fp8":
            found[name] = _fp8(directory, name, stored, files)
        elif method == "compressed-tensors":
            found[name] = _compressed(name, stored, files, read)
    return {one.name: one for one in found.values() if one is not None}


def _mxfp4(
    name: str, stored: StoredTensor, files: Mapping[str, StoredTensor]
) -> PackedTensor | None:
    whole = name.removesuffix(_BLOCKS)
    if whole == name or whole + _SCALES not in files:
        return None
    *outer, rows, groups, size = stored.shape
    shape = (*outer, 2 * groups * size, rows)
    return PackedTensor(whole, shape, "BF16", (name, whole + _SCALES), unpack_mxfp4)


def _fp8(
    directory: Path, name: str, stored: StoredTensor, files: Mapping[str, StoredTensor]
) -> PackedTensor | None:
    scale = name + _SCALE_INV
    if scale not in files:
        return None
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

    return PackedTensor(name, stored.shape, "BF16", (name, scale), unpack)


def _compressed(
    name: str,
    stored: StoredTensor,
    files: Mapping[str, StoredTensor],
    read: Callable[[str], torch.Tensor],
) -> PackedTensor | None:
    whole = name.removesuffix("_packed")
    scale, zero = f"{whole}_scale", f"{whole}_zero_point"
    if scale not in files or not (whole != name or stored.dtype in {"I8", "F8_E4M3"}):
        return None
    zeros = (zero,) if zero in files else ()
    fixed = f"{whole.rpartition('.')[0]}.input_scale"
    unused: tuple[str, ...] = (fixed,) if fixed in files else ()
    dtype = files[scale].dtype
    if whole == name:
        return PackedTensor(whole, stored.shape, dtype, (name, scale, *zeros), _scaled, unused)
    rows, columns = read(f"{whole}_shape").tolist()
    bits = 32 * stored.shape[1] // columns
    unused += (f"{whole}_shape",)

    def unpack(words: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return unpack_integers(words, *rest, bits=bits, columns=columns)

    return PackedTensor(whole, (rows, columns), dtype, (name, scale, *zeros), unpack, unused)


def _scaled(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None
) -> torch.Tensor:
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    exact: torch.Tensor = dequantize(codes, scale.float(), zero, dtype=torch.float32)
    return exact.to(scale.dtype)


def unpack_integers(
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    bits: int,
    columns: int,
) -> torch.Tensor:
    """Multiply packed integers out, through compressed-tensors' own functions.

    Args:
        words: [N, ceil(K * bits / 32)] int32.
        scale: [N, G].
        zero: [ceil(N * bits / 32), G] int32, or None.
        bits: per code.
        columns: K.

    Returns:
        [N, K] in the dtype of ``scale``.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    codes = unpack_from_int32(words, bits, torch.Size((words.shape[0], columns)))
    if zero is not None:
        zero = unpack_from_int32(zero, bits, torch.Size(scale.shape), packed_dim=0)
    return _scaled(codes, scale, zero)


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
