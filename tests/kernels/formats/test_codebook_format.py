"""Codebook weights: their packing, and what they stand for, against plain Python."""

from __future__ import annotations

import pytest
import torch

from taut_kernels.formats import codebook


def random_codes(bits: int, n: int = 3, k: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_row_is_its_codes_written_as_one_little_endian_number(bits: int) -> None:
    codes = random_codes(bits)
    packed = codebook.pack_codes(codes, bits)
    for row, stored in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << bits * place for place, code in enumerate(row))
        assert bytes(stored) == number.to_bytes(16 * bits // 8, "little")


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_unpacking_gives_the_codes_back(bits: int) -> None:
    codes = random_codes(bits, 5, 64)
    assert torch.equal(codebook.unpack_codes(codebook.pack_codes(codes, bits), bits), codes)


def test_rows_that_are_not_whole_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="12 codes of 3 bits are not whole bytes"):
        codebook.pack_codes(torch.zeros(2, 12, dtype=torch.uint8), 3)


def test_a_weight_is_an_entry_of_its_rows_book_times_the_scale_of_its_group() -> None:
    codes = random_codes(2, 4, 6)
    scale = torch.arange(1.0, 9.0).view(4, 2)
    book = torch.tensor([[-3.0, -1.0, 0.0, 2.0], [5.0, 6.0, 7.0, 8.0]])
    expected = [
        [float(book[n // 2, int(codes[n, k])] * scale[n, k // 3]) for k in range(6)]
        for n in range(4)
    ]
    assert codebook.dequantise(codes, scale, book).tolist() == expected
