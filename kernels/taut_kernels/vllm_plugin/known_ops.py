"""Known answers of the ops around the products: norms, activations, rotary embeddings, attention.

As :mod:`taut_kernels.vllm_plugin.known_answer` does for linear layers: each op of ours that a
loaded model can reach computes seeded numbers once, at the model's widths and a few numbers of
tokens, and is compared with its own specification in plain torch on the same device. Imports no
vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut_kernels.activation import silu_mul
from taut_kernels.attention.cache_write.op import cache_write_ref
from taut_kernels.attention.decode.reference import paged_decode_ref
from taut_kernels.norm import rms_norm
from taut_kernels.rope import op as rope
from taut_kernels.rowwise import row_quant
from taut_kernels.vllm_plugin import known_answer
from taut_kernels.vllm_plugin.known_answer import Kind
from taut_kernels.vllm_plugin.warm_up import CLAMPED, EPSILON, PLAIN, Rotation, Widths
from taut_kernels.vllm_plugin.warm_up_decode import DecodeForm

TOKENS = (1, 17, 300)
"""One row, a few, and more than one program takes."""
_KEYS = (1, 90, 700)
"""Context lengths of the three sequences whose attention is known."""
_OF_RESULT, _OF_ROW = 2.0**-6, 2.0**-7
"""Allowed error: of the element (bf16 rounds to 2⁻⁹, some ops twice), and of its row's largest."""
_OTHER_CODES = 0.02
"""Part of the 8-bit results that may be a neighbouring code: what was rounded lay on the edge."""
_GIVEN_SCALE = 0.011
"""Of all elements where it is static, no power of two: the largest of seeded results saturate."""

_Results = tuple[Tensor, ...]
_Case = tuple[str, str, Callable[[], _Results], Callable[[], _Results]]
"""Op, its shape in words, the op, its specification."""


def check_ops(widths: Widths, device: torch.device) -> None:
    """Check what :func:`taut_kernels.vllm_plugin.warm_up.compile_all` compiled.

    Args:
        widths: of the model.
        device: where it runs.

    Raises:
        WrongAnswerError: an op computes something else than its specification.
    """
    for name, shape, op, specification in _cases(widths, device):
        _compare(name, shape, op, specification, device)


def check_attention(form: DecodeForm, device: torch.device) -> None:
    """Check one form of paged decode and of cache writes.

    Args:
        form: of a layer.
        device: where it runs.

    Raises:
        WrongAnswerError: likewise.
    """
    shape = (
        f"{form.heads}/{form.kv_heads} heads of {form.head_dim}, window {form.window}, "
        f"{str(form.cache_dtype).removeprefix('torch.')}"
    )
    for name, op, specification in _attention(form, device):
        _compare(name, shape, op, specification, device)


def _compare(
    name: str,
    shape: str,
    op: Callable[[], _Results],
    specification: Callable[[], _Results],
    device: torch.device,
) -> None:
    kind = Kind(f"taut::{name}", shape.replace("torch.", ""))
    if known_answer.is_known(kind):
        return
    with known_answer.timed() as clock:
        pairs = zip(op(), specification(), strict=True)
        error = max(_error(got, expected) for got, expected in pairs)
    known_answer.settle(kind, error, calls=1, ms=clock.ms, device=device)


def _error(got: Tensor, expected: Tensor) -> float:
    """Return the largest error over what is allowed; above 1 is wrong."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    result, exact = got.float(), expected.float()
    if got.dtype.itemsize == 1:
        # Neighbours differ by one (int8), or by an eighth of the smaller (e4m3).
        step = exact.abs() / 4 + 2.0**-6 if got.dtype.is_floating_point else torch.full((), 1.5)
        far = _largest((result - exact).abs() / step.to(exact.device))
        return max(far, float((result != exact).float().mean()) / _OTHER_CODES)
    row = exact.abs().amax(dim=-1, keepdim=True) if exact.dim() else exact.abs()
    allowed = _OF_RESULT * exact.abs() + _OF_ROW * row + torch.finfo(torch.float32).tiny
    return _largest((result - exact).abs() / allowed)


def _largest(ratio: Tensor) -> float:
    return float(ratio.nan_to_num(nan=float("inf")).max())


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device, dtype)


class _Outs(NamedTuple):
    """What a model's norms and activations write beside 16 bits.

    Attributes:
        dynamic: 8-bit types with a scale a row.
        static: e4m3 by a given scale as well.
    """

    dynamic: list[torch.dtype]
    static: bool


def _given_scale(device: torch.device) -> Tensor:
    return torch.full((1,), _GIVEN_SCALE, dtype=torch.float32, device=device)


def _cases(widths: Widths, device: torch.device) -> Iterator[_Case]:
    quantised = widths.quantised_on(device)
    outs = _Outs(quantised, widths.static_scale and row_quant.FP8 in quantised)
    for M in TOKENS:
        for N, dtype, weight_dtype in widths.every_norm():
            yield from _norm(M, N, dtype, weight_dtype, outs, device)
        for group, form in ((widths.activations, PLAIN), (widths.clamped, CLAMPED)):
            for N, dtype in sorted(group, key=str):
                yield from _activation(M, N, dtype, form, outs, device)
        for N, dtype, stored in sorted(widths.inputs, key=str):
            if stored in quantised:
                yield _rows(M, N, dtype, stored, device)
        for rotation in sorted(widths.rotations, key=str):
            yield _rotation(M, rotation, device)


def _norm(
    M: int,
    N: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    outs: _Outs,
    device: torch.device,
) -> Iterator[_Case]:
    x = _random(M, N, dtype=dtype, device=device)
    weight = None
    if weight_dtype is not None:
        weight = _random(N, dtype=weight_dtype, device=device)
    ops, shape = torch.ops.taut, f"{M} rows of {N} {dtype}, weight {weight_dtype}"
    for residual in (None, _random(M, N + 1, dtype=dtype, device=device)[:, :N].contiguous()):
        told = shape if residual is None else f"{shape}, residual"

        def with_residual(form: Any, *more: Any, kept: Any = residual) -> _Results:
            own = None if kept is None else kept.clone()
            y = form(x, weight, own, EPSILON, *more)
            return (*(y if isinstance(y, tuple) else (y,)), *(() if own is None else (own,)))

        yield (
            "rms_norm",
            told,
            partial(with_residual, ops.rms_norm.default),
            partial(with_residual, rms_norm.rms_norm_ref),
        )
        for stored in outs.dynamic:
            yield (
                "rms_norm_quant",
                f"{told} to {stored}",
                partial(with_residual, ops.rms_norm_quant.default, stored),
                partial(with_residual, rms_norm.rms_norm_quant_ref, stored),
            )
        if outs.static:
            scale = _given_scale(device)
            yield (
                "rms_norm_static_quant",
                told,
                partial(with_residual, ops.rms_norm_static_quant.default, scale),
                partial(with_residual, rms_norm.rms_norm_static_quant_ref, scale),
            )


def _activation(
    M: int,
    N: int,
    dtype: torch.dtype,
    form: tuple[float, float, float | None, bool],
    outs: _Outs,
    device: torch.device,
) -> Iterator[_Case]:
    x, ops = _random(M, 2 * N, dtype=dtype, device=device), torch.ops.taut
    shape = f"{M} rows of {N} {dtype}, form {form}"
    yield (
        "silu_mul",
        shape,
        lambda: (ops.silu_mul.default(x, *form),),
        lambda: (silu_mul.silu_mul_ref(x, *form),),
    )
    for stored in outs.dynamic:
        yield (
            "silu_mul_quant",
            f"{shape} to {stored}",
            partial(ops.silu_mul_quant.default, x, *form, stored),
            partial(silu_mul.silu_mul_quant_ref, x, *form, stored),
        )
    if outs.static:
        scale = _given_scale(device)
        yield (
            "silu_mul_static_quant",
            shape,
            lambda: (ops.silu_mul_static_quant.default(x, *form, scale),),
            lambda: (silu_mul.silu_mul_static_quant_ref(x, *form, scale),),
        )


def _rows(M: int, N: int, dtype: torch.dtype, stored: torch.dtype, device: torch.device) -> _Case:
    x = _random(M, N, dtype=dtype, device=device)
    return (
        "row_quant",
        f"{M} rows of {N} {dtype} to {stored}",
        lambda: torch.ops.taut.row_quant.default(x, stored),
        lambda: row_quant.quantize_rows_ref(x, stored),
    )


def _rotation(M: int, rotation: Rotation, device: torch.device) -> _Case:
    dim, kv_heads = rotation.head_dim, rotation.kv_heads
    kind: Any = {"dtype": rotation.dtype, "device": device}
    angles = torch.arange(M, device=device)[:, None] * torch.linspace(
        0.1, 1.0, rotation.rotated // 2, dtype=torch.float32, device=device
    )
    cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(rotation.dtype)
    positions = torch.arange(M, device=device).flip(0)
    q = _random(M, rotation.heads, dim, **kind)
    k = _random(M, kv_heads, dim, **kind) if kv_heads else None
    # The same op whether it writes in place or apart; in place needs copies.
    return (
        "rope_apart" if rotation.apart else "rope",
        f"{M} tokens, {rotation}",
        lambda: _rotated(rotation, positions, q, k, cache),
        lambda: rope.rope_apart_ref(positions, q, k, cache, rotation.neox),
    )


def _rotated(
    rotation: Rotation, positions: Tensor, q: Tensor, k: Tensor | None, cache: Tensor
) -> _Results:
    if rotation.apart:
        apart: _Results = torch.ops.taut.rope_apart.default(positions, q, k, cache, rotation.neox)
        return apart
    q, k = q.clone(), None if k is None else k.clone()
    torch.ops.taut.rope.default(positions, q, k, cache, rotation.neox)
    return q, q.new_empty((0,)) if k is None else k


def _attention(
    form: DecodeForm, device: torch.device
) -> Iterator[tuple[str, Callable[[], _Results], Callable[[], _Results]]]:
    dim, page = form.head_dim, form.page_size
    most = -(-max(_KEYS) // page)
    pages = most * len(_KEYS)
    # As vLLM lays them out: a key and its value are neighbours.
    both = _random(pages, page, form.kv_heads, 2 * dim, dtype=form.dtype, device=device)
    both = both.to(form.cache_dtype)
    keys, values = both[..., :dim], both[..., dim:]
    scale = (
        torch.ones((), dtype=torch.float32, device=device)
        if form.cache_dtype.itemsize == 1
        else None
    )
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    table = order.view(len(_KEYS), most).to(device, torch.int32)
    contexts = torch.tensor(_KEYS, dtype=torch.int32, device=device)
    q = _random(len(_KEYS), 1, form.heads, dim, dtype=form.dtype, device=device)
    settings = (table, contexts, scale, scale, None, max(_KEYS), form.window, dim**-0.5)
    yield (
        "paged_decode",
        lambda: (torch.ops.taut.paged_decode.default(q, keys, values, *settings),),
        lambda: (paged_decode_ref(q, keys, values, *settings),),
    )
    tokens = _random(2, len(_KEYS), form.kv_heads, dim, dtype=form.dtype, device=device)
    slots = torch.tensor([page + 1, -1, 0], device=device)

    def written(write: Any) -> _Results:
        fresh = both.clone()
        write(*tokens, fresh[..., :dim], fresh[..., dim:], slots, scale, scale)
        return (fresh,)

    yield (
        "cache_write",
        lambda: written(torch.ops.taut.cache_write.default),
        lambda: written(cache_write_ref),
    )
