"""`taut::cache_write`: specification, interpreter, op contract, bad input, GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench.instruments.forms import attention as attention_forms
from taut_kernels.attention.cache_write import op as cw
from taut_kernels.attention.cache_write.op import cache_write
from taut_kernels.attention.decode import op as decode
from taut_kernels.launch import early_start
from taut_kernels.norm import rms_norm_launch
from taut_kernels.rowwise.tiles import FusedTile

INTERPRET = Path(__file__).with_name("interpret_cache_write.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
BF16, HALF, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def rows(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values cut out of one projection with two query heads a key head."""
    generator = torch.Generator(device).manual_seed(tokens)
    width = 4 * heads * dim
    qkv = torch.randn(tokens, width, generator=generator, device=device).to(dtype)
    k, v = qkv[:, width // 2 :].unflatten(1, (2, heads, dim)).unbind(1)
    return k, v


def caches(
    pages: int, page: int, heads: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as vLLM lays them out, halves of a tensor; no element is a number."""
    both = torch.empty(pages, heads, page, 2 * dim, dtype=dtype, device=device)
    both.view(torch.uint8).fill_(0xFF)
    both = both.transpose(1, 2)
    return both[..., :dim], both[..., dim:]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).clone()


def nearest_e4m3(value: float) -> int:
    """Return the code of a number, found among all of them; the even one of two as near.

    A NaN has no sign there.
    """
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).double().tolist()
    if math.isnan(value):
        return 0x7F
    size = min(abs(value), 448.0)
    code = min(range(127), key=lambda at: (abs(numbers[at] - size), at % 2))
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


# --- the specification ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, HALF, FP8])
def test_reference_puts_each_token_into_its_slot(dtype: torch.dtype) -> None:
    k, v = rows(6, 3, 8, HALF if dtype == FP8 else dtype)
    k_cache, v_cache = caches(4, 5, 3, 8, dtype)
    before = bits(k_cache).view(4, 5, 3, -1), bits(v_cache).view(4, 5, 3, -1)
    slots, scale = [7, -1, 19, 0], 0.3
    scales = (torch.tensor(scale),) * 2 if dtype == FP8 else (None, None)
    cw.cache_write_ref(k, v, k_cache, v_cache, torch.tensor(slots), *scales)
    for x, cache, old in ((k, k_cache, before[0]), (v, v_cache, before[1])):
        wanted = old.clone()
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            if dtype == FP8:
                quotients = (x[token].float() / scales[0]).flatten().tolist()  # type: ignore[operator]
                codes = [nearest_e4m3(value) for value in quotients]
                row = torch.tensor(codes, dtype=torch.uint8).view(3, 8)
            else:
                row = x[token].contiguous().view(torch.uint8)
            wanted[slot // 5, slot % 5] = row
        assert torch.equal(bits(cache).view(wanted.shape), wanted)


def test_fp8_saturates_and_keeps_a_nan_by_every_heads_own_scale() -> None:
    special = [0.0, -0.0, 447.0, 464.0, 1e4, -1e4, math.inf, -math.inf, math.nan, -math.nan]
    special += [2**-10, -(2**-11), 17.0, 19.0, 0.0146484375, 2**-24]  # ties and next to nothing
    x = torch.tensor(special, dtype=HALF).expand(1, 3, 16).contiguous()
    k_scale, v_scale = torch.tensor([1.0, 0.25, 3.0]), torch.tensor([7.5])
    k_cache, v_cache = caches(1, 16, 3, 16, FP8)
    cache_write(x, x, k_cache, v_cache, torch.tensor([4]), k_scale=k_scale, v_scale=v_scale)
    for cache, scale in ((k_cache, k_scale), (v_cache, v_scale.expand(3))):
        found = cache[0, 4].contiguous().view(torch.uint8).tolist()
        for head in range(3):
            quotients = (x[0, head].float() / scale[head]).tolist()
            codes = [nearest_e4m3(value) for value in quotients]
            assert found[head] == codes
    assert bits(k_cache[0, :4]).eq(0xFF).all()


def test_padding_is_neither_read_nor_written() -> None:
    k, v = (x.clone() for x in rows(5, 2, 64, HALF))
    k[3:], v[3:] = math.nan, math.nan
    k_cache, v_cache = (torch.zeros(2, 16, 2, 64, dtype=HALF) for _ in range(2))
    cache_write(k, v, k_cache, v_cache, torch.tensor([-1, 30, -(2**62)]))
    assert torch.equal(k_cache[1, 14], k[1])
    assert torch.equal(v_cache[1, 14], v[1])
    assert k_cache.count_nonzero() == k[1].count_nonzero()
    assert not v_cache.isnan().any()
    before = k_cache.clone()
    cache_write(k, v, k_cache, v_cache, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(k_cache, before)


def test_what_is_written_is_what_decode_reads() -> None:
    k, v = rows(20, 2, 64, HALF)
    k_cache, v_cache = caches(3, 16, 2, 64, HALF)
    slots = torch.cat([torch.arange(32, 48), torch.arange(0, 4)])
    cache_write(k, v, k_cache, v_cache, slots)
    table, lens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    q = torch.randn(1, 4, 64).half()
    found = decode.paged_decode(q, k_cache, v_cache, table, lens, scale=0.1)
    weights = torch.einsum("hd,thd->ht", q[0].double(), k.double().repeat_interleave(2, 1)) * 0.1
    wanted = weights.softmax(1)[:, None] @ v.double().repeat_interleave(2, 1).transpose(0, 1)
    assert (found[0].double() - wanted[:, 0]).abs().max() < 2e-3


# --- the kernel and the op -----------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize(
    ("check", "count"), [("shapes", 24), ("padding", 3), ("large_slots", 1), ("codes", 4)]
)
def test_interpreted_kernel(check: str, count: int, run_checks: Any) -> None:
    process = run_checks(INTERPRET, check, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


def division_by_steps(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide as `_cache_write_jit.quotient` does; a fused sum is exact in 80 bits but rarely."""
    numpy = pytest.importorskip("numpy")
    wide = numpy.longdouble

    def fma(a: Any, b: Any, c: Any) -> Any:
        return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(numpy.float32)

    a, s = x.abs().numpy(), scale.numpy()
    a = numpy.where(a > s * numpy.float32(512), s * numpy.float32(512), a)
    r = numpy.float32(1) / s
    q = a * r
    for _ in range(2):
        q = fma(fma(-q, s, a), r, q)
    return torch.copysign(torch.from_numpy(q), x)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_the_steps_of_the_kernels_division_round_as_a_division_does() -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.arange(65536).to(torch.int16)
    x = torch.cat([patterns.view(BF16).float(), patterns.view(HALF).float()])
    odd = torch.tensor([1.0, 0.1, 2**-60, 2.0**60, 1.9999999, 3e-4, 448.0, 1 / 448])
    for scale in torch.cat([odd, torch.rand(8, generator=generator).exp2() - 0.99]):
        wanted = (x / scale).clamp(-448, 448)
        found = division_by_steps(x, scale).clamp(-448, 448)
        seen = wanted.abs() >= 2**-12  # half of the least e4m3 is 2**-10
        assert torch.equal(found[seen], wanted[seen])
        rest = ~seen & ~wanted.isnan()
        assert (found[rest].abs() < 2**-11).all()
        assert torch.equal(found[rest].signbit(), wanted[rest].signbit())
        assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("dtype", [HALF, FP8])
def test_op_contract(dtype: torch.dtype) -> None:
    k, v = (x.contiguous() for x in rows(4, 2, 64, HALF))
    k_cache, v_cache = (torch.zeros(2, 16, 2, 64).to(dtype) for _ in range(2))
    scales = (torch.ones(2), torch.ones(1)) if dtype == FP8 else (None, None)
    arguments = (k, v, k_cache, v_cache, torch.tensor([3, -1, 20]), *scales)
    if dtype == FP8:
        # opcheck's schema test multiplies tensors, which CPU e4m3 cannot.
        tests = ("test_faketensor",)
        torch.library.opcheck(torch.ops.taut.cache_write.default, arguments, test_utils=tests)
    else:
        torch.library.opcheck(torch.ops.taut.cache_write.default, arguments)


def test_compiles_without_graph_breaks_on_halves_of_one_tensor() -> None:
    def layer(k: torch.Tensor, v: torch.Tensor, both: torch.Tensor, slots: Any) -> torch.Tensor:
        cache_write(k * 2, v, both[..., :64], both[..., 64:], slots)
        return both + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 9):
        k, v = rows(tokens, 2, 64, BF16)
        ours, theirs = (torch.zeros(2, 16, 2, 128, dtype=BF16) for _ in range(2))
        slots = torch.arange(tokens - 1) * 3
        assert torch.equal(compiled(k, v, ours, slots), layer(k, v, theirs, slots))
        assert torch.equal(ours, theirs)
        assert ours.any()


K, V = rows(4, 2, 64, HALF)
CACHE = torch.zeros(3, 16, 2, 64, dtype=HALF)
CODES = CACHE.to(FP8)
BOTH = {"k_cache": CODES, "v_cache": CODES}
NEAR = torch.zeros(4, 2, 128, dtype=HALF)[..., ::2]
FAR = torch.empty_strided((4, 2, 64), (64, 2**30, 1), dtype=HALF, device="meta")
FAR_CACHE = torch.empty_strided((3, 16, 2, 64), (0, 2**27, 0, 1), dtype=HALF, device="meta")
BAD: list[tuple[dict[str, Any], str]] = [
    ({"k": K[0]}, r"k must be \[T, Hk, D\], got shape \(2, 64\)"),
    ({"k": K.float()}, "k must be bfloat16 or float16, got torch.float32"),
    ({"k": NEAR}, "k must have the elements of a head next to each other"),
    ({"v": V[None]}, r"v must be \[T, Hk, D\]"),
    ({"v": V.bfloat16()}, r"v must be as k, \(4, 2, 64\) torch.float16 on cpu, got .*bfloat16"),
    ({"v": V[:3]}, r"v must be as k, .* got \(3, 2, 64\)"),
    ({"v": V[..., :32]}, r"v must be as k, .* got \(4, 2, 32\)"),
    ({"v": V.to("meta")}, "v must be as k, .* on meta"),
    ({"v": NEAR}, "v must have the elements of a head next to each other"),
    ({"v": V.clone().requires_grad_()}, r"forward only: call it under torch.no_grad\(\) \(v\)"),
    ({"k": FAR, "v": FAR}, "k: a token spans 2147483648 elements"),
    ({"k_cache": CACHE[0]}, r"k_cache must be \[pages, page size, Hk, D\], got \(16, 2, 64\)"),
    ({"k_cache": CACHE[:, :0]}, r"k_cache must be \[pages, page size, Hk, D\]"),
    ({"k_cache": CACHE.to(torch.int8)}, "k_cache must be torch.float16 as k or .* torch.int8"),
    ({"v_cache": CACHE.bfloat16()}, "v_cache must be torch.float16 as k or float8_e4m3fn"),
    ({"v_cache": CACHE.to("meta")}, "v_cache must be on cpu, got meta"),
    ({"k_cache": CACHE[:, :, :1]}, r"k_cache must be \[pages, page size, 2, 64\] as k"),
    ({"k_cache": CACHE[..., :32]}, r"k_cache must be \[pages, page size, 2, 64\] as k"),
    ({"k_cache": CACHE.repeat(1, 1, 1, 2)[..., ::2]}, "k_cache must have the elements of a head"),
    (
        {"k": K.to("meta"), "v": V.to("meta"), "k_cache": FAR_CACHE},
        "k_cache: a page spans 2147483648 elements, at most",
    ),
    ({"v_cache": CACHE[1:]}, "v_cache must be as k_cache"),
    ({"v_cache": CODES}, "v_cache must be as k_cache"),
    ({"slots": torch.zeros(4, dtype=torch.int32)}, r"slots must be \[S\] int64"),
    ({"slots": torch.zeros(2, 2, dtype=torch.int64)}, r"slots must be \[S\] int64, got \(2, 2\)"),
    ({"slots": torch.zeros(5, dtype=torch.int64)}, "slots has 5 tokens, more than the 4 of k"),
    ({"slots": torch.zeros(4, dtype=torch.int64)[::2]}, "slots must be contiguous and on cpu"),
    ({"slots": torch.zeros(4, dtype=torch.int64, device="meta")}, "slots must be .* on cpu"),
    ({"k_scale": torch.ones(1)}, "k_scale is of fp8 caches, k_cache is torch.float16"),
    ({"v_scale": torch.ones(3), **BOTH}, "v_scale must be fp32 with 1 or 2 elements"),
    ({"k_scale": torch.ones(2).double(), **BOTH}, "k_scale must be fp32 with 1 or 2 elements"),
    ({"v_scale": torch.ones(1, device="meta"), **BOTH}, "v_scale must be on cpu, got meta"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"k": K, "v": V, "k_cache": CACHE.clone(), "v_cache": CACHE.clone()}
    arguments["slots"] = torch.tensor([1, 2, 3])
    cache_write(**arguments)
    with pytest.raises(ValueError, match=message):
        cache_write(**arguments | change)


def test_variants_cover_both_formats_of_both_targets() -> None:
    found = list(attention_forms.cache_write_variants())
    assert len(found) == len({(variant.label, variant.target) for variant in found})
    for target, formats in (("sm_80", {"16 bit", "fp8 codes"}), ("sm_90", {"16 bit", "fp8"})):
        forms = [variant for variant in found if target == variant.target]
        assert {variant.constants["FORMAT"] for variant in forms} == formats
        assert {variant.constants["PDL"] for variant in forms} == {target == "sm_90"}
        assert {"launch_pdl" in variant.options for variant in forms} == {target == "sm_90"}


# --- on a card -----------------------------------------------------------------------------------


def scales_of(dtype: torch.dtype, heads: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if dtype != FP8:
        return None, None
    return torch.rand(heads, device="cuda") + 0.01, torch.tensor(0.37, device="cuda")


def drawn_slots(tokens: int, pages: int, page: int) -> torch.Tensor:
    slots = torch.randperm(pages * page, device="cuda")[:tokens]
    slots[tokens // 2 :: 7] = -1
    return slots if tokens > 1 else slots.abs()


def check_on_gpu(
    k: torch.Tensor, v: torch.Tensor, found: Any, slots: torch.Tensor, scales: Any
) -> None:
    wanted = [cache.clone(memory_format=torch.preserve_format) for cache in found]
    cw.cache_write_ref(k, v, *wanted, slots, *scales)
    cache_write(k, v, *found, slots, k_scale=scales[0], v_scale=scales[1])
    for mine, reference in zip(found, wanted, strict=True):
        assert torch.equal(bits(mine), bits(reference))


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [None, FP8])
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
@pytest.mark.parametrize(
    ("page", "heads", "dim"),
    [(16, 8, 128), (32, 1, 128), (64, 4, 64), (256, 2, 256), (48, 20, 96), (16, 3, 80)],
)
def test_gpu_kernel_writes_the_references_bits(
    page: int, heads: int, dim: int, tokens: int, dtype: torch.dtype, cached: torch.dtype | None
) -> None:
    pages = 3 + -(-tokens // page)
    k, v = rows(tokens + 5, heads, dim, dtype, "cuda")
    k = k * 300  # many beyond 448
    if tokens > 1:
        k[1], v[1, 0, :3] = torch.nan, torch.tensor([torch.inf, -torch.inf, -0.0])
    found = caches(pages, page, heads, dim, cached or dtype, "cuda")
    slots = drawn_slots(tokens, pages, page)
    check_on_gpu(k, v, found, slots, scales_of(cached or dtype, heads))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_gpu_fp8_has_the_bits_of_a_division_for_every_element_and_many_scales(
    dtype: torch.dtype,
) -> None:
    k = torch.arange(65536, device="cuda").to(torch.int16).view(dtype).view(64, 8, 128)
    found, slots = caches(4, 16, 8, 128, FP8, "cuda"), torch.arange(64, device="cuda")
    torch.manual_seed(0)
    for magnitude in (1.0, 0.1, 2**-60, 2.0**60, 3e-4, 448.0):
        for scale in (torch.full((8,), magnitude), (torch.rand(8) + 0.5) * magnitude):
            check_on_gpu(k, k.flip(0), found, slots, (scale.cuda(), scale.cuda()))


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [BF16, FP8])
def test_gpu_other_layouts(cached: torch.dtype) -> None:
    k, v = rows(9, 8, 128, BF16, "cuda")
    heads_first = v.transpose(0, 1).contiguous().transpose(0, 1)
    scales, slots = scales_of(cached, 8), torch.tensor([3, -1, 77, 0, 40, 5], device="cuda")
    apart = [torch.zeros(5, 16, 8, 128, device="cuda").to(cached) for _ in range(2)]
    check_on_gpu(k, heads_first, apart, slots, scales)
    gap = torch.zeros(5, 16, 8, 136, device="cuda").to(cached)[..., 8:]
    check_on_gpu(k, v, (gap, apart[1]), slots, scales)


@pytest.mark.gpu
def test_gpu_a_cache_beyond_32_bits() -> None:
    k, v = rows(2, 8, 128, BF16, "cuda")
    pages = 2**31 // (16 * 8 * 256) + 2
    both = torch.zeros(pages, 16, 8, 256, dtype=torch.uint8, device="cuda").view(FP8)
    small = [torch.zeros(2, 16, 8, 128, device="cuda").to(FP8) for _ in range(2)]
    far, near = (torch.tensor([page * 16 + 3, 5], device="cuda") for page in (pages - 1, 1))
    cache_write(k, v, both[..., :128], both[..., 128:], far)
    cw.cache_write_ref(k, v, *small, near, None, None)
    for found, wanted in ((both[..., :128], small[0]), (both[..., 128:], small[1])):
        assert torch.equal(bits(found[-1]), bits(wanted[1]))
        assert torch.equal(bits(found[0]), bits(wanted[0]))
    assert not both.view(torch.uint8)[1:-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [BF16, FP8])
def test_gpu_bits_are_vllms(cached: torch.dtype) -> None:
    ops = pytest.importorskip(
        "vllm._custom_ops", reason="vLLM is not installed", exc_type=ImportError
    )
    k, v = rows(70, 8, 128, BF16, "cuda")
    k, v = k * 300, v.clone()
    k[3], v[4] = torch.nan, torch.inf
    slots = drawn_slots(64, 6, 16)
    mine, theirs = (caches(6, 16, 8, 128, cached, "cuda") for _ in range(2))
    scale = torch.tensor(0.37, device="cuda")
    scales = (scale, scale) if cached == FP8 else (None, None)
    name = "fp8" if cached == FP8 else "auto"
    whole = [each.view(torch.uint8) if cached == FP8 else each for each in theirs]
    ops.reshape_and_cache_flash(k, v, *whole, slots, name, scale, scale)
    cache_write(k, v, *mine, slots, k_scale=scales[0], v_scale=scales[1])
    for ours, vllms in zip(mine, theirs, strict=True):
        assert torch.equal(bits(ours), bits(vllms))


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("cached", [BF16, FP8])
def test_gpu_graph_of_kernels_that_start_early_follows_its_data(
    cached: torch.dtype, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rms_norm → cache_write → paged_decode → rms_norm, which must wait for each other."""
    if not early:
        monkeypatch.setattr(early_start, "EARLY_TOKENS", 0)
    sequences, heads, dim, page, most = 16, 8, 128, 16, 512
    pages = sequences * most // page
    hopper = torch.cuda.get_device_capability() == (9, 0)
    tile, late = FusedTile(1, 1024, 4, pdl=hopper), FusedTile(1, 1024, 4)
    x = torch.randn(2 * sequences, heads * dim, device="cuda").bfloat16()
    weight = torch.randn(heads * dim, device="cuda").bfloat16()
    new, out = torch.empty_like(x), torch.empty_like(x[:sequences])
    k, v = new.view(2, sequences, heads, dim).unbind()
    found = caches(pages, page, heads, dim, cached, "cuda")
    for cache in found:
        cache.copy_(torch.zeros((), device="cuda"))
    q = torch.randn(sequences, 1, heads, dim, device="cuda").bfloat16()
    slots = torch.zeros(sequences, dtype=torch.int64, device="cuda")
    table = torch.arange(pages, device="cuda").int().view(sequences, -1)
    lens = torch.ones(sequences, dtype=torch.int32, device="cuda")
    arrivals = decode.make_arrivals(sequences, heads, x.device)
    scales = scales_of(cached, heads)
    settings = decode.Settings(table, lens, *scales, arrivals, most, 0, 0.1)
    o = torch.empty_like(q)

    def run() -> None:
        rms_norm_launch.launch(tile, "same", x, weight, None, 1e-6, new, None)
        cw.launch(k, v, *found, slots, *scales)
        decode.decode_into(o, q, *found, settings)
        flat = o.view(sequences, heads * dim)
        rms_norm_launch.launch(tile, "same", flat, weight, None, 1e-6, out, None)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run()
    for step in range(40):
        x.copy_(torch.randn_like(x) * 10)
        lens.add_(1 + step % 3)
        slots.copy_(table[:, 0] * page + lens - 1)
        for buffer in (new, o, out):
            buffer.fill_(torch.nan)
        wanted = [cache.clone(memory_format=torch.preserve_format) for cache in found]
        graph.replay()
        torch.cuda.synchronize()
        normed = torch.empty_like(new)
        rms_norm_launch.launch(late, "same", x, weight, None, 1e-6, normed, None)
        keys, values = normed.view(2, sequences, heads, dim).unbind()
        cw.cache_write_ref(keys, values, *wanted, slots, *scales)
        for mine, reference in zip(found, wanted, strict=True):
            assert torch.equal(bits(mine), bits(reference))
        again = torch.empty_like(o)
        decode.decode_into(again, q, *found, settings)
        assert torch.equal(o, again)
        last = torch.empty_like(out)
        flat = again.view(sequences, heads * dim)
        rms_norm_launch.launch(late, "same", flat, weight, None, 1e-6, last, None)
        assert torch.equal(out, last)
        assert not arrivals.any()
