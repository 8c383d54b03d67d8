"""The tables of the 8-bit products: what they accept, and which tile a call gets."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from taut_bench.scaled_mm_layer import SHAPES
from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import rule as tiles_scaled_mm_rule
from taut_kernels.gemm.scaled_mm import tile as tiles_scaled_mm_tile
from taut_kernels.gemm.scaled_mm.dispatch import make_arrivals
from taut_kernels.gemm.scaled_mm.lookup import Bucket, parse
from taut_kernels.gemm.scaled_mm.rule import rule
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile, most_shared_tokens
from tuning.scaled_mm_candidates import (
    BUCKETS,
    SHARED_BYTES,
    block_candidates,
    candidates,
    ring_bytes,
)

TILE = {"kernel": "ring", "block_m": 16, "block_n": 64, "block_k": 128, "num_warps": 4}
TILE |= {"num_stages": 4}
HOPPER = TILE | {"kernel": "hopper", "block_m": 128, "block_n": 256}
TURNS = HOPPER | {"kernel": "turns", "block_m": 64}
FEW = TILE | {"kernel": "few", "block_m": 128}


def _row(**change: Any) -> dict[str, Any]:
    row = {"op": "fp8_gemm", "N": 64, "K": 128, "max_m": None, "tile": TILE, "M": [1]}
    row |= {"us": [2.0], "vllm_us": [3.0], "rival_us": [1.0]} | change
    fields = dict(row["tile"])
    return row | {"kernel": fields.pop("kernel"), "tile": fields}


def _text(*rows: dict[str, Any]) -> str:
    return json.dumps({"gpu": "card", "source": "somewhere", "rows": rows})


def test_a_call_gets_the_first_bucket_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = TILE | {"block_m": 64}
    table = parse(
        _text(
            _row(max_m=16),
            _row(max_m=32, tile=wide, us=[4.0]),
            _row(max_m=64, tile=wide, us=[4.0]),
            _row(tile=wide),
        ),
        "here",
    )
    monkeypatch.setattr(tiles_scaled_mm, "tables", lambda: {"card": table})
    tiles_scaled_mm.buckets.cache_clear()
    found = [
        tiles_scaled_mm.lookup("fp8_gemm", "card", 64, 128, M) for M in (1, 16, 17, 33, 64, 65)
    ]
    tiles_scaled_mm.buckets.cache_clear()
    assert [bucket.max_m for bucket in found] == [16, 16, 32, 64, 64, None]
    assert [bucket.wins for bucket in found] == [True, True, False, False, False, True]
    ask = tiles_scaled_mm.why_not_preferred
    assert ask("fp8_gemm", "card", 64, 128) == "slower than vLLM's at 17–64 tokens"
    assert ask("fp8_gemm", "card", 64, 256) == "64×256 not measured on card"
    assert ask("fp8_gemm", "other", 64, 128) == "not measured on other"


def test_a_faster_kernel_that_never_served_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_scaled_mm, "SERVED", ("ring", "turns"))
    hopper = HOPPER | {"block_k": 128}
    table = parse(_text(_row(max_m=64), _row(tile=hopper, us=[1.0], vllm_us=[9.0])), "here")
    monkeypatch.setattr(tiles_scaled_mm, "tables", lambda: {"card": table})
    ask = tiles_scaled_mm.why_not_preferred
    assert ask("fp8_gemm", "card", 64, 128) == (
        "slower than vLLM's, or not tried in it, at 65– tokens"
    )


def test_what_a_decoder_layer_took_decides_in_it_alone() -> None:
    def wins(**change: Any) -> tuple[bool, bool]:
        table, key = parse(_text(_row(**change)), "here"), ("fp8_gemm", 64, 128)
        ((_, (alone, within)),) = table.choices[key]
        return alone.wins, within.wins

    slower, faster = (
        {"prefetch": None, "M": [1, 8], "us": [7.0, us], "vllm_us": [8.0, 8.0]} for us in (8.1, 8.0)
    )
    assert wins() == (True, True)
    assert wins(layer=slower) == (True, False)
    assert wins(us=[4.0]) == (False, False)
    assert wins(us=[4.0], layer=faster) == (False, True)


def test_a_tile_starts_early_in_a_layer_alone() -> None:
    layer = {"M": [1], "us": [7.0], "vllm_us": [8.0]}
    early = _row(max_m=16, tile=TILE | {"block_k": 128}, layer=layer | {"prefetch": 2})
    table = parse(_text(early, _row(layer=layer | {"prefetch": None})), "here")
    pairs = [pair for _, pair in table.choices["fp8_gemm", 64, 128]]
    alone, within = zip(*pairs, strict=True)
    assert [bucket.tile.early for bucket in alone] == [False, False]
    assert [(bucket.tile.early, bucket.tile.prefetch) for bucket in within] == [
        (True, 2),
        (False, 0),
    ]


def test_what_no_layer_timed_starts_early_as_what_was_does() -> None:
    table = tiles_scaled_mm.tables()["NVIDIA H200"]
    for (op, N, K), rows in table.choices.items():
        for _, (alone, within) in rows:
            guess = tiles_scaled_mm.early_in_layer(alone.tile, op, N, K, alone.max_m)
            timed = (N, K) in SHAPES.values() and alone.max_m in (16, 32, 64)
            assert within.tile == guess
            assert within.wins >= alone.wins if timed else within.wins == alone.wins
            assert not (within.tile.early and alone.max_m and alone.max_m > 64)
    few = ScaledMmTile("ring", 16, 64, 256, 4, 6)
    early = tiles_scaled_mm.early_in_layer
    assert early(few, "fp8_gemm", 64 * 132, 4096, 16).early
    assert not early(few, "fp8_gemm", 64 * 132 + 16, 4096, 16).early
    assert early(few, "fp8_gemm", 64 * 132 + 16, 4096, 32).early
    assert not early(few, "fp8_gemm", 64, 4096, None).early
    assert not early(few, "fp8_block", 64, 4096, 16).early
    pairs = ScaledMmTile("pairs", 16, 64, 256, 4, 4)
    assert early(pairs, "fp8_gemm", 64 * 132 + 16, 4096, 16).early
    assert [early(pairs, "fp8_gemm", 4096, 8192, M).early for M in (16, 32, 64)] == [
        False,
        False,
        True,
    ]


def test_prefill_on_h200_is_ours_where_it_was_the_faster() -> None:
    def wins(op: str, shape: str, M: int, *, in_layer: bool = False) -> tuple[str, bool]:
        size = SHAPES[shape]
        bucket = tiles_scaled_mm.lookup(op, "NVIDIA H200", *size, M, in_layer=in_layer)
        return bucket.tile.kernel, bucket.wins

    for op in ("fp8_gemm", "w8a8_gemm"):
        for M in (512, 1024):
            assert wins(op, "gate_up", M) == ("turns", True)
        # Within 1 % of CUTLASS, and behind it.
        for M in (2048, 4096):
            assert wins(op, "gate_up", M) == ("turns", False)
        assert wins(op, "down", 1024) == ("hopper", True)
        assert wins(op, "down", 2048) == ("hopper", True)
    assert wins("fp8_gemm", "qkv", 64) == ("ring", False)
    assert wins("fp8_gemm", "qkv", 64, in_layer=True) == ("ring", True)
    assert wins("w8a8_gemm", "o", 4096) == ("turns", True)


def test_no_bucket_of_h200_ends_within_a_tile_of_tokens() -> None:
    """Such tokens would cost as much as the whole tile, which fits the bucket, too."""
    for rows in tiles_scaled_mm.tables()["NVIDIA H200"].choices.values():
        for _, (bucket, _) in rows:
            if bucket.tile.kernel != "ring" and bucket.max_m and bucket.max_m > 128:
                assert bucket.max_m % bucket.tile.block_m == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([_row(extra=1)], "a row needs exactly"),
        ([_row(op="w4a16")], "op must be one of"),
        ([_row(us=[1.0, 2.0])], "of one length"),
        ([_row(layer={"M": [1], "us": [1.0], "vllm_us": [1.0]})], "layer needs"),
        ([_row(layer={"prefetch": 2, "M": [1], "us": [1.0], "vllm_us": []})], "layer needs"),
        ([_row(layer={"prefetch": 2, "M": [], "us": [], "vllm_us": []})], "layer needs"),
        ([_row(layer={"prefetch": 3, "M": [1], "us": [1.0], "vllm_us": [1.0]})], "prefetch"),
        ([_row(max_m=16)], "max_m must be null in the last row"),
        ([_row(), _row()], "max_m must rise, null last"),
        ([_row(max_m=64), _row(max_m=16), _row()], "max_m must rise"),
        ([_row(tile=TILE | {"split_k": 2})], "split_k needs max_m ≤"),
        ([_row(max_m=17, tile=TILE | {"split_k": 2}), _row()], "split_k needs max_m ≤"),
        ([_row(tile=HOPPER, N=60)], "kernel hopper needs N % 8 == 0"),
        (
            [_row(op="fp8_block", tile=TILE | {"block_k": 64})],
            "needs kernel ring or blocks, block_k 128",
        ),
        (
            [_row(op="fp8_block", tile=TILE | {"block_k": 128, "early": True})],
            "fp8_block has no early start of kernel ring",
        ),
        ([_row(tile=TILE | {"block_m": 24})], "block_m must be a power of two"),
        ([_row(tile=TILE | {"num_warps": 2})], "num_warps must be 4, 8 or 16"),
        ([_row(tile=TILE | {"kernel": "ptx"})], "kernel must be one of"),
        ([_row(tile=TILE | {"num_stages": 0})], "num_stages must lie in 1..16"),
        ([_row(tile=HOPPER | {"block_m": 64})], "hopper needs block_m × block_n 128×128 or 128×"),
        ([_row(tile=HOPPER | {"block_n": 64})], "hopper needs block_m × block_n 128×128 or 128×"),
        ([_row(tile=TURNS | {"block_m": 128})], "turns needs block_m × block_n 128×128 or 64×2"),
        ([_row(tile=TURNS | {"num_stages": 6})], "room for 5 stages of 64×256, got 6"),
        ([_row(tile=TURNS, op="w8a8_gemm")], "tiles of 256 features for FP8 only"),
        ([_row(tile=HOPPER | {"split_k": 2})], "needs split_k 1, got 2"),
        ([_row(tile=HOPPER | {"num_warps": 8})], "needs block_k 128 and num_warps 4"),
        ([_row(tile=HOPPER | {"num_stages": 1})], "needs num_stages of at least 2"),
        ([_row(tile=TILE | {"prefetch": 3})], "prefetch must be 0 or a power of two"),
        ([_row(tile=TILE | {"prefetch": 2})], "prefetch needs early"),
        ([_row(tile=TILE | {"early": True, "prefetch": 2, "block_k": 64})], "prefetch needs early"),
        ([_row(tile=HOPPER | {"early": True})], "early needs kernel ring"),
        ([_row(tile=FEW | {"early": True})], "early needs kernel ring"),
        ([_row(tile=FEW, N=60)], "kernel few needs N % 8 == 0"),
        ([_row(tile=FEW, op="fp8_block")], "or pairs, block_k 256, got few"),
        ([_row(op="fp8_block", tile=TILE | {"block_n": 256})], "block_n of at most 128"),
        ([_row(tile=FEW | {"block_m": 32})], "few needs block_m 64 or 128 and .* got 32×64"),
        (
            [_row(tile=FEW | {"block_n": 192})],
            "few needs block_m 64 or 128 and .* got 128×192",
        ),
        ([_row(tile=FEW | {"block_k": 64})], "few needs block_k 128 or 256, num_warps 4 and"),
        ([_row(tile=FEW | {"num_warps": 8})], "few needs block_k 128 or 256, num_warps 4 and"),
        ([_row(tile=FEW | {"group_m": 8})], "num_warps 4 and group_m 1"),
        ([_row(tile=FEW | {"num_stages": 1})], "few needs num_stages of at least 2"),
        ([_row(tile=FEW | {"num_stages": 10})], "room for 9 stages of 128×64×128, got 10"),
        ([_row(tile=FEW | {"block_n": 128, "split_k": 2})], "few splits K with block_n 64 only"),
        ([_row(tile=FEW | {"split_k": 2})], "split_k needs max_m ≤"),
    ],
)
def test_a_bad_table_is_refused(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(_text(*rows), "here")


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"here: expected exactly gpu, source and rows"):
        parse(json.dumps({"gpu": "card", "rows": []}), "here")


@pytest.mark.parametrize("op", tiles_scaled_mm_tile.OPS)
@pytest.mark.parametrize("M", [1, 16, 17, 64, 65, 128, 129, 5000])
@pytest.mark.parametrize(
    ("N", "K"), [(16, 16), (20, 512), (4096, 4096), (4096, 14336), (10240, 8192), (128256, 4096)]
)
@pytest.mark.parametrize("tma", [False, True])
def test_the_rule_holds_every_shape(op: str, M: int, N: int, K: int, tma: bool) -> None:
    tile = rule(op, N, K, M, tma=tma)
    assert tiles_scaled_mm_tile.why_not_for(tile, op, N) is None
    if tile.kernel != "ring":
        assert tma
        assert (M <= 64) == (tile.kernel == "pairs") or op == "fp8_block"
        return
    assert tile.split_k == 1 or tile.block_m >= M
    assert ring_bytes(tile) <= 163 * 1024, "an sm_80 card runs it"
    assert op != "fp8_block" or tile.block_k == 128
    rows = -(-N // tile.block_n)
    assert tile.split_k == 1 or make_arrivals(N, _cpu()).numel() >= rows


@pytest.mark.parametrize("op", tiles_scaled_mm_tile.OPS)
def test_the_rule_does_about_what_the_measured_tables_say(op: str) -> None:
    """It takes most winners' kernel and split, and tiles a quarter to four times as large.

    Up to 64 tokens the H100's, which have `pairs` everywhere.
    """
    same, cells = 0, 0
    for gpu, few in (("NVIDIA H100 80GB HBM3", True), ("NVIDIA H200", False)):
        for (its_op, N, K), rows in tiles_scaled_mm.tables()[gpu].choices.items():
            for _, (bucket, _) in rows if its_op == op else ():
                M = bucket.max_m or 4096
                if (M <= 64) is not few:
                    continue
                tile = rule(op, N, K, M, tma=True)
                cells += 1
                same += (tile.kernel, tile.split_k) == (bucket.tile.kernel, bucket.tile.split_k)
                area = tile.block_m * tile.block_n / bucket.tile.block_m / bucket.tile.block_n
                assert 0.25 <= area <= 4
    assert same >= 0.75 * cells, (same, cells)


def test_the_rule_of_few_tokens_fills_a_wave_with_pairs() -> None:
    def chosen(N: int, M: int) -> str:
        return str(rule("w8a8_gemm", N, 4096, M, tma=True)).removeprefix("pairs ")

    assert [chosen(4096, M) for M in (1, 32, 64)] == [
        "16x64x256/4w/8s/k1",
        "32x64x256/4w/8s/k1",
        "64x64x256/4w/6s/k1",
    ]
    assert [chosen(N, 1) for N in (1280, 2816, 6144)] == [
        "16x64x256/4w/6s/k4",
        "16x64x256/4w/6s/k2",
        "16x64x256/4w/6s/k1",
    ]
    assert [chosen(N, 64) for N in (10240, 28672)] == ["64x128x256/4w/4s/k1", "64x64x256/4w/3s/k1"]


def test_the_rule_takes_half_the_tokens_where_they_fill_a_wave() -> None:
    def chosen(N: int, K: int, M: int) -> tuple[int, int]:
        tile = rule("fp8_gemm", N, K, M)
        return tile.block_m, tile.split_k

    assert [chosen(4096, 4096, M) for M in (17, 32, 33, 64)] == [(16, 1), (16, 1), (32, 1), (32, 1)]
    assert chosen(4096, 4096, 16) == (16, 2), "there is no half"
    assert chosen(4096, 14336, 64) == (64, 2), "a longer K is worth the parts' sum"
    assert chosen(64 * 44, 4096, 64) == (64, 2), "two halves leave a third of a wave"
    assert chosen(64 * 67, 4096, 64) == (64, 1), "two halves are more than a wave"


def test_an_unmeasured_product_gets_what_its_card_runs() -> None:
    def kernel(gpu: str | None, N: int, M: int) -> str:
        return tiles_scaled_mm.lookup("w8a8_gemm", gpu, N, 640, M).tile.kernel

    assert kernel("NVIDIA H200", 4096 + 256, 4096) == "turns"
    assert kernel("NVIDIA H200", 4096 + 260, 4096) == "ring", "rows of 16 bytes for TMA"
    assert kernel("NVIDIA H200", 4096 + 256, 64) == "pairs"
    assert kernel("NVIDIA H200", 4096 + 260, 64) == "ring", "as above"
    assert kernel("NVIDIA A100", 4096 + 256, 4096) == "ring"
    assert kernel(None, 4096 + 256, 4096) == "ring"
    buckets = tiles_scaled_mm.buckets("fp8_gemm", "NVIDIA H200", 4096 + 256, 640)
    assert not any(bucket.wins for bucket in buckets), "nobody measured it"


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def test_committed_tables_are_for_shapes_of_the_bench() -> None:
    for table in tiles_scaled_mm.tables().values():
        assert {(N, K) for _, N, K in table.choices} <= set(PRODUCTS.values())


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_candidates_fit_the_card_and_the_tables(shape: str) -> None:
    N, K = SHAPES[shape]
    for max_m, Ms in BUCKETS:
        found = list(candidates(N, K, Ms[-1], early=True))
        late = list(candidates(N, K, Ms[-1]))
        assert late
        assert not any(tile.early for tile in late)
        assert set(late) <= set(found)
        only_fp8 = set(candidates(N, K, Ms[-1], fp8=True)) - set(late)
        assert {str(tile) for tile in only_fp8} == (
            {"turns 64x256x128/4w/5s/g16"} if Ms[-1] > 64 else set()
        )
        for tile in late:
            parse(
                _text(
                    _row(op="w8a8_gemm", N=N, K=K, tile=dataclasses.asdict(tile) | {"split_k": 1})
                ),
                shape,
            )
        for tile in found:
            row = _row(N=N, K=K, tile=dataclasses.asdict(tile), max_m=max_m)
            last = () if max_m is None else (_row(N=N, K=K),)
            parse(_text(row, *last), shape)
            assert ring_bytes(tile) <= SHARED_BYTES
            parts = 1 if tile.kernel == "pairs" else tile.split_k
            assert K % (tile.block_k * parts) == 0
            assert isinstance(tile, ScaledMmTile)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_candidates_of_blocks_fit_the_card_the_kernel_and_the_tables(shape: str) -> None:
    N, K = SHAPES[shape]
    for max_m, Ms in BUCKETS:
        found = list(block_candidates(N, K, Ms[-1]))
        assert found[0] == rule("fp8_block", N, K, Ms[-1])
        assert len(set(found)) > 5
        for tile in found:
            row = _row(op="fp8_block", N=N, K=K, tile=dataclasses.asdict(tile), max_m=max_m)
            parse(_text(row, *(() if max_m is None else (_row(op="fp8_block", N=N, K=K),))), shape)
            assert not tile.early
            assert ring_bytes(tile) <= SHARED_BYTES
            spilling = ("ring", 128, 128, 4)
            cut = (tile.kernel, tile.block_m, tile.block_n, tile.num_warps)
            assert cut != spilling, "it spills"
            # What a layer's counters are for.
            assert tile.split_k == 1 or most_shared_tokens(tile) >= Ms[-1]
        halves = [t for t in found if t.kernel == "ring" and t.block_m < Ms[-1] <= 64]
        assert bool(halves) == (16 < Ms[-1] <= 64 and not (shape == "gate_up" and Ms[-1] > 32))
        assert all(tile.split_k == 1 for tile in halves)


def test_rule_of_blocks_fills_a_wave_where_one_will_do() -> None:
    def chosen(N: int, M: int, *, tma: bool = True) -> ScaledMmTile:
        return rule("fp8_block", N, 8192, M, tma=tma)

    assert chosen(4096, 128).kernel == "blocks"
    cuts = {N: (chosen(N, 128).block_m, chosen(N, 128).split_k) for N in (4096, 4136, 6144, 28672)}
    assert cuts == {4096: (64, 2), 4136: (64, 1), 6144: (64, 1), 28672: (128, 1)}
    assert {N: chosen(N, 256).block_n for N in (4096, 6144)} == {4096: 64, 6144: 128}
    assert (chosen(28672, 256).block_m, chosen(4096, 512).block_m) == (256, 128)
    assert chosen(4100, 4096).kernel == chosen(4096, 4096, tma=False).kernel == "ring"


def test_rule_of_few_blocks_reads_few_tokens_and_fills_a_wave() -> None:
    def chosen(N: int, K: int, M: int) -> tuple[str, int, int]:
        tile = rule("fp8_block", N, K, M, tma=True)
        return tile.kernel, tile.block_m, tile.split_k

    tokens = (1, 17, 33, 64, 65)
    assert [chosen(4096, 4096, M)[1:] for M in tokens] == [
        (16, 1),
        (32, 1),
        (64, 2),
        (64, 2),
        (64, 1),
    ]
    assert [chosen(4096, 14336, M)[1:] for M in tokens[:3]] == [(16, 1), (32, 2), (64, 2)]
    assert {chosen(8192, 8192, M)[0] for M in (1, 64)} == {"pairs"}
    assert {chosen(28672, 4096, M)[0] for M in (1, 32, 33)} == {"pairs"}
    wide = [rule("fp8_block", 10240, 8192, M, tma=True).block_n for M in (32, 64)]
    assert wide == [128, 64], "no room for the sums of 64 tokens"


def test_wide_buckets_are_cut_where_another_tile_has_fuller_waves() -> None:
    wide = ScaledMmTile("hopper", 128, 256, 128, 4, 4, group_m=16)
    few = Bucket(512, ScaledMmTile("ring", 64, 64, 128, 4, 6), wins=True, measured=(512,))
    found = (
        few,
        Bucket(2048, wide, wins=True, measured=(1280, 2048)),
        Bucket(None, wide, wins=False, measured=(4096,)),
    )
    cut = tiles_scaled_mm._between("fp8_gemm", 4096, 14336, found)
    assert cut[0] == few
    assert [bucket.max_m for bucket in cut[:-1]] == sorted({b.max_m for b in cut[:-1] if b.max_m})
    assert cut[-1] == found[-1]

    def at(M: int) -> Bucket:
        return next(bucket for bucket in cut if bucket.max_m is None or bucket.max_m >= M)

    # Twelve tiles of tokens: two waves of 192 programs of 256 features, or less than three of 384.
    assert at(1500).tile.block_n < 256
    assert {at(M).tile for M in (1280, 2048, 4096, 9000)} == {wide}
    assert {at(M).wins for M in (513, 1500, 2048)} == {True}
    assert {at(M).wins for M in (2049, 3000, 9000)} == {False}
    for bucket in cut[1:-1]:
        promised = [
            tiles_scaled_mm_rule.promised_us(t, 4096, 14336, bucket.max_m or 0)
            for t in (bucket.tile, wide)
        ]
        assert bucket.tile == wide or promised[0] < 0.88 * promised[1]
