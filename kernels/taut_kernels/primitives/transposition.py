"""Transpose as a ladder: ``y[…, c, r] = x[…, r, c]``, each rung a kernel that adds one idea.

Op        `taut::transpose`
Shapes    x [R, C] or [B, R, C] bf16|fp16|fp32, any strides → y [C, R] or [B, C, R], contiguous;
          sizes of 0 are allowed; B ≤ 65535
Rungs     ``v1`` rows: reads down columns · ``v2`` coalesced: reads along rows, scatters
          ``v3`` tiled: 16×16 blocks through shared memory · ``v4`` wide: 128 bytes and more on both
          sides, swizzled exchange · ``v5`` the copy engine in and out (TMA)
          (:mod:`._transpose_jit` says what each should gain; ``kernels/README.md`` what it did)
Floor     2 · B · R · C · itemsize bytes at the copy rate
Numerics  moves bits; nothing is rounded
CPU       the reference, in plain torch
Limits    forward only; v1 to v4 sm_80 and later; v5 sm_90 and later, elements of a row of x next to
          each other, and both matrices' rows (R and C elements) multiples of 16 bytes
Source    blocks through shared memory: Harris, "An Efficient Matrix Transpose in CUDA C/C++" (2013)
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from taut_kernels.launch import launcher as launching
from taut_kernels.launch.op_registration import register_op
from taut_kernels.primitives.gemm import check_copy_engine
from taut_kernels.primitives.transpose_kernel import (
    coalesced_kernel,
    rows_kernel,
    tiled_kernel,
    tma_kernel,
)
from taut_kernels.primitives.transpose_tiles import VERSIONS, TransposeTile, tile_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEFAULT = "v4"
MOST_BATCHES = 65535
"""Programs along a grid's third axis."""
_ROWS = launching.Launcher(rows_kernel)
_COALESCED = launching.Launcher(coalesced_kernel)
_TILED = launching.Launcher(tiled_kernel)


def transpose_ref(x: Tensor) -> Tensor:
    """Transpose in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [..., R, C].

    Returns:
        [..., C, R], contiguous, in memory of its own.
    """
    return x.transpose(-2, -1).clone(memory_format=torch.contiguous_format)


def launch(version: str, tile: TransposeTile, x: Tensor) -> Tensor:
    """Run a rung with a given tile; what the op does after the look-up, and what tuning calls.

    Args:
        version: one of :data:`VERSIONS`.
        tile: how to cut the work.
        x: [R, C] or [B, R, C].

    Returns:
        [C, R] or [B, C, R].

    Raises:
        ValueError: ``v5`` and a layout it does not take.
    """
    y = launching.empty((*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    batches = x if x.dim() == 3 else x[None]
    B, R, C = batches.shape
    if version == "v5":
        _launch_tma(tile, batches, y.view(B, C, R))
        return y
    blocks_r, blocks_c = -(-R // tile.block_r), -(-C // tile.block_c)
    # The first axis of a grid holds 2**31 programs, the others 65535.
    grid = (blocks_c * blocks_r, 1, B)
    launcher, named = _TILED, {"BLOCK_R": tile.block_r, "BLOCK_C": tile.block_c}
    if version == "v1":
        launcher, named, grid = _ROWS, {"BLOCK": tile.block_r}, (blocks_c, blocks_r, B)
    elif version == "v2":
        launcher, named, grid = _COALESCED, {"BLOCK": tile.block_c}, (blocks_r, blocks_c, B)
    numbers = (R, C, *batches.stride())
    launcher(
        (tile, x.dtype, numbers),
        grid,
        (batches, y),
        numbers,
        lambda: (named, {"num_warps": tile.num_warps}),
    )
    return y


def _launch_tma(tile: TransposeTile, x: Tensor, y: Tensor) -> None:
    if reason := why_not_described(x):
        raise ValueError(reason)
    B, R, C = x.shape
    block_r, block_c = tile.block_r, tile.block_c
    stride_b = x.stride(0) if B > 1 else x.stride(1) * R
    tma_kernel[(-(-C // block_c) * -(-R // block_r), 1, B)](
        TensorDescriptor(x, [B, R, C], [stride_b, x.stride(1), 1], [1, block_r, block_c]),
        TensorDescriptor(y, [B, C, R], [C * R, R, 1], [1, block_c, block_r]),
        C,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=tile.num_warps,
    )


def why_not_described(x: Tensor) -> str | None:
    """Say why ``v5``'s descriptors cannot describe x [B, R, C] or its transpose.

    Args:
        x: any strides.

    Returns:
        A reason, or None where they can.
    """
    step = launching.ALIGNMENT // x.element_size()
    B, R, C = x.shape
    if R % step or C % step:
        return f"x must have multiples of {step} rows and columns with v5, got {R} and {C}"
    stride_b = x.stride(0) if B > 1 else 0
    if x.stride(2) != 1 or x.stride(1) % step or stride_b % step or x.stride(1) < C:
        return f"x must have contiguous rows at multiples of {step} with v5, got {x.stride()}"
    if x.data_ptr() % launching.ALIGNMENT:
        return "x must start at a multiple of 16 bytes with v5"
    return None


def _launch_transpose(x: Tensor, version: str) -> Tensor:
    return launch(version, tile_of(version, x.element_size()), x)


def _transpose_cpu(x: Tensor, version: str) -> Tensor:
    del version
    return transpose_ref(x)


def _fake_transpose(x: Tensor, version: str) -> Tensor:
    del version
    return x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))


_SCHEMA = "taut::transpose(Tensor x, str version) -> Tensor"
register_op(_SCHEMA, _transpose_cpu, _launch_transpose, _fake_transpose)


def transpose(x: Tensor, *, version: str = DEFAULT) -> Tensor:
    """Transpose the last two dimensions into memory of their own.

    Args:
        x: [R, C] or [B, R, C] bf16, fp16 or fp32, any strides.
        version: the rung, ``v1`` to ``v5``.

    Returns:
        [C, R] or [B, C, R], contiguous.

    Raises:
        ValueError: a shape, dtype, layout, option or card the contract does not allow; names the
            argument.
    """
    if version not in VERSIONS:
        raise ValueError(f"version must be one of {', '.join(VERSIONS)}, got {version!r}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if x.dim() not in (2, 3):
        raise ValueError(f"x must have shape [R, C] or [B, R, C], got {tuple(x.shape)}")
    if x.dim() == 3 and x.shape[0] > MOST_BATCHES:
        raise ValueError(f"x must have at most {MOST_BATCHES} matrices, got {x.shape[0]}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("x requires grad: the op is forward only, call it under no_grad()")
    if version == "v5":
        check_copy_engine(version, x.device, "v4")
    y: Tensor = torch.ops.taut.transpose(x, version)
    return y
