"""Layouts: round trips, bytes fixed for ever, and agreement with compressed-tensors' own packer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from taut_kernels.gemm.w4a16 import disk as formats

SIZES = [(1, 8), (3, 5), (16, 32), (7, 128), (24, 200), (5, 576)]


def _int4(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (rows, columns), generator=generator).to(torch.int8)


def test_weight_packed_golden_bytes() -> None:
    values = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]])
    packed = formats.pack_weight(values.to(torch.int8))
    assert packed.numpy().tobytes().hex() == "1032547698badcfe"


def test_weight_packed_pads_the_last_word_with_zero_nibbles() -> None:
    packed = formats.pack_weight(torch.full((1, 9), 7, dtype=torch.int8))
    assert packed.numpy().tobytes().hex() == "ffffffff0f000000"


def test_zero_point_golden_bytes() -> None:
    values = torch.tensor([[n - 8, 7 - n] for n in range(10)]).clamp(-8, 7).to(torch.int8)
    packed = formats.pack_zero_point(values)
    assert packed.shape == (2, 2)
    assert packed.is_contiguous()
    assert packed.numpy().tobytes().hex() == "10325476efcdab899800000067000000"


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_pack_weight_equals_compressed_tensors(rows: int, columns: int) -> None:
    packer = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = _int4(rows, columns)
    theirs = packer.pack_to_int32(values, 4)
    assert torch.equal(formats.pack_weight(values), theirs)
    assert torch.equal(packer.unpack_from_int32(theirs, 4, values.shape), values)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_pack_zero_point_equals_compressed_tensors(rows: int, columns: int) -> None:
    packer = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = _int4(rows, columns)
    theirs = packer.pack_to_int32(values, 4, packed_dim=0).contiguous()
    assert torch.equal(formats.pack_zero_point(values), theirs)


@pytest.mark.parametrize("symmetric", [True, False])
def test_whole_layer_equals_compressed_tensors_compressor(symmetric: bool) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    weights = quantization.QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=32
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    N, K = 24, 64
    values, zeros = _int4(N, K), _int4(N, K // 32, seed=1)
    scale = torch.full((N, K // 32), 0.25)
    offset = torch.zeros_like(zeros) if symmetric else zeros
    dense = (values - offset.repeat_interleave(32, dim=1)).float() * 0.25
    state = {"weight": dense, "weight_scale": scale, "weight_zero_point": offset}
    theirs = packed.PackedQuantizationCompressor.compress(state, scheme)
    assert torch.equal(theirs["weight_packed"], formats.pack_weight(values))
    assert ("weight_zero_point" in theirs) is not symmetric
    if not symmetric:
        assert torch.equal(theirs["weight_zero_point"], formats.pack_zero_point(zeros))


def test_unpack_inverts_pack_for_every_pair_of_nibbles() -> None:
    every = torch.arange(-8, 8, dtype=torch.int8)
    pairs = torch.cartesian_prod(every, every)  # [256, 2]
    assert torch.equal(formats.unpack_weight(formats.pack_weight(pairs), 2), pairs)
    assert torch.equal(formats.unpack_zero_point(formats.pack_zero_point(pairs), 256), pairs)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 300), seed=st.integers(0, 2**31 - 1))
def test_every_layout_round_trips(rows: int, columns: int, seed: int) -> None:
    values = _int4(rows, columns, seed)
    packed = formats.pack_weight(values)
    assert torch.equal(formats.unpack_weight(packed, columns), values)
    assert torch.equal(formats.unpack_zero_point(formats.pack_zero_point(values), rows), values)


@pytest.mark.parametrize(
    ("K", "group_size", "expected"),
    [(576, 64, 64), (576, 576, 64), (512, 512, 256), (96, 96, 32), (80, 80, None), (64, 16, None)],
)
def test_cpu_group_size(K: int, group_size: int, expected: int | None) -> None:
    assert formats.cpu_group_size(K, group_size) == expected


def test_cpu_scales_repeat_a_channel_scale_over_its_groups() -> None:
    packed = formats.pack_weight(_int4(16, 96))
    scale = torch.arange(1, 17).to(torch.bfloat16).unsqueeze(1)
    zero = formats.pack_zero_point(torch.full((16, 1), -2, dtype=torch.int8))
    _, pairs = formats.repack_for_cpu(packed, scale, zero, 96)
    assert pairs.shape == (3, 16, 2)
    for group in pairs:
        assert torch.equal(group[:, 0], scale[:, 0])
        assert torch.equal(group[:, 1], 2 * scale[:, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formats.pack_weight(torch.zeros(2, 8)), "2-D int8"),
        (lambda: formats.pack_weight(torch.zeros(8, dtype=torch.int8)), "2-D int8"),
        (lambda: formats.pack_weight(torch.full((1, 8), 8, dtype=torch.int8)), "-8..7"),
        (lambda: formats.pack_zero_point(torch.full((1, 8), -9, dtype=torch.int8)), "-8..7"),
        (lambda: formats.unpack_weight(torch.zeros(2, 3, dtype=torch.int32), 32), "4 words"),
        (lambda: formats.unpack_weight(torch.zeros(2, 4, dtype=torch.int64), 32), "int32"),
        (lambda: formats.unpack_zero_point(torch.zeros(1, 2, dtype=torch.int32), 9), "2 words"),
        (
            lambda: formats.repack_for_cpu(
                torch.zeros(8, 4, dtype=torch.int32), torch.ones(8, 1), None, 32
            ),
            "no CPU layout for N=8",
        ),
    ],
)
def test_rejects_bad_inputs(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
