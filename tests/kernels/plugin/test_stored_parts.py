"""Tensors of joined layers that differ in shape: each part in its place, nothing missing or odd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taut_kernels.vllm_plugin.stored_parts import PartedTensor, whole_rows

SHAPES: list[tuple[int, ...]] = [(4, 3), (2, 1), (2, 2)]
NAMES = ["a.q_proj", "a.k_proj", "a.v_proj"]


def layer_with(names: list[str], shapes: list[tuple[int, ...]]) -> tuple[Any, PartedTensor]:
    layer = torch.nn.Module()
    return layer, PartedTensor(layer, "weight_u", names, shapes, torch.bfloat16)


def load(layer: Any, tensor: torch.Tensor, *shard: Any) -> None:
    """As vLLM does: by the parameter's own loader."""
    layer.weight_u.weight_loader(layer.weight_u, tensor, *shard)


@pytest.mark.parametrize("ids", [("q", "k", "v"), (0, 1, 2)])
def test_parts_of_other_shapes_lie_side_by_side(ids: tuple[Any, ...]) -> None:
    layer, parted = layer_with(NAMES, SHAPES)
    values = [torch.full(shape, float(at + 1)) for at, shape in enumerate(SHAPES)]
    for at in (2, 0, 1):
        load(layer, values[at], ids[at])
    found = parted.of_parts(layer)
    assert [part.shape for part in found] == [torch.Size(shape) for shape in SHAPES]
    assert all(torch.equal(part.float(), value) for part, value in zip(found, values, strict=True))
    assert sum(part.numel() for part in found) == layer.weight_u.numel()


def test_a_layer_of_one_part_needs_no_number() -> None:
    layer, parted = layer_with(["a.o_proj"], [(2, 3)])
    load(layer, torch.arange(6.0).view(2, 3))
    assert parted.of_parts(layer)[0].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("tensor", "shard", "message"),
    [
        (torch.zeros(4, 2), ("q",), r"a\.q_proj\.weight_u: .*\(4, 2\) is not the \(4, 3\) that"),
        (torch.zeros(4, 3, dtype=torch.int32), ("q",), r"a\.q_proj\.weight_u: torch\.int32"),
        (torch.zeros(4, 3), (), r"a\.q_proj\.weight_u: comes as one, described as parts"),
        (torch.zeros(4, 3), (3,), r"weight_u: part 3 is not described"),
        (torch.zeros(4, 3), ("index_q",), r"weight_u: part 'index_q' is not described"),
    ],
)
def test_what_is_not_described_is_not_loaded(
    tensor: torch.Tensor, shard: tuple[Any, ...], message: str
) -> None:
    layer, _ = layer_with(NAMES, SHAPES)
    with pytest.raises(ValueError, match=message):
        load(layer, tensor, *shard)


def test_a_part_that_never_came_is_named() -> None:
    layer, parted = layer_with(NAMES, SHAPES)
    load(layer, torch.zeros(4, 3), "q")
    load(layer, torch.zeros(2, 2), "v")
    with pytest.raises(ValueError, match=r"a\.k_proj\.weight_u: is missing from the checkpoint"):
        parted.of_parts(layer)


def test_a_layer_that_is_cut_among_devices_is_refused() -> None:
    assert whole_rows(["a"], (8, 4), ([8], 4)) == [8]
    assert whole_rows(["a", "b"], (8, 4), ([6, 2], 4)) == [6, 2]
    # Joined on disk already: one part, whatever vLLM makes of it.
    assert whole_rows(["a"], (8, 4), ([6, 2], 4)) == [8]
    with pytest.raises(ValueError, match="a: quant_method taut is served on one device"):
        whole_rows(["a"], (8, 4), ([4], 4))
