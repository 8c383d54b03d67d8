"""Rows of a packed table against compressed-tensors' own packing."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from taut_kernels.formats.token_table import dequantised_rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_rows_are_what_was_packed(bits, groups):
    torch.manual_seed(bits + groups)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (7, 96), dtype=torch.int8)
    codes[0, :2] = torch.tensor([-half, half - 1])
    scale = torch.rand(7, groups).to(torch.bfloat16)
    expected = codes.double().view(7, groups, -1) * scale.double().unsqueeze(-1)
    packed = pack_to_int32(codes, num_bits=bits)
    got = dequantised_rows(packed, scale, bits)
    assert torch.equal(got.double(), expected.view(7, 96))
    picked = torch.tensor([5, 0, 5])
    assert torch.equal(dequantised_rows(packed[picked], scale[picked], bits), got[picked])
