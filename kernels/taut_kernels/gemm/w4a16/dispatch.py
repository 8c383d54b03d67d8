"""Runs `taut::w4a16_gemm` with a given tile: the op's way behind its look-up, and the tuners'."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from taut_kernels.gemm.w4a16 import decode as w4a16_decode
from taut_kernels.gemm.w4a16 import decode_ring as w4a16_decode_ring
from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import dense as w4a16_dense
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import pair as w4a16_wgmma_waves
from taut_kernels.gemm.w4a16 import portable as w4a16_wgmma
from taut_kernels.gemm.w4a16 import ring as w4a16_wgmma_ring
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.lookup import WgmmaTile
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.plan import Call, Runs, Weight
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.launch import launcher

Tile = DecodeTile | RingTile | WgmmaTile | WgmmaRingTile | WavesTile
"""How a kernel cuts the work; its type names the regime."""


def tile_of(choice: tiles_wgmma.Choice, call: Call) -> Tile | Literal["dense"]:
    """Return the tile of a choice: a table's own, or the one the decode kernel has for a call.

    Args:
        choice: of :mod:`.lookup`.
        call: what to run.
    """
    if choice == "dense" or not isinstance(choice, str):
        return choice
    if call.M > tiles_decode.TOKENS:
        return tiles_decode.plain_rule(call.N, call.K, call.M)
    gpu, hopper = launcher.gpu_name(call.device), launcher.is_hopper(call.device)
    return tiles_decode.lookup(gpu, call.N, call.K, call.weights, hopper=hopper)


def chosen(call: Call) -> Tile | Literal["dense"]:
    """Return the tile that the tables or their rules choose for a call.

    Args:
        call: what to run.
    """
    choice: tiles_wgmma.Choice = "decode"
    if call.M > tiles_decode.TOKENS:
        gpu, hopper = launcher.gpu_name(call.device), launcher.is_hopper(call.device)
        bucket = tiles_wgmma.bucket_of(call.M)
        choice = tiles_wgmma.lookup(gpu, call.N, call.K, bucket, call.weights, hopper=hopper)
    return tile_of(choice, call)


def plan(tile: Tile | Literal["dense"], call: Call) -> Runs:
    """Prepare a call.

    Args:
        tile: how to cut the work, or ``"dense"``.
        call: what to prepare for.

    Raises:
        ValueError: the tile is not one for this call; says why.
    """
    match tile:
        case DecodeTile():
            return w4a16_decode.plan(tile, call)
        case RingTile():
            return w4a16_decode_ring.plan(tile, call)
        case WgmmaTile():
            return w4a16_wgmma.plan(tile, call)
        case WgmmaRingTile():
            return w4a16_wgmma_ring.plan(tile, call)
        case WavesTile():
            return w4a16_wgmma_waves.plan(tile, call)
        case "dense":
            return w4a16_dense.Plan(call)


def launch(tile: Tile | Literal["dense"], x: Tensor, *given: Any) -> Tensor:
    """Multiply once; the op keeps its plans.

    Args:
        tile: how to cut the work, or ``"dense"``.
        x: [M, K], M ≥ 1, rows 16-byte aligned.
        given: the layer's operands as in the contract of :mod:`.op`, then the size of groups.

    Returns:
        [M, N].

    Raises:
        ValueError: the tile is not one for this call; says why.
    """
    weight, group_size = Weight(*given[:-1]), given[-1]
    has_zeros, has_bias = weight.zeros is not None, weight.bias is not None
    (M, K), N = x.shape, 16 * weight.qweight.shape[0]
    call = Call(M, N, K, group_size, x.dtype, x.device, has_zeros, has_bias)
    return plan(tile, call).run(x, weight)
