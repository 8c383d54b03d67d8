"""Weights of 4 or 8 bits times bf16 activations on a CPU: one op, compiled where it runs.

For few tokens a product reads each weight once, so the floor is the weights' bytes over the
bandwidth of a core; behind it comes widening each code once for all rows, and then the products.
AVX2 and AVX-512 widen to fp32 in registers and multiply up to 4 and 8 rows at a time; AMX widens
to bf16, which holds every code exactly, in a panel that stays in cache, and multiplies 16 rows;
one or two rows are AVX-512's there.

Maths     y[m, n] = Σ_g scale[g, n] · Σ_{k in g} x[m, k] · (code[n, k] - zero[g, n]) + bias[n]
Shapes    x [M, K] bf16   weight [⌈N/16⌉, K·bits/32, 16] int32, scale [⌈N/16⌉, G, 16] bf16 and zero
          [⌈N/16⌉, G, 16] int8 or None (:func:`pack`)   bias [N] bf16 or None   →   y [M, N] bf16
Packing   a word holds 32/bits neighbouring inputs of one output in two's complement, even ones from
          bit 0 on, odd ones from bit 16 on: AMX multiplies pairs
Numerics  codes are integers; products and sums in fp32, a group's scale applied once to its sum,
          the bias in fp32; one rounding at the store. Rows do not depend on their neighbours or on
          threads, but for AMX, which leaves up to two rows to AVX-512. AVX2 multiplies
          x · 2^(bits - 32): elements below 2⁻⁹⁸ lose bits. AMX takes subnormal elements for 0.
Limits    x86 with AVX2; groups of a multiple of 32; contiguous operands; forward only; compiled by
          g++ where it runs (:mod:`taut_kernels.launch.cpp_library`), else :func:`why_not_here` says
          why not
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from taut_kernels.launch import cpp_library
from taut_kernels.launch.op_registration import register_op

OP = "weight_only_linear_cpu"
SOURCE = Path(__file__).with_suffix(".cpp")
BITS = (4, 8)
_BLOCK = 16
_GROUPS = (256, 128, 64, 32)
"""Inputs of a group as they are packed, the most that divide a group: its scale is repeated."""
_ROWS_AT_ONCE = 4096
"""Packed at a time: packing takes some twelve bytes a weight."""


class Isa(IntEnum):
    """Instructions the op multiplies by."""

    AVX2 = 0
    AVX512 = 1
    AMX = 2


def why_not_here() -> str | None:
    """Compile and load the op; say why it cannot run in this process, None where it can."""
    if not torch.cpu._is_avx2_supported():
        return "this CPU has no AVX2"
    return cpp_library.load(SOURCE)


def best_isa() -> Isa:
    """Return the best instructions here; two variables deny some, as they do to torch and oneDNN.

    ``ATEN_CPU_CAPABILITY=avx2`` leaves AVX2, ``ONEDNN_MAX_CPU_ISA`` of another name than
    ``DEFAULT`` or one with AMX takes AMX away.
    """
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return Isa.AVX2
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    allowed = most == "DEFAULT" or "AMX" in most
    # Linux gives a process the tiles when it asks.
    if allowed and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
        return Isa.AMX
    return Isa.AVX512


def why_not_packed(K: int, groups: int, bits: int) -> str | None:
    """Say why the op does not take a layer, None where it does.

    Args:
        K: input features.
        groups: scales along K.
        bits: of a code.
    """
    if bits not in BITS:
        return f"codes of {bits} bits, not of 4 or 8"
    if groups < 1 or K % groups or K // groups % _GROUPS[-1]:
        return f"{groups} groups of {K} input features are no multiples of {_GROUPS[-1]}"
    return None


def pack(
    codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lay a layer out for the op.

    Args:
        codes: [N, K] int8, signed, within ``bits``.
        scale: [N, G] bf16.
        zero: [N, G] int8, signed, within ``bits``; None where all are 0.
        bits: 4 or 8.

    Returns:
        Weight, scale and zero points as in the contract above, padded with zeros to whole blocks.

    Raises:
        ValueError: a type, shape, range or number of groups that the op does not take.
    """
    N, K = _checked(codes, scale, zero, bits)
    group = next(size for size in _GROUPS if K // scale.shape[1] % size == 0)
    again, rows = K // scale.shape[1] // group, -N % _BLOCK
    parts = [codes[first : first + _ROWS_AT_ONCE] for first in range(0, N, _ROWS_AT_ONCE)]
    blocks = [_words(pad(part, (0, 0, 0, -len(part) % _BLOCK)), bits) for part in parts]

    def by_block(of_groups: Tensor) -> Tensor:
        whole = pad(of_groups, (0, 0, 0, rows)).repeat_interleave(again, dim=1)
        return whole.view(-1, _BLOCK, whole.shape[1]).transpose(1, 2).contiguous()

    return torch.cat(blocks), by_block(scale), None if zero is None else by_block(zero)


def _checked(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> tuple[int, int]:
    if codes.dim() != 2 or codes.dtype is not torch.int8:
        raise ValueError(f"codes must be [N, K] int8, got {codes.dtype} {tuple(codes.shape)}")
    N, K = codes.shape
    if scale.dim() != 2 or len(scale) != N or scale.dtype is not torch.bfloat16:
        raise ValueError(f"scale must be [{N}, G] bf16, got {scale.dtype} {tuple(scale.shape)}")
    if reason := why_not_packed(K, scale.shape[1], bits):
        raise ValueError(f"scale: {reason}")
    if zero is not None and (zero.dtype is not torch.int8 or zero.shape != scale.shape):
        raise ValueError(
            f"zero must be int8 {tuple(scale.shape)}, got {zero.dtype} {tuple(zero.shape)}"
        )
    least = -(1 << (bits - 1))
    for name, values in (("codes", codes), ("zero", zero)):
        if values is not None and values.numel():
            low, high = values.aminmax()
            if int(low) < least or int(high) >= -least:
                raise ValueError(f"{name} must lie in {least}..{-least - 1}")
    return N, K


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack whole blocks of codes: [16 B, K] → [B, K·bits/32, 16] int32."""
    held = 32 // bits
    k = torch.arange(held, dtype=torch.int32)
    places = k % 2 * 16 + k // 2 * bits
    parts = (codes.to(torch.int32) & ((1 << bits) - 1)).view(len(codes), -1, held) << places
    # The terms share no bit, so the sum is their union; int32 wraps at the top, as intended.
    words = parts.sum(dim=-1, dtype=torch.int32)
    return words.view(-1, _BLOCK, words.shape[1]).transpose(1, 2).contiguous()


def weight_only_linear_cpu_ref(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute the op from codes [N, K], scales and zero points [N, G]; in fp64 where x is."""
    wide = torch.promote_types(x.dtype, torch.float32)
    values = codes.to(wide).view(*scale.shape, -1)
    if zero is not None:
        values = values - zero.to(wide).unsqueeze(-1)
    weight = (values * scale.to(wide).unsqueeze(-1)).view(codes.shape)
    y = x.to(wide) @ weight.T
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def multiply(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    N: int,
    isa: int,
) -> Tensor:
    """Call the op; arguments as in its contract, but any strides of x."""
    y: Tensor = torch.ops.taut.weight_only_linear_cpu.default(
        x.contiguous(), weight, scale, zero, bias, N, isa
    )
    return y


def _fake(x: Tensor, _weight: Tensor, *rest: Any) -> Tensor:
    *_, N, _isa = rest
    return x.new_empty((x.shape[0], N))


_SCHEMA = (
    f"taut::{OP}(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, int N, int isa)"
    " -> Tensor"
)
register_op(_SCHEMA, None, None, _fake)
