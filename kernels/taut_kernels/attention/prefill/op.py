"""Attention of many queries: softmax(s · q kᵀ) v, causal or not, forward and backward.

Maths     o = Σₙ pₙ vₙ, pₙ = exp(s · q·kₙ − lse), lse = log Σₙ exp(s · q·kₙ) over the keys n that a
          query sees: all; with `causal` those up to its own place; with `window` the last
          `window` of these. The last query of a sequence stands at its last key.
Ops       `taut::attention` → o, lse; `taut::attention_backward` → dq, dk, dv
Shapes    a batch: q [B, Tq, Hq, D], k and v [B, Tk, Hk, D], lse [B, Hq, Tq]
          packed:  q [Σ Tq, Hq, D], k and v [Σ Tk, Hk, D], lse [Hq, Σ Tq] with the bounds
          cu_seqlens_q and cu_seqlens_k [B + 1] int32, on the device, rising from 0
          Hq a multiple of Hk (grouped-query attention); D 64, 96, 128 or 256; any strides, but
          the D elements next to each other; bf16 or fp16. o, dq, dk, dv contiguous, as q and k.
Numerics  scores, softmax and all sums in fp32; p rounded to the dtype of v before the product with
          v, its gradient to that of q and k. A query that sees no key: o 0, lse −∞. No atomic
          additions: the same bits from run to run. lse has no gradient.
GPU       plain Triton; on sm_90, from 512 queries, without a window, of what TMA can read, Gluon:
          :mod:`.hopper`, and of heads of 96 or 128
          :mod:`.hopper_backward`
CPU       the references, in plain torch: the specification
Limits    `window` needs `causal`; sm_80 and later; no dropout, no bias, no second derivative.
          D = 96 is computed as 128. What the bounds of packed sequences say is checked on the CPU
          only (on a GPU that would wait for it): there, bounds beyond the tokens read beyond them.
Source    arXiv:2307.08691 (FlashAttention-2), algorithms 1 and 2; bottom-right causal alignment as
          flash-attn ≥ 2.1 has it. The code is ours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import check, check_bounds_of_packed, padded_dim
from taut_kernels.attention.prefill import hopper as prefill_hopper
from taut_kernels.attention.prefill import hopper_backward as backward_hopper
from taut_kernels.attention.prefill.call import Settings as Settings
from taut_kernels.attention.prefill.call import count_sequences, length_of, lse_strides, strides_of
from taut_kernels.attention.prefill.portable_backward_kernel import (
    key_gradients_kernel,
    query_gradients_kernel,
    row_delta_kernel,
)
from taut_kernels.attention.prefill.portable_kernel import attention_kernel
from taut_kernels.attention.reference import attention_backward_ref, attention_ref
from taut_kernels.attention.tile import AttentionTile
from taut_kernels.launch import launcher as launching
from taut_kernels.launch.autocast import without_autocast
from taut_kernels.launch.op_registration import register_op

_forward = launching.Launcher(attention_kernel)
_row_delta = launching.Launcher(row_delta_kernel)
_key_gradients = launching.Launcher(key_gradients_kernel)
_query_gradients = launching.Launcher(query_gradients_kernel)
_LOG2_E = 1.4426950408889634


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    if q.dim() == 3:
        return q.shape[1], q.shape[0]
    return q.shape[0], q.shape[2], q.shape[1]


def launch_forward(
    tile: AttentionTile, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, settings: Settings
) -> None:
    """Run the forward kernel with a given tile; what the op does, and what tuning calls.

    Args:
        tile: how to cut the work.
        q: queries.
        k: keys.
        v: values.
        o: written.
        lse: written.
        settings: of the op.
    """
    if not q.numel():
        return
    cu_q, cu_k, max_q, _, causal, window, scale = settings
    heads, dim = q.shape[-2], q.shape[-1]
    group = heads // k.shape[-2]
    strides = (*strides_of(q), *strides_of(k), *strides_of(v), *strides_of(o))
    constants = {
        "GROUP": group,
        "D": dim,
        "BLOCK_D": padded_dim(dim),
        "CAUSAL": causal,
        "WINDOW": window > 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    _forward(
        (q.dtype, cu_q is None, cu_k is None, tuple(constants.values()), tile),
        (-(-max_q // tile.block_m), heads, count_sequences(q, cu_q)),
        (q, k, v, o, lse, cu_q, cu_k),
        (length_of(q), length_of(k), window, *strides, *lse_strides(lse), scale * _LOG2_E),
        lambda: (constants, tile.options()),
        strides,
    )


def row_delta(do: Tensor, q: Tensor, o: Tensor, lse: Tensor, settings: Settings) -> Tensor:
    """Return Σ o · do of every row, fp32, as ``lse``; see :func:`launch_backward`.

    Args:
        do: gradient of ``o``.
        q: queries.
        o: what the forward pass returned.
        lse: likewise.
        settings: of the op.
    """
    delta = launching.empty(lse.shape, dtype=torch.float32, device=lse.device)
    if not q.numel():
        return delta
    strides, dim = (*strides_of(o), *strides_of(do)), q.shape[-1]
    block = attention_tiles.ROW_DELTA_BLOCK
    constants = {"D": dim, "BLOCK_D": padded_dim(dim), "BLOCK_M": block}
    _row_delta(
        (q.dtype, settings.cu_q is None, tuple(constants.values())),
        (-(-settings.max_q // block), q.shape[-2], count_sequences(q, settings.cu_q)),
        (o, do, delta, settings.cu_q),
        (length_of(q), *strides, *lse_strides(lse)),
        lambda: (constants, {"num_warps": 4}),
        strides,
    )
    return delta


def launch_backward(
    key_tile: AttentionTile,
    query_tile: AttentionTile,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels with given tiles and return dq, dk, dv; see :func:`launch_forward`.

    Args:
        key_tile: for the gradients of keys and values.
        query_tile: for the gradient of queries.
        do: gradient of ``o``.
        q: queries.
        k: keys.
        v: values.
        o: what the forward pass returned.
        lse: likewise.
        settings: of the op.
    """
    cu_q, cu_k, max_q, max_k, causal, window, scale = settings
    dq, dk, dv = (launching.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    heads, heads_k = q.shape[-2], k.shape[-2]
    sequences, rows = count_sequences(q, cu_q), lse_strides(lse)
    delta = row_delta(do, q, o, lse, settings)
    inputs = (*strides_of(q), *strides_of(k), *strides_of(v), *strides_of(do))
    shape = {"GROUP": heads // heads_k, "D": q.shape[-1], "BLOCK_D": padded_dim(q.shape[-1])}
    small = q.numel() * q.element_size() <= attention_tiles.HEADS_FIRST_BYTES
    shape["HEADS_FIRST"] = small and launching.is_hopper(q.device)

    def run(
        launcher: launching.Launcher,
        tile: AttentionTile,
        grid: tuple[int, int, int],
        written: tuple[Tensor, ...],
    ) -> None:
        cut = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        constants = {**shape, "CAUSAL": causal, "WINDOW": window > 0, **cut}
        strides = (*inputs, *strides_of(written[0]))
        launcher(
            (q.dtype, cu_q is None, cu_k is None, tuple(constants.values()), tile),
            grid,
            (q, k, v, do, *written, lse, delta, cu_q, cu_k),
            (length_of(q), length_of(k), window, *strides, *rows, scale),
            lambda: (constants, tile.options()),
            strides,
        )

    if k.numel():
        grid = (-(-max_k // key_tile.block_n), heads_k, sequences)
        run(_key_gradients, key_tile, grid, (dk, dv))
    if q.numel():
        grid = (-(-max_q // query_tile.block_m), heads, sequences)
        run(_query_gradients, query_tile, grid, (dq,))
    return dq, dk, dv


def _launch_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    settings = Settings(*arguments)
    o = launching.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = launching.empty(_lse_shape(q), dtype=torch.float32, device=q.device)
    gpu, dim = launching.gpu_name(q.device), padded_dim(q.shape[-1])
    if prefill_hopper.serves(q, k, v, settings):
        tile = attention_tiles.forward_hopper(gpu, dim)
        prefill_hopper.launch(tile, q, k, v, o, lse, settings)
    else:
        plain = attention_tiles.forward(
            dim, settings.window > 0, launching.is_hopper(q.device), gpu
        )
        launch_forward(plain, q, k, v, o, lse, settings)
    return o, lse


def _launch_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(*arguments)
    # A gradient expanded from a scalar has no elements next to each other.
    do = do if do.stride(-1) == 1 else do.contiguous()
    lse = lse.contiguous()  # delta is made without gaps and read at the strides of lse
    if backward_hopper.serves(do, q, k, v, settings):
        delta = row_delta(do, q, o, lse, settings)
        return backward_hopper.launch(do, q, k, v, lse, delta, settings)
    tiles = attention_tiles.backward(launching.gpu_name(q.device), padded_dim(q.shape[-1]))
    return launch_backward(*tiles, do, q, k, v, o, lse, settings)


def _attention_cpu(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    check_bounds_of_packed(q, k, *arguments[:4])
    return attention_ref(q, k, v, *arguments)


def _fake_attention(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(_lse_shape(q), dtype=torch.float32)


def _fake_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.settings = settings
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, cu_q, cu_k = ctx.saved_tensors
    saved = (q, k, v, o, lse, cu_q, cu_k)
    gradients = torch.ops.taut.attention_backward(do, *saved, *ctx.settings)
    return (*gradients, *[None] * 7)


def _no_second_derivative(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("taut::attention_backward has no derivative: attention can be derived once")


# SymInt: torch.compile would else make one graph for each length.
_SETTINGS = (
    "Tensor? cu_q, Tensor? cu_k, SymInt max_q, SymInt max_k, bool causal, int window, float scale"
)
_ATTENTION = f"taut::attention(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)"
register_op(_ATTENTION, without_autocast(_attention_cpu), _launch_attention, _fake_attention)
torch.library.register_autograd("taut::attention", _backward, setup_context=_setup)

_ATTENTION_BACKWARD = (
    "taut::attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)
register_op(
    _ATTENTION_BACKWARD,
    without_autocast(attention_backward_ref),
    _launch_attention_backward,
    _fake_attention_backward,
)
torch.library.register_autograd("taut::attention_backward", _no_second_derivative)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend.

    Args:
        q: [B, Tq, Hq, D], or packed [Σ Tq, Hq, D].
        k: [B, Tk, Hk, D], or packed [Σ Tk, Hk, D].
        v: as ``k``.
        causal: hide the keys behind a query.
        window: keys a query sees at most, its own place included; needs ``causal``.
        scale: factor of the scores, 1/√D if None.
        cu_seqlens_q: [B + 1] int32, where packed sequences begin and the last one ends.
        cu_seqlens_k: likewise for the keys; ``cu_seqlens_q`` if None.
        max_seqlen_q: queries of the longest packed sequence; not read from the device.
        max_seqlen_k: likewise for the keys; ``max_seqlen_q`` if None.

    Returns:
        The output, as ``q``, contiguous, differentiable; and lse fp32, [B, Hq, Tq] or [Hq, Σ Tq].

    Raises:
        ValueError: a shape, dtype, device, layout or option the contract does not allow; names
            the argument.
    """
    if cu_seqlens_q is not None and cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window must be at least 1 and needs causal, got {window}, {causal=}")
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    if not (0 < scale < math.inf):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    longest_q = q.shape[1] if max_seqlen_q is None else max_seqlen_q
    longest_k = k.shape[1] if max_seqlen_k is None else max_seqlen_k
    o, lse = torch.ops.taut.attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, causal, window or 0, scale
    )
    return o, lse
