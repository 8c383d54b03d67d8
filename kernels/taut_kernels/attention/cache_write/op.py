"""New keys and values into the paged cache, 16-bit and fp8, one launch for both.

Maths     row slots[t] of the cache = k[t], v[t]; in fp8 e4m3(k[t] / k_scale), e4m3(v[t] / v_scale)
Op        `taut::cache_write`, mutates k_cache and v_cache
Shapes    k, v [T, Hk, D] bf16 or fp16   slots [S] int64, S ≤ T: rows of k and v from S on are
          padding and not read. Slot = page · page size + place in it; below 0: not written
          k_cache, v_cache [pages, page size, Hk, D] as k or e4m3, which may be halves of one tensor
          All with any strides, but the D elements next to each other
          k_scale, v_scale fp32 on the device, one element or [Hk]; None for 1
Numerics  16 bits: a copy of the bits. e4m3: fp32 division, rounded half to even, saturated at ±448,
          infinities too; a NaN becomes 0x7F: the bits of vLLM's `reshape_and_cache_flash`, where
          scales lie between 2**-60 and 2**60 (beyond, and below 0, nothing is promised).
CPU       the reference, in plain torch: the specification
Limits    slots must lie below pages · page size (not checked on a GPU: that would wait for it) and
          differ from each other, or which token stays is not defined; a token and a page span less
          than 2**31 elements; int8 caches are not written; forward only; sm_80 and later
Source    what is stored: vLLM `reshape_and_cache_flash`. The code is ours.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from taut_kernels.attention.cache_arguments import check_scale
from taut_kernels.attention.cache_write.kernel import cache_write_kernel
from taut_kernels.launch import early_start, launcher
from taut_kernels.launch.op_registration import register_op

DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
_cache_write = launcher.Launcher(cache_write_kernel)
_ELEMENTS = 1024
"""Of a key a program, and of its value: 16 bytes of each for every thread of four warps."""
_NAN = 0x7F
_MAX_OFFSET = 2**31


def _stored_ref(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return keys or values [.., Hk, D] as a cache of that type holds them."""
    if dtype != FP8:
        return x.to(dtype)
    y = x.float()
    if scale is not None:
        y = y / scale.view(-1, 1)
    codes = y.clamp(-448.0, 448.0).to(FP8).view(torch.uint8)
    return codes.masked_fill(y.isnan(), _NAN).view(FP8)


def cache_write_ref(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write in plain torch: the specification, and the op's CPU implementation.

    Args:
        k: [T, Hk, D].
        v: [T, Hk, D].
        k_cache: [pages, page size, Hk, D], written.
        v_cache: likewise.
        slots: [S] int64.
        k_scale: fp32, one element or [Hk], or None.
        v_scale: likewise.
    """
    written = slots >= 0
    pages = slots[written] // k_cache.shape[1]
    places = slots[written] % k_cache.shape[1]
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = _stored_ref(x[: slots.shape[0]][written], cache.dtype, scale)
        # As whole numbers: torch has no indexing of e4m3 everywhere.
        whole = torch.uint8 if cache.dtype == FP8 else torch.int16
        cache.view(whole)[pages, places] = rows.view(whole)


def _blocks(heads: int, dim: int) -> tuple[int, int]:
    """Return the heads of a program and the columns of one, both powers of two."""
    block_d = 1 << (dim - 1).bit_length()
    return min(1 << (heads - 1).bit_length(), max(1, _ELEMENTS // block_d)), block_d


def launch_constants(
    k_cache: Tensor, *, early: bool, converts: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the kernel's constants and the compiler's options.

    Args:
        k_cache: [pages, page size, Hk, D].
        early: whether it may start before the kernel in front has ended (sm_90).
        converts: whether the device has an instruction for e4m3 (sm_89).
    """
    _, page, heads, dim = k_cache.shape
    block_h, block_d = _blocks(heads, dim)
    fp8 = "fp8" if converts else "fp8 codes"
    constants = {
        "HEADS": heads,
        "D": dim,
        "PAGE": page,
        "FORMAT": fp8 if k_cache.dtype == FP8 else "16 bit",
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "PDL": early,
    }
    warps = max(1, min(8, block_h * block_d // 256))
    # Without contraction: a product of a division's steps must not run into the next one's sum.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return constants, options | launcher.PDL_OPTIONS[early]


def _without_single(strides: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides, 0 where there is one element: that one's stride may be anything.

    1, or what 16 does not divide, would be a form of its own.
    """
    return tuple(0 if size == 1 else stride for stride, size in zip(strides, sizes, strict=True))


# Asked in every call: kept by everything the answer follows from.
@lru_cache(maxsize=8192)
def _plan(
    early_tokens: int,
    count: int,
    cut: tuple[int, int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    no_k_scale: bool,
    no_v_scale: bool,
    device: torch.device,
) -> tuple[launcher.Form, tuple[int, int, int], bool, bool]:
    """Return form and grid of a call, whether it starts early, and whether e4m3 is converted.

    Args:
        early_tokens: of which the third follows.
        count: slots.
        cut: page size, heads and their elements.
        dtype: of the keys.
        cache_dtype: of their cache.
        no_k_scale: there is none.
        no_v_scale: likewise.
        device: of all operands.
    """
    converts, early = launcher.capability(device) >= (8, 9), launcher.starts_early(count, device)
    form = _cache_write.form(
        (dtype, cache_dtype, *cut, no_k_scale, no_v_scale, early), launcher.number(device)
    )
    _, heads, dim = cut
    return form, (count, -(-heads // _blocks(heads, dim)[0]), 1), early, converts


def launch(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Run the kernel: the op on CUDA, and what the plugin calls.

    Args:
        k: as of :func:`cache_write_ref`, as are the others.
        v: likewise.
        k_cache: likewise.
        v_cache: likewise.
        slots: likewise.
        k_scale: likewise.
        v_scale: likewise.
    """
    pages, page, heads, dim = k_cache.shape
    tokens, count = k.shape[0], slots.shape[0]
    if not (count and heads and dim):
        return
    absent = k_scale is None, v_scale is None
    form, grid, early, converts = _plan(
        early_start.EARLY_TOKENS, count, (page, heads, dim), k.dtype, k_cache.dtype, *absent,
        k.device,
    )  # fmt: skip
    caches = (k_cache, v_cache)
    if k_cache.dtype == FP8 and not converts:
        caches = (k_cache.view(torch.uint8), v_cache.view(torch.uint8))
    strides = (
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]
    )  # fmt: skip
    if 1 in (tokens, pages, page, heads):
        strides = _without_single(strides, (tokens, heads) * 2 + (pages, page, heads) * 2)
    by_head = tuple(int(each is not None and each.numel() > 1) for each in (k_scale, v_scale))
    form(
        grid,
        (k, v, *caches, slots, k_scale, v_scale),
        (*by_head, *strides),
        lambda: launch_constants(k_cache, early=early, converts=converts),
        strides,
    )


def write(k: Tensor, *others: Any) -> None:
    """Run the op without its checks and torch's dispatcher, for a caller that sees to both.

    Args:
        k: as of :func:`cache_write_ref`.
        others: likewise, all of them.
    """
    run = launch if k.is_cuda else cache_write_ref
    run(k, *others)


def _fake_cache_write(*_: Any) -> None:
    return None


_SCHEMA = (
    "taut::cache_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor "
    "slots, Tensor? k_scale, Tensor? v_scale) -> ()"
)
register_op(_SCHEMA, cache_write_ref, launch, _fake_cache_write)


def cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into a paged cache.

    Args:
        k: [T, Hk, D] bf16 or fp16, the D elements next to each other.
        v: as ``k``.
        k_cache: [pages, page size, Hk, D] of the dtype of ``k`` or float8_e4m3fn, the D elements
            next to each other, written.
        v_cache: as ``k_cache``.
        slots: [S] int64, contiguous, S ≤ T: where each token goes; below 0 nowhere.
        k_scale: fp32, one element or [Hk], of an fp8 cache: a key is its element times this.
        v_scale: likewise for values.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    _check_tokens("k", k, k)
    _check_tokens("v", v, k)
    _check_cache("k_cache", k_cache, k)
    _check_cache("v_cache", v_cache, k)
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"v_cache must be as k_cache, {tuple(k_cache.shape)} {k_cache.dtype}, "
            f"got {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    _check_slots(slots, k)
    _check_scale("k_scale", k_scale, k_cache)
    _check_scale("v_scale", v_scale, k_cache)
    torch.ops.taut.cache_write(k, v, k_cache, v_cache, slots, k_scale, v_scale)


def _check_tokens(name: str, x: Tensor, k: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"{name} must be [T, Hk, D], got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be bfloat16 or float16, got {x.dtype}")
    if (x.shape, x.dtype, x.device) != (k.shape, k.dtype, k.device):
        raise ValueError(
            f"{name} must be as k, {tuple(k.shape)} {k.dtype} on {k.device}, got "
            f"{tuple(x.shape)} {x.dtype} on {x.device}"
        )
    if x.stride(2) != 1 and x.numel():
        raise ValueError(f"{name} must have the elements of a head next to each other")
    if x.shape[1] * x.stride(1) >= _MAX_OFFSET:
        raise ValueError(f"{name}: a token spans {x.shape[1] * x.stride(1)} elements")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"cache_write is forward only: call it under torch.no_grad() ({name})")


def _check_cache(name: str, cache: Tensor, k: Tensor) -> None:
    if cache.dim() != 4 or not cache.shape[1]:
        raise ValueError(f"{name} must be [pages, page size, Hk, D], got {tuple(cache.shape)}")
    if cache.dtype not in (k.dtype, FP8):
        raise ValueError(f"{name} must be {k.dtype} as k or float8_e4m3fn, got {cache.dtype}")
    if cache.device != k.device:
        raise ValueError(f"{name} must be on {k.device}, got {cache.device}")
    if cache.shape[2:] != k.shape[1:]:
        expected = f"[pages, page size, {k.shape[1]}, {k.shape[2]}]"
        raise ValueError(f"{name} must be {expected} as k, got {tuple(cache.shape)}")
    if cache.stride(3) != 1 and cache.numel():
        raise ValueError(f"{name} must have the elements of a head next to each other")
    span = cache.shape[1] * cache.stride(1) + cache.shape[2] * cache.stride(2)
    if span >= _MAX_OFFSET:
        raise ValueError(f"{name}: a page spans {span} elements, at most 2**31")


def _check_slots(slots: Tensor, k: Tensor) -> None:
    if slots.dim() != 1 or slots.dtype != torch.int64:
        raise ValueError(f"slots must be [S] int64, got {tuple(slots.shape)} {slots.dtype}")
    if slots.shape[0] > k.shape[0]:
        raise ValueError(f"slots has {slots.shape[0]} tokens, more than the {k.shape[0]} of k")
    if slots.device != k.device or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous and on {k.device}")


def _check_scale(name: str, scale: Tensor | None, k_cache: Tensor) -> None:
    if scale is None:
        return
    if k_cache.dtype != FP8:
        raise ValueError(f"{name} is of fp8 caches, k_cache is {k_cache.dtype}")
    check_scale(name, scale, k_cache)
