"""Launches attention's forward kernel of sm_90, which TMA feeds, and says what it takes."""

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taut_kernels.attention.arguments import padded_dim
from taut_kernels.attention.prefill.call import (
    Settings,
    count_sequences,
    length_of,
    lse_strides,
    strides_of,
)
from taut_kernels.attention.prefill.hopper_kernel import attention_hopper_kernel
from taut_kernels.attention.tile import HopperTile
from taut_kernels.launch import launcher
from taut_kernels.launch.descriptors import Describe

BLOCK_M = 128
"""Queries of a tile, two groups of 64."""
MIN_QUERIES = 512
"""Of the longest sequence: below, programs of 64 queries, of which there are more, are as fast."""
DESCRIPTOR_LAYOUT = gl.NVMMASharedLayout(128, 16, 4)
"""Of every block in shared memory: what `wgmma` reads without bank conflicts."""
_MAX_STRIDE = 2**40
"""Bytes (CUDA driver API, `cuTensorMapEncodeTiled`)."""
_LOG2_E = 1.4426950408889634

_forward = launcher.Launcher(attention_hopper_kernel)


def tma_reads(x: Tensor) -> bool:
    """Say whether TMA can read a tensor: aligned to 16 bytes, and no axis expanded.

    Args:
        x: of any strides, but the elements of a head next to each other.
    """
    size = x.element_size()
    steps = [
        step * size for step, count in zip(x.stride()[:-1], x.shape, strict=False) if count > 1
    ]
    return x.data_ptr() % launcher.ALIGNMENT == 0 and all(
        0 < step < _MAX_STRIDE and step % launcher.ALIGNMENT == 0 for step in steps
    )


def serves(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> bool:
    """Say whether this kernel computes a call: long ones on sm_90 without a window that TMA reads.

    Args:
        q: queries.
        k: keys.
        v: values.
        settings: of the op.
    """
    return (
        launcher.is_hopper(q.device)
        and settings.max_q >= MIN_QUERIES
        and not settings.window
        and min(q.numel(), k.numel(), count_sequences(q, settings.cu_q)) > 0
        and all(tma_reads(x) for x in (q, k, v))
    )


@cache
def _blocks(rows: int, block_d: int) -> Describe:
    return Describe([1, rows, 1, block_d], DESCRIPTOR_LAYOUT)


def descriptor(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Describe [B, T, H, D], or [T, H, D] as one sequence, in blocks of a head's tokens.

    Args:
        x: what :func:`tma_reads`.
        rows: tokens of a block.
        block_d: the padded head dimension; beyond D a block is 0.
    """
    shape, steps = list(x.shape), list(x.stride())
    if x.dim() == 3:
        shape, steps = [1, *shape], [0, *steps]
    # The stride of an axis of one element means nothing, but has to be a valid one.
    steps[:3] = [x.shape[-1] if n == 1 else step for n, step in zip(shape[:3], steps, strict=False)]
    return _blocks(rows, block_d)(x, shape, steps)


def launch(
    tile: HopperTile, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, settings: Settings
) -> None:
    """Run the kernel on a call that it :func:`serves`.

    Args:
        tile: how to cut the work.
        q: queries.
        k: keys.
        v: values.
        o: written; contiguous.
        lse: written.
        settings: of the op.
    """
    heads, dim = q.shape[-2], q.shape[-1]
    block_d, blocks = padded_dim(dim), -(-settings.max_q // BLOCK_M)
    sequences = count_sequences(q, settings.cu_q)
    tiles = heads * blocks * sequences
    programs = min(tiles, launcher.multiprocessors(q.device))
    constants = {
        "HEAD_GROUP": heads // k.shape[-2],
        "D": dim,
        "BLOCK_D": block_d,
        "CAUSAL": settings.causal,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
    }
    o_strides = strides_of(o)
    _forward(
        (q.dtype, settings.cu_q is None, tuple(constants.values())),
        (programs, 1, 1),
        (o, lse, settings.cu_q, settings.cu_k),
        (
            descriptor(q, BLOCK_M // 2, block_d),
            descriptor(k, tile.block_n, block_d),
            descriptor(v, tile.block_n, block_d),
            length_of(q),
            length_of(k),
            heads,
            blocks,
            sequences,
            -(-tiles // programs),
            *o_strides,
            *lse_strides(lse),
            settings.scale * _LOG2_E,
        ),
        lambda: (constants, {"num_warps": 4}),
        o_strides,
    )
