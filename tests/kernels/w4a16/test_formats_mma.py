"""The GPU layout of 4-bit weights: inverts, puts nibbles where it says, refuses the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulator.ptx import run_ptx

from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16.int4_jit import shifted, unpack_zeros

DTYPES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(("N", "K", "G"), [(16, 64, 32), (48, 576, 64), (80, 1152, 128)])
def test_layout_inverts(N: int, K: int, G: int) -> None:
    generator = torch.Generator().manual_seed(N)
    values = torch.randint(-8, 8, (N, K), generator=generator).to(torch.int8)
    packed = formats_mma.repack_weight(formats.pack_weight(values), K)
    assert packed.shape == (N // 16, K // 64, 32, 4)
    assert torch.equal(formats_mma.unpack_weight(packed).to(torch.int8) - 8, values)
    zeros = torch.randint(-8, 8, (N, K // G), generator=generator).to(torch.int8)
    words = formats_mma.repack_zero_point(formats.pack_zero_point(zeros), N)
    assert words.shape == (N // 16, -(-K // G // 4), 8)
    assert words.is_contiguous()
    stored = formats_mma.stored_zero_points(words, K // G)
    assert torch.equal(stored.to(torch.int8) - 8, zeros)
    for dtype in DTYPES:
        scale = torch.randn(N, K // G, generator=generator).to(dtype)
        pairs = formats_mma.repack_scale(scale)
        assert torch.equal(formats_mma.unpair_rows(pairs, K // G), scale)


def test_layout_puts_a_nibble_where_its_docstring_says() -> None:
    values = torch.full((32, 128), -8, dtype=torch.int8)
    # tile 1, r = 1, g = 3; chunk 1, h = 1, t = 2, i = 0, j = 1, b = 1.
    values[16 + 8 + 3, 64 + 32 + 16 + 0 + 2 + 1] = 5
    packed = formats_mma.repack_weight(formats.pack_weight(values), 128)
    expected = torch.zeros_like(packed)
    expected[1, 1, 4 * 3 + 2, 1] = (13 << (4 * (4 + 2 + 1))) - 2**32  # int32 wraps
    assert torch.equal(packed, expected)


def test_layout_puts_a_zero_point_where_its_docstring_says() -> None:
    zeros = torch.full((32, 6), -8, dtype=torch.int8)
    zeros[16 + 8 + 3, 5] = 7  # tile 1, r = 1, g = 3; quad 1, i = 1
    zeros[16 + 8 + 3, 3] = 4  # quad 0, i = 3
    words = formats_mma.repack_zero_point(formats.pack_zero_point(zeros), 32)
    expected = torch.zeros(2, 2, 8, dtype=torch.int32)
    expected[1, 1, 3] = 15 << (4 + 16)
    expected[1, 0, 3] = (12 << (12 + 16)) - 2**32  # int32 wraps
    assert torch.equal(words, expected)


@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.bfloat16, 128), (torch.float16, 1024)], ids=["bf16", "f16"]
)
def test_a_word_of_zeros_becomes_offsets_of_both_rows(dtype: torch.dtype, bias: int) -> None:
    zeros = torch.arange(16 * 8).reshape(16, 8).remainder(15).to(torch.int8) - 8
    zeros[3, 2] = 7
    words = formats_mma.repack_zero_point(formats.pack_zero_point(zeros), 16)
    element = "bf16" if dtype is torch.bfloat16 else "f16"
    for group in range(8):
        word = words[0, group // 4].numpy().view(np.uint32)
        registers = {"$0": word}
        text = [*shifted(0, group % 4), *unpack_zeros(element)]
        run_ptx("\n".join(text), registers)
        for row in (0, 1):
            halves = registers[f"offset{row}"].view(np.int16).copy()
            expected = -(bias + zeros[8 * row : 8 * row + 8, group].float() + 8)
            found = torch.from_numpy(halves).view(dtype).float().view(8, 2)
            assert torch.equal(found, expected[:, None].expand(8, 2))


def test_layout_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        formats_mma.repack_weight(torch.zeros(24, 8, dtype=torch.int32), 64)
    with pytest.raises(ValueError, match="multiple of 64"):
        formats_mma.repack_weight(torch.zeros(16, 4, dtype=torch.int32), 32)
    with pytest.raises(ValueError, match="weight_scale must be 2-D"):
        formats_mma.repack_scale(torch.zeros(16, 2))
    with pytest.raises(ValueError, match="weight_zero_point"):
        formats_mma.repack_zero_point(torch.zeros(3, 1, dtype=torch.int32), 16)
