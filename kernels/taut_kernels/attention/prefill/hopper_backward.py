"""Launches attention's backward kernels of sm_90, and says what they take."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from taut_kernels.attention.arguments import padded_dim
from taut_kernels.attention.prefill import hopper as prefill_hopper
from taut_kernels.attention.prefill.call import (
    Settings,
    count_sequences,
    length_of,
    lse_strides,
    strides_of,
)
from taut_kernels.attention.prefill.hopper import descriptor
from taut_kernels.attention.prefill.hopper_keys_kernel import key_gradients_hopper_kernel
from taut_kernels.attention.prefill.hopper_queries_kernel import query_gradients_hopper_kernel
from taut_kernels.launch import launcher as launching

TILE = 128
"""Keys, or queries, of a tile: two groups of 64."""
BLOCK = 64
"""Queries, or keys, of a step."""
KEY_STAGES = 2
QUERY_STAGES = 3
"""Of the gradient of queries: the keys of a step are read once more in the next one."""

_key_gradients = launching.Launcher(key_gradients_hopper_kernel)
_query_gradients = launching.Launcher(query_gradients_hopper_kernel)


def serves(do: Tensor, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> bool:
    """Say whether these kernels compute a call: what the forward one takes, heads of 96 or 128.

    Args:
        do: gradient of the output.
        q: queries.
        k: keys.
        v: values.
        settings: of the op.
    """
    return (
        padded_dim(q.shape[-1]) == 128
        and settings.max_k > 0
        and prefill_hopper.serves(q, k, v, settings)
        and prefill_hopper.tma_reads(do)
    )


def launch(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Run both kernels on a call that they :func:`serves`.

    Args:
        do: gradient of the output.
        q: queries.
        k: keys.
        v: values.
        lse: of the forward pass.
        delta: Σ o · do, as ``lse``.
        settings: of the op.

    Returns:
        dq, dk, dv.
    """
    dq, dk, dv = (launching.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, k))
    operands = (q, k, v, do, lse, delta)
    cut = {"BLOCK_M": BLOCK, "STAGES": KEY_STAGES}
    _run(_key_gradients, operands, (dk, dv), (BLOCK, TILE // 2), settings.max_k, settings, cut)
    cut = {"BLOCK_N": BLOCK, "STAGES": QUERY_STAGES}
    _run(_query_gradients, operands, (dq,), (TILE // 2, BLOCK), settings.max_q, settings, cut)
    return dq, dk, dv


def _run(
    launcher: launching.Launcher,
    operands: tuple[Tensor, ...],
    written: tuple[Tensor, ...],
    rows: tuple[int, int],
    longest: int,
    settings: Settings,
    cut: dict[str, Any],
) -> None:
    """Launch one of the kernels.

    Args:
        launcher: of the kernel.
        operands: q, k, v, do, lse, delta.
        written: the gradients it computes, over whose heads and tokens programs walk.
        rows: of a block of queries and of one of keys.
        longest: tokens that a sequence of ``written`` has at most.
        settings: of the op.
        cut: constants of this kernel alone.
    """
    q, k, v, do, lse, delta = operands
    dim, block_d, heads = q.shape[-1], padded_dim(q.shape[-1]), written[0].shape[-2]
    constants = {"HEAD_GROUP": q.shape[-2] // k.shape[-2], "D": dim, "BLOCK_D": block_d}
    constants |= {"CAUSAL": settings.causal, **cut}
    blocks, sequences = -(-longest // TILE), count_sequences(q, settings.cu_q)
    tiles = heads * blocks * sequences
    programs = min(tiles, launching.multiprocessors(q.device))
    strides = strides_of(written[0])
    launcher(
        (q.dtype, settings.cu_q is None, tuple(constants.values())),
        (programs, 1, 1),
        (*written, lse, delta, settings.cu_q, settings.cu_k),
        (
            descriptor(q, rows[0], block_d),
            descriptor(k, rows[1], block_d),
            descriptor(v, rows[1], block_d),
            descriptor(do, rows[0], block_d),
            length_of(q),
            length_of(k),
            heads,
            blocks,
            sequences,
            -(-tiles // programs),
            *strides,
            *lse_strides(lse),
            settings.scale,
        ),
        lambda: (constants, {"num_warps": 4}),
        strides,
    )
