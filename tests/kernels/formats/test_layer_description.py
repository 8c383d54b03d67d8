"""What a checkpoint says of its layers: read as written, refused where it says something else."""

from __future__ import annotations

from typing import Any

import pytest

from taut_kernels.formats import layer_description as told

LAYERS: dict[str, told.Layer] = {
    "a": told.LowRank(12),
    "b": told.LowRank(4, told.PackedBase(64, symmetric=False)),
    "c": told.Codebook(8, 32, None),
    "d": told.LowRank(3, interpolative=True),
}


def test_what_is_written_is_read() -> None:
    entry = told.write(LAYERS)
    assert entry["quant_method"] == "taut"
    assert told.read(entry) == LAYERS
    assert [told.Codebook(entries, None, 8).bits for entries in (4, 8, 16)] == [2, 3, 4]


REFUSED: dict[str, tuple[Any, str]] = {
    "another version": ({"format_version": 2}, "format_version is '2', this taut reads 1"),
    "no layers": ({"layers": {}}, "layers: expected an object"),
    "a layer that is a word": ({"layers": {"a": "x"}}, "layers.a: expected an object"),
    "another kind": ({"layers": {"a": {"kind": "hashed"}}}, "layers.a.kind: 'hashed' is not"),
    "no rank": ({"layers": {"a": {"kind": "low_rank"}}}, "layers.a.rank: is missing"),
    "rank nought": ({"layers": {"a": {"kind": "low_rank", "rank": 0}}}, "layers.a.rank: expected"),
    "rank true": ({"layers": {"a": {"kind": "low_rank", "rank": True}}}, "a.rank: expected"),
    "a key too many": (
        {"layers": {"a": {"kind": "low_rank", "rank": 1, "alpha": 2}}},
        "layers.a.alpha: is not known",
    ),
    "a form that is a word": (
        {"layers": {"a": {"kind": "low_rank", "rank": 1, "interpolative": "yes"}}},
        "layers.a.interpolative: expected true or false",
    ),
    "odd entries": (
        {"layers": {"a": {"kind": "codebook", "entries": 6, "group_size": None, "rows": None}}},
        "layers.a.entries: expected one of 4, 8, 16",
    ),
    "a base of other bits": (
        {
            "layers": {
                "a": {
                    "kind": "low_rank",
                    "rank": 1,
                    "base": {"num_bits": 3, "group_size": 64, "symmetric": True},
                }
            }
        },
        "layers.a.base.num_bits: expected 4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(told.LayerDescriptionError, match=message):
        told.read({**told.write(LAYERS), **change})
