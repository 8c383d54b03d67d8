"""The op behind an FP8 layer with blocks of weights: our kernel or vLLM's, by a call's tokens.

As :mod:`.scaled_mm_op`, which says why the choice has to be made inside an
op. Which of vLLM's kernels stands behind it (``rest``) is the layer's own choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm.dispatch import launch_block
from taut_kernels.launch import launcher
from taut_kernels.launch.autocast import without_autocast
from taut_kernels.launch.op_registration import register_op

OP = "fp8_block_by_tokens"
DEEP_GEMM, DEEP_GEMM_UE8M0, CUTLASS = RESTS = ("DeepGEMM", "DeepGEMM ue8m0", "CUTLASS")
"""vLLM's kernels that ours was measured against; the second with scales that are powers of two."""


def _reference(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    x_scale, weight_scale, arrivals, out_dtype, *_ = rest
    return fp8.fp8_gemm_ref(x, weight, x_scale, weight_scale, None, arrivals, out_dtype)


def _vllm(
    rest: str,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    if rest == CUTLASS:
        torch.ops._C.cutlass_scaled_mm(y, x, weight.t(), x_scale, weight_scale.t(), None)
    else:
        torch.ops.vllm.fp8_gemm_nt_op(x, x_scale, weight, weight_scale, y, rest == DEEP_GEMM_UE8M0)
    return y


def _dispatch(x: Tensor, weight: Tensor, *given: Any) -> Tensor:
    (M, K), N = x.shape, weight.shape[0]
    x_scale, weight_scale, arrivals, out_dtype, always, rest = given
    bucket = tiles_scaled_mm.lookup(fp8.BLOCK_OP, launcher.gpu_name(x.device), N, K, M)
    if always or bucket.wins:
        return launch_block(
            bucket.tile, x, weight, x_scale, weight_scale, None, arrivals, out_dtype
        )
    return _vllm(rest, x, weight, x_scale, weight_scale, out_dtype)


def _fake(x: Tensor, weight: Tensor, *given: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=given[-3])


_SCHEMA = (
    f"taut::{OP}(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor arrivals, "
    "ScalarType out_dtype, bool always, str rest) -> Tensor"
)
register_op(_SCHEMA, without_autocast(_reference), _dispatch, _fake)


def warm_up_tokens(gpu: str | None, N: int, K: int, always: bool) -> tuple[int, ...]:
    """Return one number of tokens for each bucket of ours, to compile its tile before serving.

    vLLM warms its own kernels up; DeepGEMM compiles for seconds at most numbers of tokens.

    Args:
        gpu: card name.
        N: output features.
        K: input features.
        always: ours runs in every bucket.
    """
    tokens = tiles_scaled_mm.tokens_of_buckets(fp8.BLOCK_OP, gpu, N, K)
    found = ((M, tiles_scaled_mm.lookup(fp8.BLOCK_OP, gpu, N, K, M)) for M in tokens)
    return tuple(M for M, bucket in found if always or bucket.wins)


def why_not_at_all(gpu: str | None, N: int, K: int, mode: str) -> str | None:
    """Say why a layer stays with vLLM at every number of tokens, None where ours runs at some.

    Arguments as of :func:`.scaled_mm_op.why_not_at_all`.
    """
    reason = fp8.why_not_supported(K)
    if reason is None and N % 16:
        reason = f"output features must be a multiple of 16, got {N}"
    if reason or mode == "require":
        return reason
    if any(bucket.wins for bucket in tiles_scaled_mm.buckets(fp8.BLOCK_OP, gpu, N, K)):
        return None
    return why_partly(gpu, N, K, mode)


def why_partly(gpu: str | None, N: int, K: int, mode: str) -> str | None:
    """Say at which numbers of tokens vLLM's kernel runs in a layer of ours; None for none.

    Arguments as of :func:`why_not_at_all`.
    """
    if mode == "require":
        return None
    return tiles_scaled_mm.why_not_preferred(fp8.BLOCK_OP, gpu, N, K)
