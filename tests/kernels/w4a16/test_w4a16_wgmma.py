"""The regimes of `taut::w4a16_gemm` beyond 16 tokens: tiles, launchers, variants, GPU.

The jit kernels are inline assembly, which the Triton interpreter cannot run: they are compiled
ahead of time (test_aot.py) and run on a GPU (marker `gpu`); the conversion's text runs on NumPy.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton
from emulator.ptx import run_ptx
from triton.backends.compiler import GPUTarget

from taut_bench import testing
from taut_bench.instruments import aot
from taut_bench.instruments.forms import w4a16 as w4a16_forms
from taut_bench.instruments.recorder import variants_of
from taut_kernels.gemm.w4a16 import dense
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import portable as wgmma
from taut_kernels.gemm.w4a16.lookup import BUCKETS, WgmmaTile
from taut_kernels.gemm.w4a16.plan import ELEMENT, Weight
from taut_kernels.gemm.w4a16.portable_kernel import w4a16_wgmma_kernel
from taut_kernels.gemm.w4a16.portable_ptx import convert_ptx
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.launch import launcher

DTYPES = (torch.float16, torch.bfloat16)
TILES = {
    "plain": WgmmaTile(32, 4, 1, 1, reordered=False, early_wait=False),
    "early": WgmmaTile(64, 8, 2, 1, reordered=True, early_wait=True),
    "split": WgmmaTile(64, 4, 2, 3, reordered=False, early_wait=True),
    "narrow": WgmmaTile(16, 8, 1, 1, reordered=False, early_wait=True),
    "wide": WgmmaTile(256, 8, 1, 2, reordered=True, early_wait=True),
}


def make_case(
    M: int, N: int, K: int, G: int, dtype: torch.dtype, asymmetric: bool, device: str = "cpu"
) -> testing.W4A16Case:
    return testing.make_w4a16_case(
        M, N, K, G, dtype=dtype, asymmetric=asymmetric, with_bias=asymmetric, device=device
    )


def row(**change: Any) -> dict[str, Any]:
    tile = {
        "block_m": 64,
        "num_warps": 4,
        "chunks_per_step": 2,
        "split_k": 4,
        "reordered": True,
        "early_wait": False,
    }
    made = {"N": 64, "K": 128, "max_m": 64, "kernel": "portable", "tile": tile, "us": 1.5}
    return made | change


DECODE: dict[str, Any] = {"kernel": "decode", "tile": None}
DENSE: dict[str, Any] = {"kernel": "dense", "tile": None}


def table(*rows: dict[str, Any]) -> str:
    return json.dumps({"gpu": "card", "source": "test", "rows": list(rows)})


def test_table_maps_shapes_and_buckets_to_tiles_or_the_dense_product() -> None:
    parsed = tiles_wgmma.parse(
        table(row(), row(max_m=None, **DENSE), row(max_m=16, **DECODE)), "t.json"
    )
    assert parsed.gpu == "card"
    assert parsed.choices[64, 128, BUCKETS.index(64), DEFAULT] == WgmmaTile(
        64, 4, 2, 4, reordered=True, early_wait=False
    )
    assert parsed.choices[64, 128, len(BUCKETS), DEFAULT] == "dense"
    assert parsed.choices[64, 128, 0, DEFAULT] == "decode"


def test_a_format_takes_its_own_rows_then_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(**DENSE), row(**DENSE, max_m=16), row(**DECODE, max_m=16)]
    rows[2] |= {"format": "g32-zp"}
    parsed = tiles_wgmma.parse(table(*rows), "t.json")
    monkeypatch.setattr(tiles_wgmma, "tables", lambda: {"card": parsed})
    for kind in WeightFormat:
        ask = partial(tiles_wgmma.lookup.__wrapped__, "card", 64, 128, hopper=False)
        assert ask(BUCKETS.index(64), kind) == "dense"
        assert ask(0, kind) == ("decode" if kind.group_size == 32 else "dense")
    with pytest.raises(ValueError, match="format=g32-zp N=64 K=128 max_m=16 is there twice"):
        tiles_wgmma.parse(table(*rows, rows[2]), "t.json")
    with pytest.raises(ValueError, match="max_m=64: format must be one of"):
        tiles_wgmma.parse(table(row(format="g48")), "t.json")


def test_a_bucket_cut_out_of_a_wider_one_takes_its_row_until_it_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, wide = row()["tile"] | {"split_k": 1}, row()["tile"] | {"split_k": 2}
    rows = [row(max_m=M, tile=wide) for M in (256, 1664)]
    rows += [row(max_m=192, tile=own), row(max_m=384, **DENSE) | {"format": "g32-zp"}]
    monkeypatch.setattr(
        tiles_wgmma, "tables", lambda: {"card": tiles_wgmma.parse(table(*rows), "t.json")}
    )

    def ask(M: int, weights: WeightFormat = DEFAULT) -> Any:
        bucket = tiles_wgmma.bucket_of(M)
        found = tiles_wgmma.lookup.__wrapped__("card", 64, 128, bucket, weights, hopper=False)
        return found.split_k if isinstance(found, WgmmaTile) and found.num_warps == 4 else None

    assert [ask(M) for M in (192, 193, 1280, 1344, 1664)] == [1, 2, 2, 2, 2]
    assert ask(384) is None, "the rule's: 384 was cut out of no other"
    # A row of its own format is nearer than a narrower bucket's of another.
    rows.append(row(max_m=256, tile=wide | {"split_k": 4}) | {"format": "g32-zp"})
    (small,) = (kind for kind in WeightFormat if kind.group_size == 32 and kind.zero_points)
    assert [ask(M, small) for M in (192, 193)] == [4, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table(row(), row()), "is there twice"),
        (table(row(max_m=48)), "max_m must be one of"),
        (table(row(**DECODE)), "decode takes up to 16 tokens"),
        (table(row(kernel="ptx")), "there is no kernel 'ptx'"),
        (table(row(tile=None)), "kernel=portable N=64 K=128 max_m=64: "),
        (table(row(kernel="dense")), "dense has no tile"),
        (table(row(max_m=None)), "split_k needs a max_m"),
        (table({"N": 1}), "a row needs exactly"),
        (json.dumps({"rows": []}), "expected exactly gpu, source and rows"),
        (table(row(tile=row()["tile"] | {"num_warps": 2})), "num_warps must be one of"),
    ],
)
def test_table_refuses_what_it_does_not_know(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiles_wgmma.parse(text, "t.json")


def test_bucket_of_every_number_of_tokens() -> None:
    Ms = (9, 16, 17, 32, 33, 192, 193, 256, 257, 384, 385, 512, 513, 768, 769, 1024, 1025, 1152)
    Ms += (1153, 1280, 1281, 1344, 1345, 1408, 1409, 1536, 1537, 1664, 1665, 2048, 2049, 10**6)
    ends = [0, 0, 1, 1, 2, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10]
    ends += [11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 16, 16, 17, 17]
    assert [tiles_wgmma.bucket_of(M) for M in Ms] == ends


@pytest.mark.parametrize(("N", "K"), [(28672, 4096), (576, 576), (64, 128), (192, 1536)])
def test_rule_fits_every_shape(N: int, K: int) -> None:
    for bucket in range(len(BUCKETS) + 1):
        tile = tiles_wgmma.lookup("no such card", N, K, bucket, hopper=False)
        assert isinstance(tile, str | WgmmaTile), "what every card runs"
        assert (tile == "decode") == (bucket == 0)
        assert (tile == "dense") == (bucket == len(BUCKETS))
        if isinstance(tile, WgmmaTile) and tile.split_k > 1:
            tiles = -(-N // tile.rows) * -(-BUCKETS[bucket] // tile.block_m)
            assert tiles <= N // 16, "arrivals counts N/16 meeting places"


class Recorder:
    """Stands in for a jit kernel: remembers how it was launched."""

    arg_names = w4a16_wgmma_kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.grid, self.arguments, self.constants = grid, arguments, constants

        return launch


@pytest.mark.parametrize(
    ("tile", "N", "K", "M", "grid"),
    [
        ("plain", 80, 576, 33, (2, 1, 2)),
        ("early", 80, 640, 64, (1, 1, 1)),
        ("split", 272, 576, 17, (5, 3, 1)),
        ("wide", 1024, 512, 257, (8, 2, 2)),
    ],
)
def test_launch_covers_the_result_and_names_every_argument(
    tile: str,
    N: int,
    K: int,
    M: int,
    grid: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, seen = Recorder(), []
    monkeypatch.setattr(wgmma, "_PRODUCT", launcher.Launcher(recorder))
    monkeypatch.setattr(wgmma, "reorder", lambda x: seen.append(x) or x)
    cut = TILES[tile]
    y = w4a16_launch.launch(cut, *make_case(M, N, K, 64, torch.bfloat16, True).operands())
    assert y.shape == (M, N)
    assert recorder.grid == grid
    assert bool(seen) is cut.reordered
    named = dict(zip(recorder.arg_names, recorder.arguments, strict=False))
    assert set(named) | set(recorder.constants) == set(recorder.arg_names) | {"num_warps"}
    assert recorder.constants["CUT"].chunks_per_step == (1 if K == 576 else cut.chunks_per_step)
    assert recorder.constants["CUT"].early_wait is False, "a CPU has no wgmma to wait for"
    if cut.split_k == 1:
        assert named["partial_ptr"] is None
        assert named["arrivals_ptr"] is None
    else:
        cells = grid[0] * grid[1] * grid[2] * cut.rows * cut.block_m
        assert named["partial_ptr"].numel() == cells
        assert named["arrivals_ptr"].numel() >= grid[0] * grid[2]


def test_launch_refuses_more_meeting_places_than_the_layer_has() -> None:
    operands = make_case(129, 16, 128, 64, torch.bfloat16, False).operands()
    with pytest.raises(ValueError, match=r"split_k: 3 tiles meet, arrivals counts 1"):
        w4a16_launch.launch(TILES["split"], *operands)


def test_dense_slices_cover_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(3, 96, 128, 32, torch.float16, True)
    operands = case.operands()
    rounded = formats_mma.unpack_weight(operands[1]).to(torch.float16)

    def fake(_weight: Weight, _group: int, first: int, tiles: int) -> torch.Tensor:
        return rounded[16 * first : 16 * (first + tiles)]

    monkeypatch.setattr(dense, "dequantize", fake)
    whole = w4a16_launch.launch("dense", *operands)
    monkeypatch.setattr(dense, "SLICE_BYTES", 40 * 128 * 2)
    assert torch.equal(w4a16_launch.launch("dense", *operands), whole)
    assert torch.equal(whole, torch.nn.functional.linear(operands[0], rounded, case.bias))


@pytest.mark.parametrize(
    ("tiles", "tile_bytes", "step"),
    [
        (2368, 16 * 3584 * 2, 1184),  # 37888 × 3584 is a little over one slice: two halves
        (3584, 16 * 8192 * 2, 896),
        (256, 16 * 4096 * 2, 256),
        (5, 2**30, 1),
    ],
)
def test_dense_slices_are_of_one_size(tiles: int, tile_bytes: int, step: int) -> None:
    assert dense._slice_tiles(tiles, tile_bytes) == step
    assert step * tile_bytes <= max(dense.SLICE_BYTES, tile_bytes)


def test_kernel_variants_cover_every_measured_tile_and_every_format() -> None:
    variants = list(w4a16_forms.portable_variants())
    assert len(variants) == len({(v.label, v.tile, v.target) for v in variants})
    tables = tiles_wgmma.tables().values()
    measured = {t for table in tables for t in table.choices.values() if isinstance(t, WgmmaTile)}
    assert measured <= {v.tile for v in variants}
    labels = " ".join(v.label for v in variants)
    for word in ("bf16", "fp16", " asym", " sym", "group=32", "group=64", "group=128", "channel"):
        assert word in labels


def check(case: testing.W4A16Case, tile: WgmmaTile) -> torch.Tensor:
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(tile, *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    for _ in range(5):
        assert torch.equal(w4a16_launch.launch(tile, *operands), actual), "bits differ between runs"
    assert not operands[5].any(), "arrivals must be 0 again"
    return actual


def converted(case: testing.W4A16Case, chunk: int) -> torch.Tensor:
    """Run the conversion's text on one chunk of one row tile: [16, 64] of the case's type."""
    x, qweight, scales, zeros, *_ = case.operands()
    element = ELEMENT[x.dtype]
    g = torch.arange(32) // 4
    words = [qweight[0, chunk, :, i] for i in range(4)]
    words += [scales[0, 0].view(torch.int32)[g, i, 0] for i in range(4)]
    words += [] if zeros is None else [zeros[0, 0][g]] * 4
    words += [torch.full((32,), chunk * 64 // case.group_size, dtype=torch.int32)] * 4
    registers = {f"${16 + i}": word.numpy().view(np.uint32) for i, word in enumerate(words)}
    run_ptx(convert_ptx(element, zeros is not None, case.group_size != 32), registers)
    found = np.stack([registers[f"${i}"] for i in range(16)], -1)
    # g, t, h, i, r, j, b: rows are (r, g), columns (h, t, i, j, b).
    values = torch.from_numpy(found.view(np.int16)).view(x.dtype).view(8, 4, 2, 2, 2, 2, 2)
    return values.permute(4, 0, 2, 1, 3, 5, 6).reshape(16, 64)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G", [32, 64, 128])
def test_conversion_takes_a_chunks_group_out_of_its_quad(
    G: int, dtype: torch.dtype, asymmetric: bool
) -> None:
    case = make_case(1, 16, 4 * G, G, dtype, asymmetric)
    values = case.values.float().view(16, 4, G)
    if case.zeros is not None:
        values = values - case.zeros.float().unsqueeze(-1)
    weight = (values * case.weight_scale.float().unsqueeze(-1)).view(16, 4 * G).to(dtype)
    for chunk in range(4 * G // 64):
        assert torch.equal(converted(case, chunk), weight[:, 64 * chunk : 64 * chunk + 64])


@pytest.mark.parametrize("tile", ["plain", "wide"])
def test_the_conversion_is_given_neighbours(tile: str) -> None:
    """Its text takes four neighbouring words a call, whatever layout Triton finds for them."""
    call = w4a16_forms.product_call(TILES[tile], 1024, w4a16_forms.LARGEST)
    (variant,) = variants_of(call)
    target = GPUTarget("cuda", 90, 32)
    compiled: Any = triton.compile(aot.source_of(variant), target=target, options=variant.options)
    text = compiled.asm["ttgir"]
    (line,) = (line for line in text.splitlines() if "offset0" in line and "inline_asm" in line)
    layouts = set(re.findall(r"tensor<[0-9]+xi32, (#\w+)>", line))
    assert len(layouts) == 1
    described = re.search(rf"^{layouts.pop()} = (.*)$", text, re.MULTILINE)
    assert described
    assert re.search(r"sizePerThread = \[4\]|register = \[\[1\], \[2\]", described[1]), described[1]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("K", "G"), [(1088, 32), (576, 64), (1152, 128), (704, -1), (1024, 128)])
def test_gpu_every_cut_and_format(
    tile: str, K: int, G: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    for M, N in ((17, 80), (64, 272), (100, 1040)):
        check(make_case(M, N, K, G, dtype, asymmetric, "cuda"), TILES[tile])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("N", "K", "G"), [(80, 1088, 32), (272, 576, 64), (4096, 704, -1)])
def test_gpu_dequantize_rounds_once(
    N: int, K: int, G: int, asymmetric: bool, dtype: torch.dtype
) -> None:
    case = make_case(1, N, K, G, dtype, asymmetric, "cuda")
    _, *operands, group = case.operands()
    weight = Weight(*operands)
    values = case.values.float().view(N, -1, group)
    if case.zeros is not None:
        values = values - case.zeros.float().unsqueeze(-1)
    expected = (values * case.weight_scale.float().unsqueeze(-1)).view(N, K).to(dtype)
    with testing.nan_poison():
        assert torch.equal(dense.dequantize(weight, group, 0, N // 16), expected)
        part = dense.dequantize(weight, group, 2, 3)
    assert torch.equal(part, expected[32:80])


@pytest.mark.gpu
def test_gpu_reorder_is_the_order_of_the_fragments() -> None:
    x = torch.randn(3, 1024, device="cuda").to(torch.bfloat16)
    # Axes h, t, i, j, b become h, i, j, t, b.
    expected = x.view(3, -1, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(3, 1024)
    assert torch.equal(wgmma.reorder(x), expected)
