"""`taut::matmul`, rung by rung: specification, interpreter, op contract, tables, GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.primitives import gemm, gemm_tiles, matmul
from taut_kernels.primitives.gemm_tiles import GemmTile

INTERPRET = Path(__file__).with_name("interpret_primitives.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_the_product_with_bias_and_activation(dtype: torch.dtype) -> None:
    a, b, bias = draw(5, 40, dtype=dtype), draw(40, 7, dtype=dtype), draw(7, dtype=dtype)
    z = torch.einsum("mk,kn->mn", a.double(), b.double()) + bias.double()
    by_hand = {
        "none": z,
        "relu": z.clamp(min=0),
        "silu": z / (1 + torch.exp(-z)),
        "gelu": z * 0.5 * (1 + torch.erf(z / 2**0.5)),
    }
    assert set(by_hand) == set(gemm.ACTIVATIONS)
    for activation, gold in by_hand.items():
        error = testing.max_error(gemm.matmul_ref(a, b, bias, activation), gold)
        assert error <= torch.finfo(dtype).eps * gold.abs().max().item()


@interpreter
@pytest.mark.parametrize(
    ("checks", "counts"),
    [
        (["products", "strided_products"], [70, 28]),
        (["epilogues", "adversarial_products", "nothing_to_do"], [32, 4, 1]),
    ],
)
def test_interpreted_kernels(checks: list[str], counts: list[int], run_checks: Any) -> None:
    process = run_checks(INTERPRET, *checks, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    pairs = zip(checks, counts, strict=True)
    assert process.stdout.splitlines() == [f"{check} {count}" for check, count in pairs]


def test_op_contract() -> None:
    a, weight, bias = (draw(*shape, dtype=torch.bfloat16) for shape in ((5, 24), (16, 24), (16,)))
    op = torch.ops.taut.matmul.default
    torch.library.opcheck(op, (a, weight.t(), bias, "silu", "v4"))
    torch.library.opcheck(op, (a[::2], weight.t().contiguous(), None, "none", "v1"))
    torch.library.opcheck(op, (a[:0], weight.t(), None, "none", "v3"))


def test_compiles_without_graph_breaks_for_every_number_of_rows() -> None:
    weight = draw(16, 24, dtype=torch.bfloat16)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return matmul(x + 1, weight.t(), activation="relu").float()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5, 9):
        x = draw(M, 24, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


A, B = torch.zeros(4, 8, dtype=torch.float16), torch.zeros(8, 6, dtype=torch.float16)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"a": torch.zeros(4, 8)}, "a must be bfloat16 or float16, got torch.float32"),
    ({"a": torch.zeros(2, 4, 8, dtype=torch.float16)}, r"a must have shape \[M, K\]"),
    ({"b": torch.zeros(7, 6, dtype=torch.float16)}, r"b must have shape \[8, N\], got \(7, 6\)"),
    ({"b": torch.zeros(8, 6, dtype=torch.bfloat16)}, "b must be torch.float16 on cpu"),
    ({"b": torch.zeros(8, 6, dtype=torch.float16, device="meta")}, "b must be .* got .* on meta"),
    ({"bias": torch.zeros(5, dtype=torch.float16)}, r"bias must be contiguous of shape \[6\]"),
    ({"bias": torch.zeros(6)}, "bias must be torch.float16"),
    ({"bias": torch.zeros(6, dtype=torch.float16), "version": "v2"}, "bias and activation need"),
    ({"activation": "relu", "version": "v3"}, "bias and activation need version v4"),
    ({"activation": "tanh"}, "activation must be one of none, relu, silu, gelu, got 'tanh'"),
    ({"version": "v5"}, "version must be one of v1, v2, v3, v4, got 'v5'"),
    ({"a": torch.zeros(4, 8, dtype=torch.float16, requires_grad=True)}, "a requires grad"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    assert matmul(A, B).shape == (4, 6)
    with pytest.raises(ValueError, match=message):
        matmul(**{"a": A, "b": B} | change)


def test_rungs_with_the_copy_engine_are_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm.launcher, "capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"version 'v4' needs .* 9.0 \(TMA\): use 'v2'"):
        gemm.check_copy_engine("v4", torch.device("cuda"), "v2")
    gemm.check_copy_engine("v4", torch.device("cpu"), "v2")


def table(**change: Any) -> str:
    tile = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 4}
    row = {"N": 64, "K": 32, "max_m": None, "tile": tile, "M": [4096], "us": [1], "cublas_us": [1]}
    rows = [row | {"max_m": 64, "tile": tile | {"block_m": 64, "num_warps": 4}}, row | change]
    return json.dumps({"gpu": "card", "source": "test", "rows": rows})


def test_table_is_looked_up_by_shape_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = gemm_tiles.parse(table(), "gemm-card.json")
    monkeypatch.setattr(gemm_tiles, "tables", lambda: {"card": parsed})
    lookup = gemm_tiles.lookup.__wrapped__
    assert lookup("card", 64, 64, 32).block_m == 64
    assert lookup("card", 65, 64, 32) == GemmTile(128, 128, 64, 8, 4)
    assert lookup("card", 65, 64, 33) == gemm_tiles.rule(65, 64, 33)
    assert lookup(None, 65, 64, 32) == gemm_tiles.rule(65, 64, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "gemm-card.json: a row needs exactly"),
        ({"max_m": 128}, "max_m must be null in the last row"),
        ({"tile": {"block_m": 100}}, "gemm-card.json: N=64 K=32"),
    ],
)
def test_a_broken_table_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gemm_tiles.parse(table(**change), "gemm-card.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_k": 48}, "block_k must be a power of two"),
        ({"num_warps": 2}, "num_warps must be 4 or 8"),
        ({"split_k": 99}, r"split_k must lie in 1\.\.16"),
        ({"flatten": True}, "flatten needs persistent"),
    ],
)
def test_a_tile_out_of_range_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GemmTile(128, 128, 64, 8, 4), **change)


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (4096, 4096, 4096), (64, 28672, 4096), (300, 96, 9000)]
)
def test_rule_fills_the_card_without_empty_shares(shape: tuple[int, int, int]) -> None:
    M, N, K = shape
    tile = gemm_tiles.rule(*shape)
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    if tile.split_k > 1:
        assert tiles * tile.split_k <= 132
        assert -(-K // tile.block_k) // tile.split_k >= 4


TILES = [
    ("v1", gemm_tiles.DIRECT),
    ("v2", gemm_tiles.TILED),
    ("v3", gemm_tiles.PIPELINED),
    ("v4", GemmTile(128, 256, 64, 8, 3, parts=2)),
    ("v4", GemmTile(64, 64, 64, 4, 4, split_k=5)),
    ("v4", GemmTile(128, 128, 64, 8, 4, persistent=True, flatten=True)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("version", "tile"), TILES, ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(1, 1, 1), (1, 4096, 64), (127, 129, 63), (128, 256, 64), (1000, 520, 1032), (640, 2304, 512)],
)
def test_gpu_kernels_match_reference(
    M: int, N: int, K: int, version: str, tile: GemmTile, dtype: torch.dtype
) -> None:
    a = draw(M, K, dtype=dtype, device="cuda", seed=M)
    b = draw(K, N, dtype=dtype, device="cuda", seed=N)
    transposed_a, transposed_b = a.t().contiguous().t(), b.t().contiguous().t()
    gold, reference = gemm.matmul_ref(a.double(), b.double()), gemm.matmul_ref(a, b)
    for x, y in ((a, b), (a, transposed_b), (transposed_a, b), (transposed_a, transposed_b)):
        with testing.nan_poison():
            c = gemm.launch(version, tile, x, y)
        testing.assert_within_budget(c, gold, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("version", gemm_tiles.VERSIONS)
def test_gpu_op_reads_any_strides(version: str) -> None:
    base = draw(600, 800, dtype=torch.bfloat16, device="cuda")
    pairs = [
        (base[:300, 3:403], base[:400, 1:201]),
        (base[::2, ::2], base.t()[:400:1, :300]),
        (base[:1].expand(200, 800), base.t()[:, :400]),
    ]
    for a, b in pairs:
        with testing.nan_poison():
            c = matmul(a, b, version=version)
        gold = gemm.matmul_ref(a.double(), b.double())
        testing.assert_within_budget(c, gold, gemm.matmul_ref(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", gemm.ACTIVATIONS)
def test_gpu_epilogues(activation: str) -> None:
    a, b, bias = (
        draw(*shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((300, 512), (512, 328), (328,))
    )
    reference = gemm.matmul_ref(a, b, bias, activation)
    gold = gemm.matmul_ref(a.double(), b.double(), bias.double(), activation)
    for version, tile in TILES:
        if version == "v4":
            c = gemm.launch(version, tile, a, b, bias, activation)
            testing.assert_within_budget(c, gold, reference)


@pytest.mark.gpu
def test_gpu_every_tile_of_the_table_is_right_and_repeats_its_bits() -> None:
    tables = gemm_tiles.tables().values()
    found = {tile for table in tables for rows in table.choices.values() for _, tile in rows}
    a = draw(700, 4096, dtype=torch.bfloat16, device="cuda")
    b = draw(1024, 4096, dtype=torch.bfloat16, device="cuda").t()
    gold, reference = gemm.matmul_ref(a.double(), b.double()), gemm.matmul_ref(a, b)
    for tile in found | {gemm_tiles.rule(64, 1024, 4096), gemm_tiles.rule(4096, 4096, 4096)}:
        c = gemm.launch("v4", tile, a, b)
        testing.assert_within_budget(c, gold, reference)
        for _ in range(20):
            assert torch.equal(gemm.launch("v4", tile, a, b), c), tile


@pytest.mark.gpu
@pytest.mark.parametrize("version", gemm_tiles.VERSIONS)
def test_gpu_graph_replays_on_new_data(version: str) -> None:
    a = draw(64, 512, dtype=torch.bfloat16, device="cuda")
    b = draw(512, 256, dtype=torch.bfloat16, device="cuda")
    matmul(a, b, version=version)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = matmul(a, b, version=version)
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.equal(c, matmul(a, b, version=version))
