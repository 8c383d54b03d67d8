"""The op behind an 8-bit layer in vLLM: our kernel or CUTLASS, by the number of tokens of the call.

vLLM compiles a layer once for every number of tokens, so the choice has to be made inside an op. It
follows the measured table: where ours was the slower one, CUTLASS runs on the same tensors. That is
not silent: :func:`why_partly` says it at loading, for the log, the record and `taut doctor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.scaled_mm.dispatch import launch
from taut_kernels.launch import launcher
from taut_kernels.launch.autocast import without_autocast
from taut_kernels.launch.op_registration import register_op

OP = "scaled_mm_by_tokens"


@dataclass(slots=True)
class Surroundings:
    """What stands between this process's products; said before its layers are loaded.

    Attributes:
        in_layer: norms, activations and quantisation are ours, in vLLM's graph, and start early
            (`tiles_scaled_mm`).
    """

    in_layer: bool = False


SURROUNDINGS = Surroundings()


def table_op(dtype: torch.dtype) -> str:
    """Return the table's name of the product of a weight type."""
    return w8a8.OP if dtype is torch.int8 else fp8.OP


def _reference(x: Tensor, weight_t: Tensor, *rest: Any) -> Tensor:
    x_scale, weight_scale, azp_adj, azp, *others = rest[:-1]
    scales = (x_scale, weight_scale)
    if x.dtype is torch.int8:
        return w8a8.w8a8_gemm_ref(x, weight_t.t(), *scales, azp_adj, azp, *others)
    return fp8.fp8_gemm_ref(x, weight_t.t(), *scales, *others)


def _cutlass(x: Tensor, weight_t: Tensor, *rest: Any) -> Tensor:
    x_scale, weight_scale, azp_adj, azp, bias, out_dtype = rest
    y = torch.empty((x.shape[0], weight_t.shape[1]), dtype=out_dtype, device=x.device)
    if azp_adj is None:
        torch.ops._C.cutlass_scaled_mm(y, x, weight_t, x_scale, weight_scale, bias)
    else:
        torch.ops._C.cutlass_scaled_mm_azp(
            y, x, weight_t, x_scale, weight_scale, azp_adj, azp, bias
        )
    return y


def _dispatch(x: Tensor, weight_t: Tensor, *rest: Any) -> Tensor:
    (M, K), N = x.shape, weight_t.shape[1]
    gpu = launcher.gpu_name(x.device)
    bucket = tiles_scaled_mm.lookup(table_op(x.dtype), gpu, N, K, M, in_layer=SURROUNDINGS.in_layer)
    *vectors, _arrivals, out_dtype, always = rest
    if always or bucket.wins:
        return launch(bucket.tile, x, weight_t.t(), *rest[:-1])
    return _cutlass(x, weight_t, *vectors, out_dtype)


def _fake(x: Tensor, weight_t: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight_t.shape[1]), dtype=rest[-2])


_SCHEMA = (
    f"taut::{OP}(Tensor x, Tensor weight_t, Tensor x_scale, Tensor weight_scale, Tensor? "
    "azp_adj, Tensor? azp, Tensor? bias, Tensor arrivals, ScalarType out_dtype, bool always) -> "
    "Tensor"
)
register_op(_SCHEMA, without_autocast(_reference), _dispatch, _fake)


def warm_up_tokens(dtype: torch.dtype, gpu: str | None, N: int, K: int) -> tuple[int, ...]:
    """Return one number of tokens for each bucket, for compiling every tile before serving starts.

    Args:
        dtype: of the weights.
        gpu: card name.
        N: output features.
        K: input features.
    """
    return tiles_scaled_mm.tokens_of_buckets(table_op(dtype), gpu, N, K)


def why_not_at_all(dtype: torch.dtype, gpu: str | None, N: int, K: int, mode: str) -> str | None:
    """Say why a layer stays with vLLM at every number of tokens.

    Args:
        dtype: of the weights.
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        mode: value of ``TAUT_KERNELS``.

    Returns:
        A reason, or None where ours runs at some numbers of tokens.
    """
    reason = w8a8.why_not_supported(K) if dtype is torch.int8 else fp8.why_not_supported(K)
    if reason is None and N % 16:
        # CUTLASS, which the same weights must suit, pads or leaves such layers to others.
        reason = f"output features must be a multiple of 16, got {N}"
    if reason or mode == "require":
        return reason
    buckets = tiles_scaled_mm.buckets(table_op(dtype), gpu, N, K, in_layer=SURROUNDINGS.in_layer)
    if any(bucket.wins for bucket in buckets):
        return None
    return tiles_scaled_mm.why_not_preferred(
        table_op(dtype), gpu, N, K, in_layer=SURROUNDINGS.in_layer
    )


def why_partly(
    dtype: torch.dtype, gpu: str | None, N: int, K: int, mode: str, *, in_layer: bool | None = None
) -> str | None:
    """Say at which numbers of tokens CUTLASS runs in a layer of ours; None where it never does.

    Arguments as of :func:`why_not_at_all`, and ``in_layer`` as in :class:`Surroundings`; None for
    this process's.
    """
    if mode == "require":
        return None
    within = SURROUNDINGS.in_layer if in_layer is None else in_layer
    return tiles_scaled_mm.why_not_preferred(table_op(dtype), gpu, N, K, in_layer=within)
