"""Tiles of attention: the tables that ship, the rule behind them, and tables that are wrong."""

from __future__ import annotations

import pytest

from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.tile import AttentionTile, DecodeTile, HopperTile

ROW = (
    '{"kernel": "decode", "D": 128, "bits": 8, "load": "small", "us": 1.0, "tile": '
    '{"keys": 32, "num_warps": 4, "num_stages": 2, "per_sm": 2, "min_keys": 512}}'
)
TEXT = '{"gpu": "card", "source": "here", "rows": [%s]}'


def test_the_tables_that_ship_are_read_and_used() -> None:
    (gpu, table), *_ = attention_tiles.tables().items()
    assert table.gpu == gpu
    assert table.choices
    for (kernel, dim, size, load), tile in table.choices.items():
        if kernel == "forward":
            assert attention_tiles.forward(dim, False, True, gpu) == tile
        elif kernel == "forward_hopper":
            assert attention_tiles.forward_hopper(gpu, dim) == tile
        elif kernel == "decode":
            assert attention_tiles.decode(gpu, dim, size, load) == tile
        else:
            assert tile in attention_tiles.backward(gpu, dim)


def test_a_card_without_a_table_takes_the_rule() -> None:
    for dim in (64, 128, 256):
        assert attention_tiles.forward(dim, False, True, "no such card") == attention_tiles.forward(
            dim, False, True
        )
        assert (
            attention_tiles.forward_hopper("no such card", dim)
            == attention_tiles.FORWARD_HOPPER[dim]
        )
        keys, queries = attention_tiles.backward("no such card", dim)
        assert (keys, queries) == (
            attention_tiles.KEY_GRADIENTS[dim],
            attention_tiles.QUERY_GRADIENTS[dim],
        )
        for size in (1, 2):
            for load in attention_tiles.LOADS:
                tile = attention_tiles.decode("no such card", dim, size, load)
                assert tile == attention_tiles.decode(None, dim, size, load)


def test_a_row_is_read() -> None:
    tiles = attention_tiles.parse(TEXT % ROW, "a.json").choices
    assert tiles == {("decode", 128, 1, "small"): DecodeTile(32, 4, 2, 2, 512)}
    forward = (
        ROW.replace('"decode"', '"forward"').replace('"small"', '"large"').replace(": 8,", ": 16,")
    )
    cut = '{"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}}'
    forward = forward[: forward.index('{"keys"')] + cut
    tiles = attention_tiles.parse(TEXT % forward, "a.json").choices
    assert tiles == {("forward", 128, 2, "large"): AttentionTile(64, 32, 4, 2)}
    hopper = forward.replace('"forward"', '"forward_hopper"')
    hopper = hopper[: hopper.index('{"block_m"')] + '{"block_n": 64, "num_stages": 3}}'
    tiles = attention_tiles.parse(TEXT % hopper, "a.json").choices
    assert tiles == {("forward_hopper", 128, 2, "large"): HopperTile(64, 3)}


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("decode", "encode", ".*no such kernel or load: encode"),
        ("small", "tiny", ".*no such kernel or load: decode, tiny"),
        ('"us"', '"s"', "a row needs"),
        ('s": 32', 's": 33', ".*kernel=decode.*: keys must be 16, 32 or 64, got 33"),
        ('s": 4', 's": 3', ".*kernel=decode.*: num_warps must be 1, 2, 4 or 8, got 3"),
        ('stages": 2', 'stages": 0', r".*kernel=decode.*: num_stages must lie in 1\.\.8, got 0"),
        ('sm": 2', 'sm": 0', ".*kernel=decode.*: per_sm and min_keys must be positive"),
        ('"keys"', '"key"', ".*kernel=decode.*: .*unexpected keyword argument 'key'"),
    ],
)
def test_a_wrong_row_names_its_file(right: str, wrong: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^a\.json: {message}"):
        attention_tiles.parse(TEXT % ROW.replace(right, wrong), "a.json")


def test_splits_fill_the_device_once_or_many_times() -> None:
    tile = DecodeTile(16, 4, 3, 4, 256)
    assert attention_tiles.decode_splits(tile, 8, 131072, 132) == 66  # 528 programs, 4 each
    assert attention_tiles.decode_splits(tile, 8, 1024, 132) == 4  # 256 keys each
    assert attention_tiles.decode_splits(tile, 512, 8192, 132) == 1  # 512 of 528 places
    assert attention_tiles.decode_splits(tile, 1024, 8192, 132) == 8  # two rounds: 1024 keys each
    assert attention_tiles.decode_splits(tile, 300, 8192, 132) == 8  # 2.3 each: one would have 3
    assert attention_tiles.decode_splits(tile, 8, 0, 132) == 1


def test_load_is_keys_a_multiprocessor() -> None:
    assert attention_tiles.load_of(8, 16896, 132) == "small"
    assert attention_tiles.load_of(8, 16897, 132) == "large"
    assert attention_tiles.load_of(264, 1024, 132) == "large"
    assert attention_tiles.load_of(265, 1024, 132) == "many"
    assert attention_tiles.load_of(265, 100, 132) == "small"


@pytest.mark.parametrize(("size", "pairs", "splits"), [(2, 512, 1), (1, 512, 2), (1, 1024, 1)])
def test_many_sequences_are_hardly_divided(size: int, pairs: int, splits: int) -> None:
    tile = attention_tiles.decode(
        "NVIDIA H200", 128, size, attention_tiles.load_of(pairs, 8192, 132)
    )
    assert attention_tiles.decode_splits(tile, pairs, 8192, 132) == splits


@pytest.mark.parametrize(("size", "splits"), [(2, 33), (1, 49)])
def test_a_long_sequence_is_merged_from_few_parts(size: int, splits: int) -> None:
    tile = attention_tiles.decode("NVIDIA H200", 128, size, attention_tiles.load_of(8, 32768, 132))
    assert attention_tiles.decode_splits(tile, 8, 32768, 132) == splits
