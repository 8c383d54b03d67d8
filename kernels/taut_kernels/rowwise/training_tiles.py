"""How the training kernels are cut up: rules.

Softmax's, and the norms' backward at 2048 to 8192 and at 16384 columns, were measured on an H200
(2026-11-22, ``kernels/tuning/tune_fused_backward.py`` finds such tiles); the others were reasoned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from taut_kernels.launch import launcher
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tile_options import next_power_of_2
from taut_kernels.rowwise.tiles import FusedTile, check_cut

RESIDENT_LIMIT = 32768
"""Columns of the longest row that forward kernels, and RMSNorm's backward, take in one walk."""
LAYER_NORM_BACKWARD_LIMIT = 16384
"""Likewise of LayerNorm's backward, which has the sums of two gradients to hold."""


@dataclass(frozen=True, slots=True)
class TrainingTile:
    """One way to cut the work of a training kernel.

    Args:
        rows: rows (RoPE: tokens) a program or step, a power of two.
        block: columns (RoPE: heads) a step, a power of two.
        num_warps: warps a program: 1, 2, 4, 8, 16 or 32.
        stages: steps of loads in flight; 1 leaves the order to the compiler.
        per_sm: programs a multiprocessor of a persistent grid; 0: one program for each piece.
        again: compute or read a second time what would not fit into registers.
        keep: ask L2 to keep what is read twice, rather than what is written.
        registers: most a thread may have; 0 leaves it to ptxas.

    Raises:
        ValueError: a field is out of its range.
    """

    rows: int
    block: int
    num_warps: int
    stages: int = 1
    per_sm: int = 0
    again: bool = False
    keep: bool = False
    registers: int = 0

    def __str__(self) -> str:
        marks = "".join(
            f"/{letter}{value}"
            for letter, value in (("s", self.stages), ("p", self.per_sm), ("r", self.registers))
            if value > (letter == "s")
        )
        flags = f"{'/again' if self.again else ''}{'/keep' if self.keep else ''}"
        return f"{self.rows}x{self.block}/{self.num_warps}w{marks}{flags}"

    def __post_init__(self) -> None:
        check_cut(self.rows, self.block, self.num_warps, self.registers)
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages must lie in 1..8, got {self.stages}")
        if not 0 <= self.per_sm <= 32:
            raise ValueError(f"per_sm must lie in 0..32, got {self.per_sm}")

    def options(self) -> dict[str, Any]:
        """Return what the launchers pass to the compiler; products and sums may be fused."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "enable_fp_fusion": True}
        if self.registers:
            options["maxnreg"] = self.registers
        return options


def programs(tile: TrainingTile, pieces: int, device: torch.device) -> int:
    """Return the size of a persistent grid: what the card holds at once, at most ``pieces``.

    Args:
        tile: of the call.
        pieces: how many there are to share out.
        device: where the operands are.
    """
    return max(1, min(tile.per_sm * launcher.multiprocessors(device), pieces))


def _up_to_4096(N: int, M: int, elements: int) -> TrainingTile:
    """Several short rows a program, once there are enough of them to fill the card; else one."""
    width = max(8, next_power_of_2(N))
    if width > 1024:
        return TrainingTile(1, 1024, 4)
    rows = max(1, min(elements // width, 16, 1 << max(0, (M // 264).bit_length() - 1)))
    return TrainingTile(rows, width, 4 if rows * width >= 1024 else 1)


def softmax_limit(element_size: int) -> int:
    """Return the columns of the longest row the softmax holds in registers, backward half of them.

    Args:
        element_size: bytes.
    """
    return 65536 if element_size == 2 else 32768


@lru_cache(maxsize=4096)
def softmax(N: int, M: int, element_size: int) -> TrainingTile:
    """Cut the forward softmax.

    8192 bf16 rows, H200, 2026-11-22, a throw-away sweep, µs (tile before; its rings): 16384 columns
    130.9 (134.1; 141.7), 32768 columns 261.1 (322.4; 286.6): 16 warps hold 64 columns a thread in
    the 16 bits they came in, and a multiprocessor holds two such programs. fp16 was not timed.

    Args:
        N: columns.
        M: rows.
        element_size: bytes.
    """
    if N <= 4096:
        return _up_to_4096(N, M, 2048)
    halves = element_size == 2
    if halves and 8192 < N <= 16384:
        return TrainingTile(1, 4096, 8)
    if N <= 16384:
        return TrainingTile(1, 2048, 8)
    if N <= 32768 and not halves:
        return TrainingTile(1, 4096, 16)
    if softmax_limit(element_size) >= N:
        return TrainingTile(1, 8192, 16, again=True)
    return TrainingTile(1, 8192, 32, stages=4, keep=True)


@lru_cache(maxsize=4096)
def softmax_backward(N: int, M: int, element_size: int) -> TrainingTile:
    """Cut the backward softmax, which holds two operands.

    8192 bf16 rows of 16384 columns, in the same sweep: 185.6 µs (tile before 194.2). 16 warps
    are as fast, but two programs a multiprocessor under Triton 3.6 alone: 3.9 takes 82 registers.

    Arguments as of :func:`softmax`.
    """
    if N <= 4096:
        return _up_to_4096(N, M, 1024)
    if N <= 8192:
        return TrainingTile(1, 2048, 8)
    if N <= 16384 and element_size == 2:
        return TrainingTile(1, 2048, 8, again=True)
    if N <= 16384:
        return TrainingTile(1, 4096, 16)
    if softmax_limit(element_size) >= 2 * N:
        return TrainingTile(1, 8192, 16, again=True)
    return TrainingTile(1, 8192, 16, stages=4, keep=True)


@lru_cache(maxsize=4096)
def norm_forward(gpu: str | None, op: str, N: int, M: int) -> FusedTile:
    """Cut the norms' forward pass: as serving's, whose tiles were measured.

    Args:
        gpu: card name, None outside CUDA.
        op: ``rms_norm``, ``add_rms_norm`` or ``layer_norm``.
        N: columns.
        M: rows.
    """
    if op != "layer_norm":
        return tiles_fused.lookup(gpu, op, N, M)
    # LayerNorm holds its differences as well.
    if 16384 < N <= RESIDENT_LIMIT:
        return FusedTile(1, 8192, 32)
    if 8192 < N <= RESIDENT_LIMIT:
        return FusedTile(1, 4096, 16)
    return tiles_fused.rule("rms_norm", N, M)


@lru_cache(maxsize=4096)
def norm_backward(N: int, M: int, *, centred: bool) -> TrainingTile:
    """Cut the norms' backward pass in one walk.

    ``per_sm`` is what the registers of a multiprocessor hold: more programs would wait for the
    first to end. Rows in flight (``stages``) hide the row's sums. RMSNorm, 8192 rows, H200, µs with
    1 (none), 2, 3, 4: 63.8, 66.8, 54.3, 56.4 at 4096 columns, 132, 153, 100, 109 at 8192.

    Args:
        N: columns.
        M: rows.
        centred: LayerNorm, which has the sums of two gradients to hold; else RMSNorm.
    """
    width = max(8, next_power_of_2(N))
    if width <= 1024:
        rows = max(1, 1024 // width)
        return TrainingTile(min(rows, 16), width, 4, per_sm=6)
    if width <= 2048:
        return TrainingTile(1, width, 4, stages=3, per_sm=4)
    if width <= 4096:
        return TrainingTile(1, width, 8, stages=3, per_sm=2)
    if width <= 8192:
        return TrainingTile(1, 8192, 16, stages=3, per_sm=1)
    if width <= 16384 and not centred:
        return TrainingTile(1, 4096, 16, per_sm=1, again=True)
    return TrainingTile(1, 2048, 32, per_sm=1, again=True)


@dataclass(frozen=True, slots=True)
class NormRingTile:
    """One way to cut the norms' backward pass with rows in shared memory.

    Args:
        num_warps: warps a program, one program a multiprocessor: 8, 16 or 32.
        late: last chunks of a row (8 columns a thread) asked for only when the next row begins.
        held: the weight stays in registers, not in shared memory.

    Raises:
        ValueError: a field is out of its range.
    """

    num_warps: int
    late: int
    held: bool

    def __str__(self) -> str:
        held = "/held" if self.held else ""
        return f"ring/{self.num_warps}w/l{self.late}{held}"

    def __post_init__(self) -> None:
        if self.num_warps not in (8, 16, 32):
            raise ValueError(f"num_warps must be 8, 16 or 32, got {self.num_warps}")
        if not 0 <= self.late <= 16:
            raise ValueError(f"late must lie in 0..16, got {self.late}")

    def holds_two_rows(self, N: int, tensors: int, weight_bytes: int) -> bool:
        """Say whether the row under way and the next fit into shared memory.

        Args:
            N: columns.
            tensors: of 16 bits that come through the ring.
            weight_bytes: of one element of the weight; 0 without one.
        """
        width = 256 * self.num_warps
        columns = -(-N // width) * width
        shared_weight = 0 if self.held else columns * weight_bytes
        return 2 * (2 * columns * tensors) + shared_weight <= _RING_BYTES


_RING_BYTES = 226 * 1024
"""Shared memory of a program on compute capability 9.0, less what a row's sums take."""
NORM_RING_COLUMNS = (8192, 16384)
"""Rows of the norms' backward pass beyond the first and up to the last go through shared memory."""
NORM_RING_ROWS = 8
"""Rows a multiprocessor from which filling and emptying the ring costs less than it brings."""


@lru_cache(maxsize=4096)
def norm_ring(N: int, rows: int, *, centred: bool, added: bool) -> NormRingTile | None:
    """Cut the norms' backward pass with rows in shared memory; None where another kernel is faster.

    A sweep of 10 or 11 rings, NVIDIA H200, torch 2.11, Triton 3.6, 2026-11-22, 16384 columns,
    µs beside `norm_backward`'s tile: 8192 rows (62 a multiprocessor) RMSNorm 198.2 (293.5), with a
    residual 262.2 (322.6), LayerNorm 210.4 (299.9). 512 rows (3.9 a multiprocessor), of two rings:
    24.8 (26.5), 29.2 (29.1), 34.9 (33.2). Lines through both meet at 4 and 5 rows a multiprocessor.

    Args:
        N: columns.
        rows: whole rows a multiprocessor.
        centred: LayerNorm; else RMSNorm.
        added: a gradient is added to dx.
    """
    shortest, longest = NORM_RING_COLUMNS
    if not shortest < N <= longest or N % 16:
        return None
    few = rows < NORM_RING_ROWS
    if centred:
        return None if few else NormRingTile(16, 2, held=False)
    if added:
        return None if few else NormRingTile(16, 2, held=True)
    return NormRingTile(16, 2, held=True) if few else NormRingTile(32, 1, held=False)


NORM_LONG = TrainingTile(1, 4096, 8)
"""The norms' passes by rows where rows are longer than `RESIDENT_LIMIT`."""
NORM_COLUMNS = TrainingTile(4, 1024, 8, per_sm=4)
"""Their sums of dw and db by columns."""
COLUMN_SUMS = TrainingTile(128, 32, 8)
"""The sum of the programs' parts of dw and db."""


@lru_cache(maxsize=4096)
def swiglu(N: int, M: int) -> TrainingTile:
    """Cut the gated activation, forward and backward: pointwise.

    Args:
        N: columns of the output.
        M: rows.
    """
    return TrainingTile(1, min(1024, max(32, next_power_of_2(N))), 4)


@lru_cache(maxsize=4096)
def rope(heads: int, T: int) -> TrainingTile:
    """Cut the rotation, as serving's rule does.

    Args:
        heads: of q and k together.
        T: tokens.
    """
    return TrainingTile(1, min(16, next_power_of_2(heads)), 2 if T >= 64 else 1)
