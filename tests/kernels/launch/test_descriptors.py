"""Descriptors made without Triton's checks are the ones its constructor makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taut_kernels.launch.descriptors import Describe

LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
BLOCK = [32, 64]


def fields(descriptor: TensorDescriptor) -> dict[str, Any]:
    found = dict(vars(descriptor))
    found["base"] = id(found["base"])
    return found


def test_every_descriptor_is_what_triton_would_make() -> None:
    describe = Describe(BLOCK, LAYOUT)
    for rows, columns, step in ((64, 128, 128), (3, 256, 512), (1, 64, 64)):
        x = torch.zeros(rows, step, dtype=torch.bfloat16)
        given = (x, [rows, columns], [step, 1])
        made, expected = describe(*given), TensorDescriptor(*given, BLOCK, LAYOUT)
        assert type(made) is TensorDescriptor
        assert fields(made) == fields(expected)


def test_descriptors_do_not_share_what_is_their_operands_own() -> None:
    describe = Describe(BLOCK, LAYOUT)
    a, b = (torch.zeros(8, width, dtype=torch.float16) for width in (64, 128))
    first, second = describe(a, [8, 64], [64, 1]), describe(b, [8, 128], [128, 1])
    third = describe(a, [4, 64], [64, 1])
    assert first.base is a and second.base is b and third.base is a
    assert [each.shape for each in (first, second, third)] == [[8, 64], [8, 128], [4, 64]]
    assert second.strides == [128, 1]


def test_no_operand_is_kept_alive() -> None:
    describe = Describe(BLOCK, LAYOUT)
    describe(torch.zeros(8, 64, dtype=torch.float16), [8, 64], [64, 1])
    assert describe._checked is not None
    assert not any(isinstance(kept, torch.Tensor) for kept in describe._checked.values())


def test_the_first_operand_is_checked() -> None:
    x = torch.zeros(8, 64, dtype=torch.float16)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        Describe(BLOCK, LAYOUT)(x, [8, 64], [63, 1])
