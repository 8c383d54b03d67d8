"""Jit functions of :mod:`.op`."""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def e4m3_codes(x):
    """Return fp32 values as e4m3, saturated at ±448 and rounded half to even, in uint8.

    In whole numbers, for the interpreter, whose own cast loses carries, and cards before sm_89. A
    NaN has the code of `cvt.satfinite`, 0x7F.
    """
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Three bits of the fraction stay; the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 a step is 2**-9: that is the last bit of 2**14 in fp32.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal) | sign
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def quotient(x, scale):
    """Return x / scale, correctly rounded where it lies within ±448 and does not vanish in e4m3.

    Beyond that it is at least as large, and a NaN stays one. Without the branches of `div.rn`: two
    Newton steps, of which the second is exact (Markstein, 1990).
    """
    magnitude = tl.abs(x)
    bound = scale * 512.0
    # Infinities, and quotients that would be. A comparison lets a NaN through.
    magnitude = tl.where(magnitude > bound, bound, magnitude)
    reciprocal = tl.div_rn(1.0, scale)
    q = magnitude * reciprocal
    q = tl.fma(tl.fma(-q, scale, magnitude), reciprocal, q)
    q = tl.fma(tl.fma(-q, scale, magnitude), reciprocal, q)
    # The steps lose the sign of a zero.
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def stored(x, scale, FORMAT: tl.constexpr):
    """Return elements as the cache holds them; scale [HEADS] or None."""
    y = x
    if FORMAT == "fp8":
        y = x.to(tl.float32)
        if scale is not None:
            y = quotient(y, scale[:, None])
        y = y.to(tl.float8e4nv)  # saturates: cvt.rn.satfinite
    elif FORMAT == "fp8 codes":
        y = x.to(tl.float32)
        if scale is not None:
            # The interpreter's fma rounds twice.
            y = tl.div_rn(y, scale[:, None] + tl.zeros_like(y))
        y = e4m3_codes(y)
    return y


@triton.jit
def load_scales(scale_ptr, heads, mask_h, stride):
    """Load the scale of each head [HEADS], None without."""
    scales = None
    if scale_ptr is not None:
        scales = tl.load(scale_ptr + heads * stride, mask=mask_h, other=1.0)
    return scales


@triton.jit
def page_rows(cache_ptr, page, place, heads, stride_p, stride_s, stride_h):
    """Return the rows [HEADS, 1] of one token; a page spans less than 2**31 elements."""
    token = cache_ptr + page.to(tl.int64) * stride_p + place * stride_s
    return token + (heads * stride_h)[:, None]


@triton.jit(do_not_specialize=["stride_ks", "stride_vs"])
def cache_write_kernel(
    k_ptr,  # [T, HEADS, D]
    v_ptr,
    k_cache_ptr,  # [pages, PAGE, HEADS, D]; uint8 in "fp8 codes"
    v_cache_ptr,
    slots_ptr,  # [S] int64
    k_scale_ptr,  # [HEADS] or [1] fp32, or None
    v_scale_ptr,
    stride_ks,  # 1, or 0 for one scale
    stride_vs,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcp,  # of the cache's pages, places in a page, heads
    stride_kcs,
    stride_kch,
    stride_vcp,
    stride_vcs,
    stride_vch,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,  # "16 bit", "fp8" or "fp8 codes"
    BLOCK_H: tl.constexpr,  # heads a program
    BLOCK_D: tl.constexpr,  # D up to a power of two
    PDL: tl.constexpr,
):
    """One program writes BLOCK_H heads of one token, key and value."""
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    if HEADS > BLOCK_H:
        heads += tl.program_id(1) * BLOCK_H
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask_h = heads < HEADS if HEADS % BLOCK_H else tl.full((BLOCK_H,), True, tl.int1)
    mask = mask_h[:, None] & (offs_d < D)
    k_rows = k_ptr + token * stride_kt + (heads * stride_kh)[:, None]
    v_rows = v_ptr + token * stride_vt + (heads * stride_vh)[:, None]
    if PDL:
        gdc_wait()
    # All asked for at once; nothing but the addresses of the stores waits for the slot.
    slot = tl.load(slots_ptr + token)
    k = tl.load(k_rows + offs_d, mask=mask, other=0.0)
    v = tl.load(v_rows + offs_d, mask=mask, other=0.0)
    k_scale = load_scales(k_scale_ptr, heads, mask_h, stride_ks)
    v_scale = load_scales(v_scale_ptr, heads, mask_h, stride_vs)
    # No branch on the slot: the loads would move behind it.
    mask = mask & (slot + tl.zeros((1, 1), tl.int64) >= 0)
    page = (slot.to(tl.uint64) // PAGE).to(tl.int32)
    place = (slot.to(tl.uint64) % PAGE).to(tl.int32)
    k_rows = page_rows(k_cache_ptr, page, place, heads, stride_kcp, stride_kcs, stride_kch)
    v_rows = page_rows(v_cache_ptr, page, place, heads, stride_vcp, stride_vcs, stride_vch)
    k, v = stored(k, k_scale, FORMAT), stored(v, v_scale, FORMAT)
    tl.store(k_rows + offs_d, k, mask=mask)
    tl.store(v_rows + offs_d, v, mask=mask)
