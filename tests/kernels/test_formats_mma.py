"""The GPU layout of 4-bit weights: inverts, puts nibbles where it says, refuses the rest."""

from __future__ import annotations

import pytest
import torch

from taut_kernels import formats, formats_mma

DTYPES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(("N", "K", "G"), [(16, 64, 32), (48, 576, 64), (80, 1152, 128)])
def test_layout_inverts(N: int, K: int, G: int) -> None:
    generator = torch.Generator().manual_seed(N)
    values = torch.randint(-8, 8, (N, K), generator=generator).to(torch.int8)
    packed = formats_mma.repack_weight(formats.pack_weight(values), K)
    assert packed.shape == (N // 16, K // 64, 32, 4)
    assert torch.equal(formats_mma.unpack_weight(packed).to(torch.int8) - 8, values)
    zeros = torch.randint(-8, 8, (N, K // G), generator=generator).to(torch.int8)
    for dtype in DTYPES:
        scale = torch.randn(N, K // G, generator=generator).to(dtype)
        pairs = formats_mma.repack_scale(scale)
        assert torch.equal(formats_mma.unpair_rows(pairs, K // G), scale)
        offsets = formats_mma.repack_zero_point(formats.pack_zero_point(zeros), N, dtype)
        stored = formats_mma.stored_zero_points(offsets, K // G)
        assert torch.equal(stored.to(torch.int8) - 8, zeros)


def test_layout_puts_a_nibble_where_its_docstring_says() -> None:
    values = torch.full((32, 128), -8, dtype=torch.int8)
    # tile 1, r = 1, g = 3; chunk 1, h = 1, t = 2, i = 0, j = 1, b = 1.
    values[16 + 8 + 3, 64 + 32 + 16 + 0 + 2 + 1] = 5
    packed = formats_mma.repack_weight(formats.pack_weight(values), 128)
    expected = torch.zeros_like(packed)
    expected[1, 1, 4 * 3 + 2, 1] = (13 << (4 * (4 + 2 + 1))) - 2**32  # int32 wraps
    assert torch.equal(packed, expected)


def test_layout_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        formats_mma.repack_weight(torch.zeros(24, 8, dtype=torch.int32), 64)
    with pytest.raises(ValueError, match="multiple of 64"):
        formats_mma.repack_weight(torch.zeros(16, 4, dtype=torch.int32), 32)
    with pytest.raises(ValueError, match="weight_scale must be 2-D"):
        formats_mma.repack_scale(torch.zeros(16, 2))
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16"):
        formats_mma.repack_zero_point(torch.zeros(2, 1, dtype=torch.int32), 16, torch.float32)
