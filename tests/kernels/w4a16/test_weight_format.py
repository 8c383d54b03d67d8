"""Which formats of W4A16 weights share tiles, and what their rows look like."""

from __future__ import annotations

import pytest
import torch

from taut_bench import w4a16_format
from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.gemm.w4a16.plan import Call
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat


@pytest.mark.parametrize(
    ("group_size", "symmetric", "with_zeros"),
    [
        (32, "g32", "g32-zp"),
        (64, "g64", "g64-zp"),
        (128, "g128", "g128-zp"),
        (-1, "g128", "g128-zp"),
        (0, "g128", "g128-zp"),
        (4096, "g128", "g128-zp"),
    ],
)
def test_a_layers_format(group_size: int, symmetric: str, with_zeros: str) -> None:
    for has_zeros, name in ((False, symmetric), (True, with_zeros)):
        found = weight_format.of_layer(group_size, 4096, has_zeros=has_zeros)
        assert found == name
        assert found.zero_points is has_zeros
        assert found.group_size == (group_size if group_size in (32, 64) else 128)
        form = (torch.float16, torch.device("cpu"), has_zeros, False)
        assert Call(1, 16, 4096, group_size, *form).weights is found
        assert w4a16_format.Format(group_size, has_zeros, "fp16").weights is found


def test_one_group_a_channel_of_few_features_is_no_small_group() -> None:
    assert weight_format.of_layer(64, 64, has_zeros=False) is DEFAULT


def test_a_row_names_its_format_unless_it_is_the_default() -> None:
    for known in WeightFormat:
        row = weight_format.as_field(known)
        assert bool(row) == (known is not DEFAULT)
        assert weight_format.of_row(row) is known


def test_a_format_in_words() -> None:
    words = weight_format.in_words
    assert words(32, zero_points=True) == "groups of 32 with zero points"
    assert words(64, zero_points=False) == "symmetric groups of 64"
    assert words(-1, zero_points=False) == "one symmetric group a channel"
    assert words(-1, zero_points=True) == "one group a channel with zero points"


def test_every_format_ends_at_the_default_and_begins_with_itself() -> None:
    for known in WeightFormat:
        assert known.tried[0] is known
        assert known.tried[-1] is DEFAULT
        assert len(set(known.tried)) == len(known.tried)
        assert {near.group_size for near in known.tried[:-1]} <= {known.group_size}
