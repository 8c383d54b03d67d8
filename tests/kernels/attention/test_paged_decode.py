"""`taut::paged_decode`: specification, interpreter, op contract, bad input, GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from emulator.paged import PagedCase, make_case

from taut_bench import testing
from taut_bench.instruments.forms import attention as attention_forms
from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.decode import op as decode
from taut_kernels.attention.decode import reference as decode_reference
from taut_kernels.attention.decode.op import make_arrivals, paged_decode
from taut_kernels.attention.reference import attention_ref
from taut_kernels.launch import launcher

INTERPRET = Path(__file__).with_name("interpret_decode.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float16, FP8, INT8])
def test_reference_is_attention_over_the_gathered_keys(dtype: torch.dtype, window: int) -> None:
    case = make_case([40, 33, 0, 16], 8, 2, 64, 16, dtype, queries=3, window=window, by_head=True)
    found = case.gold()
    for number, context in enumerate(case.context_lens.tolist()):
        pages = case.block_table[number, : -(-context // 16)].long()
        k, v = (
            decode_reference.gathered(cache, pages, context).double()
            for cache in (case.k_cache, case.v_cache)
        )
        if case.k_scale is not None and case.v_scale is not None:
            k, v = k * case.k_scale.double()[:, None], v * case.v_scale.double()[:, None]
        q = case.q[number : number + 1].double()
        o, _ = attention_ref(q, k[None], v[None], None, None, 3, context, True, window, case.scale)
        assert testing.max_error(found[number : number + 1], o) < 1e-12


def test_a_context_beyond_the_table_is_cut_and_one_below_zero_is_empty() -> None:
    case = make_case([32, 16], 4, 2, 64, 16, torch.float16)
    table = case.block_table[:, :2].clamp(min=0)
    full = paged_decode(
        case.q, case.k_cache, case.v_cache, table, case.context_lens.new_tensor([32, 0])
    )
    beyond = case.context_lens.new_tensor([1000, -5])
    assert torch.equal(paged_decode(case.q, case.k_cache, case.v_cache, table, beyond), full)
    assert not full[1].any()


@interpreter
@pytest.mark.parametrize(
    ("check", "count"),
    [
        ("conversions", 2),
        ("contexts", 12),
        ("queries_and_windows", 7),
        ("wide_heads", 3),
        ("layouts", 12),
        ("large_values", 2),
        ("many_splits", 3),
        ("short_among_long", 4),
        ("shares", 31),
        ("shares_of_many", 2),
        ("layouts_of_shares", 36),
        ("merges", 9),
    ],
)
def test_interpreted_kernel(check: str, count: int, run_checks: Any) -> None:
    process = run_checks(INTERPRET, check, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


@pytest.mark.parametrize("dtype", [torch.float16, FP8, INT8])
def test_op_contract(dtype: torch.dtype) -> None:
    case = make_case([20, 5], 4, 2, 64, 16, dtype, queries=2, layout="heads first")
    args = (case.q, case.k_cache, case.v_cache, *case.settings())
    if dtype == FP8:
        # opcheck's schema test multiplies tensors, which CPU e4m3 cannot.
        tests = ("test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.taut.paged_decode.default, args, test_utils=tests)
    else:
        torch.library.opcheck(torch.ops.taut.paged_decode.default, args)


def test_compiles_without_graph_breaks() -> None:
    case = make_case([20, 5], 4, 2, 64, 16, torch.float16)
    q = case.q.squeeze(1)
    rest = (case.k_cache, case.v_cache, case.block_table, case.context_lens)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return paged_decode(q * 2, *rest, max_context=20, window=3) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert compiled(q).shape == q.shape
    assert torch.equal(compiled(q), layer(q))

    def step(q: torch.Tensor, longest: int) -> torch.Tensor:
        return paged_decode(q, *rest, max_context=longest)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for longest in (18, 19, 20):
            assert torch.equal(compiled(q, longest), step(q, longest))


def test_three_and_four_dimensions_are_the_same() -> None:
    case = make_case([20, 5], 4, 2, 64, 16, torch.float16)
    rest = (case.k_cache, case.v_cache, case.block_table, case.context_lens)
    assert torch.equal(paged_decode(case.q[:, 0], *rest), paged_decode(case.q, *rest)[:, 0])


GOOD = make_case([20, 5], 4, 2, 64, 16, torch.float16)
ONE = torch.ones(1)
INT8_WIDE = torch.zeros(5, 16, 2, 65, dtype=INT8)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": GOOD.q[0, 0]}, r"q must be \[B, Hq, D\] or \[B, T, Hq, D\], got shape \(4, 64\)"),
    ({"q": GOOD.q.float()}, "q must be bfloat16 or float16, got torch.float32"),
    ({"q": GOOD.q[..., :48]}, "q must have heads of 64, 96, 128 or 256 elements, got 48"),
    ({"q": GOOD.q.repeat(1, 9, 1, 1)}, "q must have 1 to 8 queries a sequence, got 9"),
    ({"q": GOOD.q.repeat(1, 1, 1, 2)[..., ::2]}, "q must have the elements of a head next to"),
    ({"q": GOOD.q[:, :, :3]}, "q has 3 heads, not a multiple of the 2 of k_cache"),
    ({"q": GOOD.q.bfloat16()}, "k_cache must be torch.bfloat16 as q, float8_e4m3fn or int8"),
    ({"k_cache": GOOD.k_cache[0]}, r"k_cache must be \[pages, page size, Hk, D\]"),
    ({"v_cache": GOOD.v_cache.to("meta")}, "v_cache must be on cpu, got meta"),
    ({"k_cache": GOOD.k_cache.repeat(1, 1, 1, 2)}, "k_cache must have heads of 64 as q, got 128"),
    ({"k_cache": GOOD.k_cache[:, :12]}, "k_cache must have pages of a power of two of at least 16"),
    (
        {"k_cache": GOOD.k_cache.repeat(1, 1, 1, 2)[..., ::2]},
        "k_cache must have the elements of a head next to each other",
    ),
    ({"v_cache": GOOD.v_cache[1:]}, "v_cache must be as k_cache"),
    ({"v_cache": INT8_WIDE[..., :64].contiguous()}, "v_cache must be as k_cache"),
    (
        {"k_cache": INT8_WIDE[..., :64], "v_cache": INT8_WIDE[..., :64]},
        "k_cache must have even strides",
    ),
    ({"block_table": GOOD.block_table.long()}, r"block_table must be \[B, most pages\] int32"),
    ({"block_table": GOOD.block_table[:1]}, "block_table must be .* with B = 2"),
    ({"block_table": GOOD.block_table.to("meta")}, "block_table must be on cpu"),
    ({"context_lens": GOOD.context_lens[:1]}, r"context_lens must be \[B\] int32 with B = 2"),
    ({"max_context": 10**6}, "max_context must lie in 0"),
    ({"window": 0}, "window must be at least 1, got 0"),
    ({"scale": 0.0}, "scale must be positive and finite"),
    ({"k_scale": torch.ones(3)}, "k_scale must be fp32 with 1 or 2 elements"),
    ({"v_scale": ONE.double()}, "v_scale must be fp32 with 1 or 2 elements"),
    ({"v_scale": ONE.to("meta")}, "v_scale must be on cpu, got meta"),
    ({"arrivals": torch.zeros(3, dtype=torch.int32)}, "arrivals must hold 8 int32"),
    ({"arrivals": torch.zeros(8, dtype=torch.int32, device="meta")}, "arrivals must be on cpu"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    names = ("q", "k_cache", "v_cache", "block_table", "context_lens")
    arguments: dict[str, Any] = {name: getattr(GOOD, name) for name in names}
    assert paged_decode(**arguments).shape == GOOD.q.shape
    with pytest.raises(ValueError, match=message):
        paged_decode(**arguments | change)


@pytest.mark.parametrize("page", [-1, GOOD.k_cache.shape[0]])
def test_pages_the_cache_does_not_have_are_refused_on_the_cpu(page: int) -> None:
    table = GOOD.block_table.clone()
    table[0, 1] = page
    rest = (GOOD.k_cache, GOOD.v_cache)
    message = (
        rf"block_table must name pages in 0\.\.{len(GOOD.k_cache) - 1} .* got {page} for sequence 0"
    )
    with pytest.raises(ValueError, match=message):
        paged_decode(GOOD.q, *rest, table, GOOD.context_lens)
    # Behind the context nobody reads it.
    short = torch.tensor([16, 5], dtype=torch.int32)
    assert paged_decode(GOOD.q, *rest, table, short).shape == GOOD.q.shape


def test_an_8_bit_cache_at_an_odd_address_is_refused() -> None:
    odd = torch.zeros(5 * 16 * 2 * 64 + 1, dtype=INT8)[1:].view(5, 16, 2, 64)
    settings = decode.Settings(*GOOD.settings())
    tile = attention_tiles.decode(None, 64, 1, "small")
    with pytest.raises(ValueError, match="v_cache must start at an even element"):
        decode.launch(tile, GOOD.q, torch.zeros_like(odd), odd, settings, 1)


def test_few_sequences_start_early_and_many_let_the_next_kernel_on_hopper_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(launcher, "capability", lambda device: (9, 0))
    starts = [decode.early_starts(sequences, 1024, cpu) for sequences in (1, 8, 9, 16, 17)]
    assert starts == [(False, True), (False, True), (True, True), (True, True), (True, False)]
    many = [decode.early_starts(sequences, 1024, cpu) for sequences in (64, 65)]
    assert many == [(True, False), (False, False)]
    assert decode.early_starts(1, decode.EARLY_KEYS + 1, cpu) == (False, False)
    assert decode.early_starts(2, decode.EARLY_KEYS + 1, cpu) == (False, True)
    for capability in ((8, 0), (10, 0), (0, 0)):
        monkeypatch.setattr(launcher, "capability", lambda device, it=capability: it)
        assert decode.early_starts(9, 1, cpu) == (False, False)


def test_a_launch_hands_its_starts_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(decode, "early_starts", lambda sequences, keys, device: (keys > 9, True))
    monkeypatch.setattr(decode, "_paged_decode", lambda *call: calls.append((call[0], call[-2]())))
    tile = attention_tiles.decode(None, 64, 2, "small")
    for keys in (9, 10):
        settings = decode.Settings(*GOOD.settings())._replace(max_context=keys)
        decode.launch(tile, GOOD.q, GOOD.k_cache, GOOD.v_cache, settings, 1)
    (few_key, (few, options)), (many_key, (many, _)) = calls
    assert options["launch_pdl"]
    assert (few["STARTS_NEXT"], few["EARLY"]) == (False, True)
    assert (many["STARTS_NEXT"], many["EARLY"]) == (True, True)
    assert few_key != many_key


def test_no_sequences() -> None:
    q = torch.zeros(0, 4, 64, dtype=torch.float16)
    lens = torch.zeros(0, dtype=torch.int32)
    table = torch.zeros(0, 3, dtype=torch.int32)
    assert paged_decode(q, GOOD.k_cache, GOOD.v_cache, table, lens).shape == q.shape


def test_variants_cover_every_dimension_and_format() -> None:
    found = list(attention_forms.decode_variants())
    assert len(found) == len({(v.label, v.tile, v.target) for v in found})
    for target in ("sm_80", "sm_90"):
        labels = [v.label for v in found if target == v.target]
        for dim in (64, 96, 128, 256) if target == "sm_90" else (128, 256):
            for name in ("bf16", "fp8", "int8"):
                assert any(f"{name} D={dim} " in label for label in labels)
        # Batches of more lengths than start early do not.
        few = [v for v in found if target == v.target and v.constants["BLOCK_B"] <= 64]
        many = [v for v in found if target == v.target and v.constants["BLOCK_B"] > 64]
        assert bool(many) is (target == "sm_90")
        for start in ("STARTS_NEXT", "EARLY"):
            assert {v.constants[start] for v in few} == {target == "sm_90"}
            assert not any(v.constants[start] for v in many)
        assert {"launch_pdl" in v.options for v in few} == {target == "sm_90"}


def on_gpu(contexts: list[int], *shape: Any, **options: Any) -> PagedCase:
    return make_case(contexts, *shape, device="cuda", q_dtype=torch.bfloat16, **options)


def check_on_gpu(case: PagedCase, splits: int | None = None) -> torch.Tensor:
    sequences, queries, heads, dim = case.q.shape
    arrivals = make_arrivals(sequences, heads, case.q.device, queries)
    settings = decode.Settings(*case.settings(arrivals))
    gpu, size = launcher.gpu_name(case.q.device), case.k_cache.element_size()
    # The first call makes sure of the tile for the other load.
    loads = ("large", "small", "small", "small") if splits is None else ("large",) * 3
    found = []
    for load in loads:
        tile = attention_tiles.decode(gpu, 128 if dim == 96 else dim, size, load)
        with testing.nan_poison():
            found.append(decode.launch(tile, case.q, case.k_cache, case.v_cache, settings, splits))
    if splits is None:
        testing.assert_within_budget(found.pop(0), case.gold(), case.reference())
    testing.assert_within_budget(found[0], case.gold(), case.reference())
    assert all(torch.equal(found[0], again) for again in found[1:])
    assert not arrivals.any()
    return found[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("page", "heads", "heads_k"), [(16, 32, 8), (32, 4, 4), (64, 40, 2), (128, 8, 1)]
)
def test_gpu_kernel_matches_reference(
    page: int, heads: int, heads_k: int, dim: int, dtype: torch.dtype
) -> None:
    contexts = [0, 1, page, page + 1, page - 1, 700, 1500]
    case = on_gpu(contexts, heads, heads_k, dim, page, dtype, by_head=page == 16)
    for splits in (None, 5):
        check_on_gpu(case, splits)
    if page == 16:
        check_on_gpu(case, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8])
@pytest.mark.parametrize(
    ("queries", "window", "layout"),
    [(1, 100, "gap"), (4, 0, "interleaved"), (8, 0, "heads first"), (3, 300, "apart")],
)
def test_gpu_queries_windows_and_layouts(
    queries: int, window: int, layout: str, dtype: torch.dtype
) -> None:
    options = {"queries": queries, "window": window, "layout": layout}
    case = on_gpu([2000, 3, 0, 517], 32, 8, 128, 16, dtype, **options)
    check_on_gpu(case)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1e-8, 1e6])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_gpu_queries_beyond_fp16(dtype: torch.dtype, factor: float) -> None:
    case = on_gpu([300, 17], 8, 2, 128, 16, dtype, k_scale=1 / factor)
    case.q *= factor
    check_on_gpu(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8])
def test_gpu_many_splits_of_a_long_sequence(dtype: torch.dtype) -> None:
    case = on_gpu([70000], 8, 1, 128, 64, dtype)
    for splits in (None, 33, 200):
        check_on_gpu(case, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8])
def test_gpu_every_tile_worth_tuning_is_right(dtype: torch.dtype) -> None:
    case = on_gpu([1000, 300], 32, 8, 128, 16, dtype)
    gold, reference = case.gold(), case.reference()
    settings = decode.Settings(*case.settings())
    for keys, warps in ((16, 1), (16, 8), (32, 1), (32, 2), (32, 4)):
        tile = attention_tiles.DecodeTile(keys, warps, 3, 4, 64)
        found = decode.launch(tile, case.q, case.k_cache, case.v_cache, settings)
        testing.assert_within_budget(found, gold, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_gpu_captured_graph_follows_lengths_and_pages(dtype: torch.dtype) -> None:
    case = on_gpu([900, 40, 1300], 32, 8, 128, 16, dtype)
    arrivals = make_arrivals(3, 32, case.q.device)
    args = (case.q, case.k_cache, case.v_cache, *case.settings(arrivals))
    torch.ops.taut.paged_decode(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = torch.ops.taut.paged_decode(*args)
    for contexts, turned in (([900, 40, 1300], 0), ([1, 0, 257], 0), ([16, 900, 33], 1)):
        case.context_lens.copy_(torch.tensor(contexts))
        case.block_table.copy_(case.block_table.roll(turned, 0))
        case.q.mul_(0.9)
        graph.replay()
        testing.assert_within_budget(o, case.gold(), case.reference())
        assert not arrivals.any()


@pytest.mark.gpu
def test_gpu_conversions_by_assembly_and_by_arithmetic_are_the_same() -> None:
    import triton.language as tl

    from taut_kernels.attention.decode.values_jit import halves

    @triton.jit  # type: ignore[untyped-decorator]
    def convert(words_ptr, out_ptr, FORMAT: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
        offs = tl.arange(0, 65536)
        even, odd = halves(tl.load(words_ptr + offs), FORMAT, ASM)
        tl.store(out_ptr + 2 * offs, even)
        tl.store(out_ptr + 2 * offs + 1, odd)

    words = torch.arange(65536, device="cuda").to(torch.int16)
    for dtype, name in ((FP8, "fp8"), (INT8, "int8")):
        wanted = words.view(dtype).to(torch.float16)
        real = ~wanted.isnan()
        for asm in (True, False):
            out = torch.empty(131072, dtype=torch.float16, device="cuda")
            convert[(1,)](words, out, name, asm, num_warps=8)
            assert torch.equal(out[real].view(torch.int16), wanted[real].view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("sequences", [3, 16, 40, 100, 300])
def test_gpu_graph_for_a_long_bound_is_right_at_every_length(
    sequences: int, dtype: torch.dtype
) -> None:
    lens = [9000, 1025, 0, 255, 1024, 2049, 1][:sequences] + [192] * (sequences - 7)
    case = on_gpu(lens, 32, 8, 128, 16, dtype)
    arrivals = make_arrivals(sequences, 32, case.q.device)
    settings = decode.Settings(*case.settings(arrivals))._replace(max_context=131072)
    out, args = torch.empty_like(case.q), (case.q, case.k_cache, case.v_cache, settings)
    decode.decode_into(out, *args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.decode_into(out, *args)
    for shift in (0, 1, 2):
        case.context_lens.copy_(torch.tensor([max(n - shift, 0) for n in lens]))
        out.fill_(float("nan"))
        graph.replay()
        first = out.clone()
        graph.replay()
        testing.assert_within_budget(first, case.gold(), case.reference())
        assert torch.equal(out, first)
        assert not arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8])
@pytest.mark.parametrize(("queries", "window"), [(1, 0), (1, 300), (4, 100), (8, 0)])
def test_gpu_shares_of_uneven_lengths(dtype: torch.dtype, queries: int, window: int) -> None:
    options = {"queries": queries, "window": window}
    for lens in ([queries, 5000, 700, 64, 65, 1023, queries], [queries] * 9 + [3000]):
        case = on_gpu(lens, 8, 2, 128, 16, dtype, **options)
        gold, reference = case.gold(), case.reference()
        arrivals = make_arrivals(len(lens), 8, case.q.device, queries)
        settings = decode.Settings(*case.settings(arrivals))
        for shares, load in ((1, "small"), (2, "large"), (33, "large"), (300, "many")):
            tile = attention_tiles.decode(torch.cuda.get_device_name(), 128, dtype.itemsize, load)
            found = decode.launch(tile, case.q, case.k_cache, case.v_cache, settings, shares=shares)
            again = decode.launch(tile, case.q, case.k_cache, case.v_cache, settings, shares=shares)
            testing.assert_within_budget(found, gold, reference)
            assert torch.equal(found, again)
            assert not arrivals.any()


@pytest.mark.gpu
def test_gpu_shares_with_lengths_beyond_the_table() -> None:
    case = on_gpu([320, 40, 160, 16], 8, 2, 64, 16, torch.bfloat16)
    case = dataclasses.replace(case, block_table=case.block_table[:, :20].contiguous())
    case.context_lens.copy_(torch.tensor([2**31 - 1, -(2**31), 160, 0]))
    settings = decode.Settings(*case.settings())
    for load in attention_tiles.LOADS:
        tile = attention_tiles.decode(None, 64, 2, load)
        found = decode.launch(tile, case.q, case.k_cache, case.v_cache, settings, shares=40)
        testing.assert_within_budget(found, case.gold(), case.reference())
