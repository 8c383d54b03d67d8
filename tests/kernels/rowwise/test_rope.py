"""`taut::rope` and `rope_apart`: specification, interpreter, op contract, compiler, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from taut_bench import testing
from taut_kernels.norm import rms_norm  # noqa: F401 (registers what is called below)
from taut_kernels.rope import op as rp
from taut_kernels.rope import rope_launch
from taut_kernels.rope.op import rope, rope_apart

INTERPRET = Path(__file__).with_name("interpret_fused.py")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def make(
    T: int, Hq: int, Hk: int, D: int, R: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions [T], q, k and v beside each other [T, (Hq + 2 Hk) D], and the cache."""
    generator = torch.Generator().manual_seed(T)
    qkv = torch.randn(T, (Hq + 2 * Hk) * D, generator=generator).to(dtype)
    angles = torch.rand(70, R // 2, generator=generator) * 6.28
    cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    positions = torch.randint(0, 70, (T,), generator=generator)
    return positions.to(device), qkv.to(device), cache.to(device)


def split(qkv: torch.Tensor, Hq: int, Hk: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    return qkv[:, : Hq * D], qkv[:, Hq * D : (Hq + Hk) * D]


def gold(
    x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, D: int, neox: bool
) -> torch.Tensor:
    """Turn each pair as a complex number, in fp64."""
    R = cache.shape[1]
    y = x.double().view(x.shape[0], -1, D).clone()
    cos, sin = cache.double()[positions].chunk(2, dim=1)
    turn = torch.complex(cos, sin)[:, None]
    a, b = (slice(0, R // 2), slice(R // 2, R)) if neox else (slice(0, R, 2), slice(1, R, 2))
    turned = torch.complex(y[..., a], y[..., b]) * turn
    y[..., a], y[..., b] = turned.real, turned.imag
    return y.view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [False, True])
def test_reference_turns_pairs(dtype: torch.dtype, neox: bool) -> None:
    positions, qkv, cache = make(7, 3, 1, 64, 32, dtype)
    q, k = split(qkv, 3, 1, 64)
    expected = [gold(x, positions, cache, 64, neox) for x in (q, k)]
    untouched = qkv[:, 4 * 64 :].clone()
    rp.rope_ref(positions, q.unflatten(1, (-1, 64)), k.unflatten(1, (-1, 64)), cache, neox)
    for found, wanted in zip((q, k), expected, strict=True):
        assert testing.max_error(found, wanted) <= torch.finfo(dtype).eps * wanted.abs().max()
    assert torch.equal(qkv[:, 4 * 64 :], untouched)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("with_k", [False, True])
@pytest.mark.parametrize("rotated", [0, 20, 32])
def test_apart_has_the_bits_of_in_place_and_leaves_its_operands(
    rotated: int, with_k: bool, neox: bool
) -> None:
    positions, qkv, cache = make(5, 3, 2, 32, rotated, torch.bfloat16)
    before = qkv.clone()
    q, k = split(qkv, 3, 2, 32)
    found = rope_apart(positions, q, k if with_k else None, cache, head_dim=32, neox=neox)
    assert torch.equal(qkv, before)
    rope(positions, q, k if with_k else None, cache, head_dim=32, neox=neox)
    assert torch.equal(found[0], q)
    assert found[0].is_contiguous()
    if with_k:
        assert found[1] is not None
        assert torch.equal(found[1], k)
        assert found[1].is_contiguous()
    else:
        assert found[1] is None
    folded = rope_apart(positions, before[:, :96].unflatten(1, (3, 32)), None, cache, head_dim=32)
    assert folded[0].shape == (5, 3, 32)


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
def test_interpreted_kernel(run_checks: Any) -> None:
    process = run_checks(INTERPRET, "rotations", env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == ["rotations", "20"]


@pytest.mark.parametrize("with_k", [False, True])
def test_op_contract(with_k: bool) -> None:
    positions, qkv, cache = make(3, 4, 2, 32, 32, torch.bfloat16)
    q, k = (x.unflatten(1, (-1, 32)).contiguous() for x in split(qkv, 4, 2, 32))
    arguments = (positions, q, k if with_k else None, cache, True)
    torch.library.opcheck(torch.ops.taut.rope.default, arguments)


@pytest.mark.parametrize("with_k", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_op_contract_apart(contiguous: bool, with_k: bool) -> None:
    positions, qkv, cache = make(3, 4, 2, 32, 20, torch.bfloat16)
    q, k = (x.unflatten(1, (-1, 32)) for x in split(qkv, 4, 2, 32))
    if contiguous:
        q, k = q.contiguous(), k.contiguous()
    arguments = (positions, q, k if with_k else None, cache, True)
    torch.library.opcheck(torch.ops.taut.rope_apart.default, arguments)


@pytest.mark.parametrize("apart", [False, True])
def test_inductor_copies_nothing_around_the_op_apart(apart: bool) -> None:
    _, _, cache = make(1, 4, 2, 32, 32, torch.bfloat16)

    def layer(positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        norm = torch.ops.taut.rms_norm.plain  # calls, in the place of products and a cache write
        q, k, v = norm(x, None, 1e-5).split([128, 64, 64], dim=-1)
        if apart:
            q, k = rope_apart(positions, q, k, cache, head_dim=32)
        else:
            rope(positions, q, k, cache, head_dim=32)
        return norm(q, None, 1e-5), norm(k, None, 1e-5), v

    positions, x, _ = make(5, 4, 2, 32, 32, torch.bfloat16)
    torch._dynamo.reset()
    # As vLLM sets it.
    with torch.no_grad(), inductor_config.patch(enable_auto_functionalized_v2=False):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        found, codes = run_and_get_code(compiled, positions, x)
        wanted = layer(positions, x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    calls = codes[0][codes[0].index("def call") :]
    assert calls.count("torch.ops.taut.rope") > 0
    # Inductor's own kernels, which could only copy here: none, and some around the op in place.
    assert ("cpp_fused" in calls or ".copy_(" in calls) == (not apart)


def test_compiles_without_graph_breaks_on_views_of_one_tensor() -> None:
    _, _, cache = make(1, 4, 2, 32, 32, torch.bfloat16)

    def layer(positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        q, k = split(qkv, 4, 2, 32)
        rope(positions, q, k, cache, head_dim=32)
        return qkv * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (3, 5, 9):
        positions, qkv, _ = make(T, 4, 2, 32, 32, torch.bfloat16)
        ours, theirs = qkv.clone(), qkv.clone()
        assert torch.equal(compiled(positions, ours), layer(positions, theirs))
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, qkv)


def test_takes_heads_flat_or_not() -> None:
    positions, qkv, cache = make(3, 4, 2, 32, 16, torch.float16)
    flat, folded = qkv.clone(), qkv.clone()
    rope(positions, *split(flat, 4, 2, 32), cache, head_dim=32, neox=False)
    q, k = (x.unflatten(1, (-1, 32)) for x in split(folded, 4, 2, 32))
    rope(positions, q, k, cache, head_dim=32, neox=False)
    assert torch.equal(flat, folded)
    rope(torch.zeros(0, dtype=torch.int64), flat[:0, :128], None, cache, head_dim=32)


HALF = torch.float16
BAD: list[tuple[dict[str, Any], str]] = [
    ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions must be \[T\] torch.int64"),
    ({"positions": torch.zeros(3, 1, dtype=torch.int64)}, r"positions must be \[T\] torch.int64"),
    ({"positions": torch.zeros(6, dtype=torch.int64)[::2]}, "positions must be contiguous"),
    ({"positions": torch.zeros(4, dtype=torch.int64)}, r"q must have shape \[4, heads, 32\]"),
    ({"positions": torch.zeros(3, dtype=torch.int64, device="meta")}, "positions must be on cpu"),
    ({"q": torch.zeros(3, 128, dtype=torch.float64)}, "q must be bfloat16, float16 or float32"),
    ({"q": torch.zeros(3, 100, dtype=HALF)}, "q must have shape"),
    ({"q": torch.zeros(3, 4, 64, dtype=HALF)}, "q must have 32 columns a head, got 64"),
    ({"q": torch.zeros(128, 3, dtype=HALF).t()}, "q must have its columns next to each other"),
    ({"k": torch.zeros(3, 64)}, "k must be torch.float16, got torch.float32"),
    ({"k": torch.zeros(3, 64, dtype=HALF, device="meta")}, "k must be on cpu"),
    ({"cos_sin_cache": torch.zeros(9, 15, dtype=HALF)}, "cos_sin_cache must have shape"),
    ({"cos_sin_cache": torch.zeros(9, 64, dtype=HALF)}, "more than head_dim 32"),
    ({"cos_sin_cache": torch.zeros(9, 32, dtype=torch.bfloat16)}, "cos_sin_cache must be torch"),
    ({"cos_sin_cache": torch.zeros(9, 64, dtype=HALF)[:, ::2]}, "cos_sin_cache must be contiguous"),
    ({"cos_sin_cache": torch.zeros(9, 32, dtype=HALF, device="meta")}, "cos_sin_cache must be on"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    positions, qkv, cache = make(3, 4, 2, 32, 32, torch.float16)
    q, k = split(qkv, 4, 2, 32)
    arguments = {"positions": positions, "q": q, "k": k, "cos_sin_cache": cache, "head_dim": 32}
    rope(**arguments)  # type: ignore[arg-type]
    for op in (rope, rope_apart):
        with pytest.raises(ValueError, match=message):
            op(**arguments | change)  # type: ignore[arg-type]


def test_rejects_a_tensor_that_wants_a_gradient() -> None:
    positions, qkv, cache = make(3, 4, 2, 32, 32, torch.float32)
    q = qkv[:, :128].clone().requires_grad_()
    with pytest.raises(ValueError, match="rope is forward only"):
        rope(positions, q, None, cache, head_dim=32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("wide_cache", [False, True])
@pytest.mark.parametrize(
    ("T", "Hq", "Hk", "D", "R"),
    [(1, 32, 8, 128, 128), (333, 28, 4, 128, 128), (70, 9, 3, 64, 64), (17, 16, 16, 96, 40)],
)
def test_gpu_kernel_matches_reference(
    T: int, Hq: int, Hk: int, D: int, R: int, wide_cache: bool, neox: bool, dtype: torch.dtype
) -> None:
    positions, qkv, cache = make(T, Hq, Hk, D, R, dtype, "cuda")
    if wide_cache:
        cache = cache.float()
    expected = qkv.clone()
    q, k = (x.unflatten(1, (-1, D)) for x in split(expected, Hq, Hk, D))
    exact = [gold(x, positions, cache, D, neox) for x in split(qkv, Hq, Hk, D)]
    rp.rope_ref(positions, q, k, cache, neox)
    rope(positions, *split(qkv, Hq, Hk, D), cache, head_dim=D, neox=neox)
    pairs = zip(split(qkv, Hq, Hk, D), split(expected, Hq, Hk, D), exact, strict=True)
    for found, reference, wanted in pairs:
        testing.assert_within_budget(found, wanted, reference)
    assert torch.equal(qkv[:, (Hq + Hk) * D :], expected[:, (Hq + Hk) * D :])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("with_k", [False, True])
@pytest.mark.parametrize(
    ("T", "Hq", "Hk", "D", "R"),
    [
        (1, 32, 8, 128, 128),
        (256, 28, 4, 128, 128),
        (257, 28, 4, 128, 64),
        (70, 9, 3, 64, 16),
        (17, 16, 16, 96, 40),
        (3, 2, 1, 64, 0),
    ],
)
def test_gpu_apart_has_the_bits_of_in_place_and_leaves_its_operands(
    T: int, Hq: int, Hk: int, D: int, R: int, with_k: bool, neox: bool, dtype: torch.dtype
) -> None:
    positions, qkv, cache = make(T, Hq, Hk, D, R, dtype, "cuda")
    for shift in (0, 3):  # the second: addresses that are no multiple of 16
        slices = torch.nn.functional.pad(qkv, (shift, 5))[:, shift:]
        before = slices.clone()
        q, k = split(slices, Hq, Hk, D)
        with testing.nan_poison():
            found = rope_apart(positions, q, k if with_k else None, cache, head_dim=D, neox=neox)
        assert torch.equal(slices, before)
        rope(positions, q, k if with_k else None, cache, head_dim=D, neox=neox)
        assert torch.equal(found[0], q)
        if with_k:
            assert found[1] is not None
            assert torch.equal(found[1], k)


AWKWARD_TOKENS = (
    "zeros",
    "minus zeros",
    "subnormal",
    "large",
    "one outlier",
    "small beside large",
    "not turned",
    "a quarter turn",
)


def awkward_tokens(
    Hq: int, Hk: int, D: int, R: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return operands as :func:`make`, token i of which is AWKWARD_TOKENS[i]."""
    T = len(AWKWARD_TOKENS)
    positions, qkv, cache = make(T, Hq, Hk, D, R, dtype)
    positions = torch.arange(T)
    token = dict(zip(AWKWARD_TOKENS, qkv, strict=True))
    information = torch.finfo(dtype)
    # Two of them turned by an eighth reach 0.71 of the largest.
    large = information.max / 2
    token["zeros"].zero_()
    token["minus zeros"].fill_(-0.0)
    token["subnormal"].fill_(information.smallest_normal / 4)
    token["large"].copy_(token["not turned"].sign() * large)
    token["one outlier"][D + 1] = large
    token["small beside large"].fill_(large)
    token["small beside large"][::2] = information.smallest_normal
    for name, cos, sin in (("not turned", 1.0, 0.0), ("a quarter turn", 0.0, 1.0)):
        row = cache[AWKWARD_TOKENS.index(name)]
        row[: R // 2], row[R // 2 :] = cos, sin
    return positions.to(device), qkv.to(device), cache.to(device)


def check_awkward_tokens(R: int, neox: bool, dtype: torch.dtype) -> None:
    Hq, Hk, D = 28, 4, 128
    positions, qkv, cache = awkward_tokens(Hq, Hk, D, R, dtype, "cuda")
    expected, before = qkv.clone(), qkv.clone()
    exact = [gold(x, positions, cache, D, neox) for x in split(qkv, Hq, Hk, D)]
    rp.rope_ref(
        positions, *(x.unflatten(1, (-1, D)) for x in split(expected, Hq, Hk, D)), cache, neox
    )
    with testing.nan_poison():
        apart = rope_apart(positions, *split(qkv, Hq, Hk, D), cache, head_dim=D, neox=neox)
    assert torch.equal(qkv, before)
    rope(positions, *split(qkv, Hq, Hk, D), cache, head_dim=D, neox=neox)
    sides = (split(qkv, Hq, Hk, D), apart, split(expected, Hq, Hk, D), exact)
    for found, new, reference, wanted in zip(*sides, strict=True):
        assert new is not None
        assert torch.equal(new, found)
        for i, name in enumerate(AWKWARD_TOKENS):
            one = slice(i, i + 1)
            testing.assert_within_budget(found[one], wanted[one], reference[one])
            assert bool(found[one].any()) == ("zeros" not in name), name
    still = AWKWARD_TOKENS.index("not turned")
    assert torch.equal(qkv[still], before[still])
    assert torch.equal(qkv[:, (Hq + Hk) * D :], before[:, (Hq + Hk) * D :])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [False, True])
def test_gpu_awkward_tokens(neox: bool, dtype: torch.dtype) -> None:
    """Each token is held to a budget of its own, in place and apart."""
    for R in (128, 40):
        check_awkward_tokens(R, neox, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [False, True])
def test_gpu_op_contract(apart: bool) -> None:
    """The fake results against the launchers' own, which allocate without the dispatcher."""
    positions, qkv, cache = make(3, 4, 2, 32, 20, torch.bfloat16, "cuda")
    op = torch.ops.taut.rope_apart.default if apart else torch.ops.taut.rope.default
    q, k = (x.unflatten(1, (-1, 32)) for x in split(qkv, 4, 2, 32))
    # In place opcheck needs operands that share no memory.
    views = (
        ((q, k), (q.contiguous(), k.contiguous())) if apart else ((q.contiguous(), k.contiguous()),)
    )
    for first, second in views:
        for other in (second, None):
            torch.library.opcheck(op, (positions, first, other, cache, True))


@pytest.mark.gpu
@pytest.mark.parametrize("neox", [False, True])
def test_gpu_values_are_vllms(neox: bool) -> None:
    ops = pytest.importorskip(
        "vllm._custom_ops", reason="vLLM is not installed", exc_type=ImportError
    )
    positions, qkv, cache = make(333, 32, 8, 128, 128, torch.bfloat16, "cuda")
    theirs = qkv.clone()
    ops.rotary_embedding(positions, *split(theirs, 32, 8, 128), 128, cache, neox)
    rope(positions, *split(qkv, 32, 8, 128), cache, head_dim=128, neox=neox)
    # A fused multiply-add there, two roundings of fp32 here: a rounding to bf16 may differ.
    assert (qkv != theirs).float().mean() < 0.001
    assert torch.allclose(qkv.float(), theirs.float(), rtol=2**-6, atol=2**-7)


@pytest.mark.gpu
def test_gpu_graph_replays_on_new_data() -> None:
    positions, qkv, cache = make(64, 32, 8, 128, 128, torch.bfloat16, "cuda")
    rope(positions, *split(qkv, 32, 8, 128), cache, head_dim=128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope(positions, *split(qkv, 32, 8, 128), cache, head_dim=128)
    fresh = torch.randn_like(qkv)
    qkv.copy_(fresh)
    positions.copy_(torch.randint(0, 70, (64,), device="cuda"))
    graph.replay()
    rope(positions, *split(fresh, 32, 8, 128), cache, head_dim=128)
    assert torch.equal(qkv, fresh)


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [128, 64])
def test_gpu_apart_follows_new_data_in_a_graph(rotated: int) -> None:
    positions, qkv, cache = make(64, 32, 8, 128, rotated, torch.bfloat16, "cuda")
    rope_apart(positions, *split(qkv, 32, 8, 128), cache, head_dim=128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, k = rope_apart(positions, *split(qkv, 32, 8, 128), cache, head_dim=128)
    assert k is not None
    for _ in range(3):
        qkv.copy_(torch.randn_like(qkv))
        positions.copy_(torch.randint(0, 70, (64,), device="cuda"))
        fresh = qkv.clone()
        graph.replay()
        assert torch.equal(qkv, fresh)
        rope(positions, *split(fresh, 32, 8, 128), cache, head_dim=128)
        assert torch.equal(q, fresh[:, : 32 * 128])
        assert torch.equal(k, fresh[:, 32 * 128 : 40 * 128])


def test_positions_of_another_type_have_a_plan_of_their_own() -> None:
    """A kernel compiled for 8-byte positions would read 4-byte ones wrongly."""
    q, table = torch.zeros(2, 4, 64), torch.zeros(8, 64)
    calls = {
        rope_launch.call_of(torch.zeros(2, dtype=dtype), q, None, table, True, False)
        for dtype in (torch.int32, torch.int64)
    }
    assert len(calls) == 2
