"""Launches attention's backward kernels of sm_90, and says what they take."""

from __future__ import annotations

from typing import Any

import torch

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


def serves(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: Settings
) -> bool:
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
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    heads, heads_k, dim = q.shape[-2], k.shape[-2], q.shape[-1]
    block_d, sequences = padded_dim(dim), count_sequences(q, settings.cu_q)

    def run(
        launcher: launching.Launcher,
        written: tuple[torch.Tensor, ...],
        rows: tuple[int, int],
        heads_of_tiles: int,
        longest: int,
        cut: dict[str, Any],
    ) -> None:
        constants = {"HEAD_GROUP": heads // heads_k, "D": dim, "BLOCK_D": block_d}
        constants |= {"CAUSAL": settings.causal, **cut}
        blocks = -(-longest // TILE)
        tiles = heads_of_tiles * blocks * sequences
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
                heads_of_tiles,
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

    cut = {"BLOCK_M": BLOCK, "STAGES": KEY_STAGES}
    run(_key_gradients, (dk, dv), (BLOCK, TILE // 2), heads_k, settings.max_k, cut)
    cut = {"BLOCK_N": BLOCK, "STAGES": QUERY_STAGES}
    run(_query_gradients, (dq,), (TILE // 2, BLOCK), heads, settings.max_q, cut)
    return dq, dk, dv
