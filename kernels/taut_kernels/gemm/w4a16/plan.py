"""What the kernels of `taut::w4a16_gemm` share: a layer's weight, and calls prepared once.

Shapes, types and tile determine nearly all the host does for a call. It is done once, kept as a
plan, and a call only brings its tensors: what a look-up and a cut cost the host is README,
"Measured facts". No plan holds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.launch import launcher

ELEMENT = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""How kernels name the type of activations."""


class Weight(NamedTuple):
    """A layer's operands, as in the contract of :mod:`.op`."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    arrivals: Tensor

    def rows(self, first: int, end: int) -> Weight:
        """Return the operands of some output features, multiples of 16, with all arrivals."""
        tiles = slice(first // 16, end // 16)
        return Weight(
            self.qweight[tiles],
            self.scales[tiles],
            None if self.zeros is None else self.zeros[tiles],
            None if self.bias is None else self.bias[first:end],
            self.arrivals,
        )


class Call(NamedTuple):
    """What a plan follows from: all of a call but its tensors and their addresses.

    Attributes:
        M: tokens, at least 1.
        N: output features of the layer.
        K: input features.
        group_size: G, K for one group a channel.
        dtype: of activations and result.
        device: of all operands, with its number.
        has_zeros: with zero points.
        has_bias: with a bias.
    """

    M: int
    N: int
    K: int
    group_size: int
    dtype: torch.dtype
    device: torch.device
    has_zeros: bool
    has_bias: bool

    @property
    def group(self) -> int:
        """G as kernels take it: 0 for one group a channel."""
        return 0 if self.group_size == self.K else self.group_size

    @property
    def weights(self) -> weight_format.WeightFormat:
        """The format that tiles are looked up by."""
        return weight_format.of_layer(self.group_size, self.K, has_zeros=self.has_zeros)

    @property
    def form(self) -> tuple[int, int, int, torch.dtype, bool, bool]:
        """What of a call the constants of a kernel follow from, whatever its tile."""
        return self.N, self.K, self.group_size, self.dtype, self.has_zeros, self.has_bias

    @property
    def constants(self) -> launcher.Constants:
        """What of a layer every kernel is compiled with."""
        return {
            "K": self.K,
            "GROUP_SIZE": self.group,
            "HAS_ZEROS": self.has_zeros,
            "HAS_BIAS": self.has_bias,
        }

    @property
    def device_number(self) -> int:
        """The device's number, -1 of a CPU (the Triton interpreter)."""
        return -1 if self.device.index is None else self.device.index


class Runs(Protocol):
    """A prepared call."""

    def run(self, x: Tensor, weight: Weight) -> Tensor:
        """Multiply.

        Args:
            x: [M, K], rows 16-byte aligned; this and the next of the shapes and types planned for.
            weight: the layer's operands.

        Returns:
            [M, N].
        """


class Fills(Protocol):
    """A prepared product of some or all output features."""

    def __call__(self, x: Tensor, weight: Weight, y: Tensor) -> Tensor | None:
        """Fill ``y``, which may be some columns of a larger result.

        Args:
            x: [M, K], in fragment order where the tile says so.
            weight: of the output features of ``y``.
            y: [M, rows], its rows the layer's N apart.

        Returns:
            The splits' sums where another launch is to add them.
        """


@dataclass(frozen=True, slots=True)
class Product:
    """One launch of a kernel that takes addresses.

    Attributes:
        form: of the kernel.
        constants: what the form is compiled with.
        N: output features of the layer.
        grid: programs.
        sums: fp32 numbers that programs which share an output exchange; 0 where none do.
        meet: whether they count their arrivals.
    """

    form: launcher.Form
    constants: Callable[[], tuple[launcher.Constants, launcher.Constants]]
    N: int
    grid: tuple[int, int, int]
    sums: int
    meet: bool

    def __call__(self, x: Tensor, weight: Weight, y: Tensor) -> Tensor | None:
        """As of :class:`Fills`."""
        qweight, scales, zeros, bias, arrivals = weight
        stride, partial = x.stride()[0], None
        if self.sums:
            partial = launcher.empty((self.sums,), dtype=torch.float32, device=x.device)
        self.form(
            self.grid,
            (x, qweight, scales, zeros, bias, y, partial, arrivals if self.meet else None),
            (x.shape[0], self.N, stride),
            self.constants,
            (stride,),
        )
        return partial


@dataclass(frozen=True, slots=True)
class OneProduct:
    """A call that is one product.

    Attributes:
        product: of all output features.
        call: what it was planned for.
        before: what is done to the activations first, if anything.
    """

    product: Fills
    call: Call
    before: Callable[[Tensor], Tensor] | None = None

    def run(self, x: Tensor, weight: Weight) -> Tensor:
        """As of :class:`Runs`."""
        M, N, _, _, dtype, device, _, _ = self.call
        y = launcher.empty((M, N), dtype=dtype, device=device)
        if self.before is not None:
            x = self.before(x)
        self.product(x, weight, y)
        return y


def plan_rows(
    kernel: launcher.Launcher,
    tile: DecodeTile | RingTile,
    warp_tiles: tuple[int, int],
    call: Call,
    cut: Callable[[], tuple[int, ...]],
) -> OneProduct:
    """Prepare a call of a kernel whose programs take rows of weights and all tokens.

    Args:
        kernel: launches it.
        tile: how to cut the rows.
        warp_tiles: a warp's of 16 rows, and of 8 tokens.
        call: what to prepare for.
        cut: makes the kernel's constant ``CUT``.
    """
    row_tiles, token_tiles = warp_tiles
    rows = 16 * row_tiles * tile.row_warps
    programs = -(-call.N // rows)

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        pdl = launcher.is_hopper(call.device)
        named = {"CUT": cut(), "PDL": pdl, "ELEMENT": ELEMENT[call.dtype]} | call.constants
        options = {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        return named, options | launcher.PDL_OPTIONS[pdl]

    split = tile.split_k > 1
    product = Product(
        kernel.form((tile, token_tiles, call.form), call.device_number),
        constants,
        call.N,
        (programs, tile.split_k, 1),
        programs * tile.split_k * token_tiles * 8 * rows if split else 0,
        split,
    )
    return OneProduct(product, call)
