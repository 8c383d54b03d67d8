"""`taut::attention`: specification, interpreter, op contract, autograd, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.attention import reference as attention_reference
from taut_kernels.attention.prefill import op as prefill
from taut_kernels.attention.prefill.op import attention

INTERPRET = Path(__file__).with_name("interpret_attention.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
LENGTHS = [(1, 1), (5, 5), (3, 9), (9, 4)]
MASKS = [(False, 0), (True, 0), (True, 3)]


def draw(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float16, device: str = "cpu"
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int, scale: float
) -> torch.Tensor:
    """Attend with loops over heads and queries, straight from the definition."""
    out = torch.zeros_like(q)
    (_, count_q, heads, _), (_, count_k, heads_k, _) = q.shape, k.shape
    for b, h, t in torch.cartesian_prod(
        torch.arange(q.shape[0]), torch.arange(heads), torch.arange(count_q)
    ).tolist():
        place = t + count_k - count_q
        seen = [
            n
            for n in range(count_k)
            if (not causal or n <= place) and (not window or n > place - window)
        ]
        if seen:
            key_head = h // (heads // heads_k)
            weights = torch.softmax(k[b, seen, key_head] @ q[b, t, h] * scale, dim=0)
            out[b, t, h] = weights @ v[b, seen, key_head]
    return out


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("count_q", "count_k"), LENGTHS)
def test_reference_matches_the_formula(
    count_q: int, count_k: int, causal: bool, window: int
) -> None:
    q, k, v = (
        draw(2, count_q, 4, 8).double(),
        draw(2, count_k, 2, 8, seed=1).double(),
        draw(2, count_k, 2, 8, seed=2).double(),
    )
    o, lse = attention_reference.attention_ref(
        q, k, v, None, None, count_q, count_k, causal, window, 0.3
    )
    assert testing.max_error(o, formula(q, k, v, causal, window, 0.3)) < 1e-12
    assert lse.shape == (2, 4, count_q)


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("count_q", "count_k"), LENGTHS)
def test_reference_gradient_is_autograds(
    count_q: int, count_k: int, causal: bool, window: int
) -> None:
    inputs = [
        draw(2, count_q, 4, 8).double().requires_grad_(),
        draw(2, count_k, 2, 8, seed=1).double().requires_grad_(),
        draw(2, count_k, 2, 8, seed=2).double().requires_grad_(),
    ]
    do = draw(2, count_q, 4, 8, seed=3).double()
    wanted = torch.autograd.grad(formula_graph(*inputs, causal, window), inputs, do)
    q, k, v = (x.detach() for x in inputs)
    settings = (None, None, count_q, count_k, causal, window, 0.3)
    o, lse = attention_reference.attention_ref(q, k, v, *settings)
    found = attention_reference.attention_backward_ref(do, q, k, v, o, lse, *settings)
    for ours, right in zip(found, wanted, strict=True):
        assert testing.max_error(ours, right) < 1e-12


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("bounds", [None, [0, 2, 2, 5]])
def test_gradcheck(causal: bool, window: int, bounds: list[int] | None) -> None:
    q, k, v = (draw(5, heads, 3, seed=heads + i).double() for i, heads in enumerate((4, 2, 2)))
    cu, longest = None, 5
    if bounds is None:
        q, k, v = q[None], k[None], v[None]
    else:
        cu, longest = torch.tensor(bounds, dtype=torch.int32), 3
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def call(*operands: torch.Tensor) -> torch.Tensor:
        settings = (cu, cu, longest, longest, causal, window, 0.3)
        o: torch.Tensor = torch.ops.taut.attention(*operands, *settings)[0]
        return o

    assert torch.autograd.gradcheck(call, inputs)


def formula_graph(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int
) -> torch.Tensor:
    """The same in operations that autograd follows; a query that sees no key gives 0."""
    seen = attention_reference.seen_keys(q.shape[1], k.shape[1], causal, window)
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bnhd->bhtn", q, keys) * 0.3
    weights = torch.softmax(scores.masked_fill(~seen, -1e30), dim=-1) * seen
    return torch.einsum("bhtn,bnhd->bthd", weights, values)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_attended_one_by_one(causal: bool) -> None:
    counts = [3, 0, 7, 1]
    bounds = torch.tensor([0, 3, 3, 10, 11], dtype=torch.int32)
    q, k, v = draw(11, 4, 64), draw(11, 2, 64, seed=1), draw(11, 2, 64, seed=2)
    packed, lse = attention(q, k, v, causal=causal, cu_seqlens_q=bounds, max_seqlen_q=7)
    at = 0
    for count in counts:
        alone = slice(at, at + count)
        one, one_lse = attention(q[None, alone], k[None, alone], v[None, alone], causal=causal)
        assert torch.equal(packed[alone], one[0])
        assert torch.equal(lse[:, alone], one_lse[0])
        at += count


@interpreter
@pytest.mark.parametrize(
    ("check", "count"),
    [("batches", 30), ("packed", 15), ("wide_heads", 2), ("large_scores", 1), ("registered", 1)],
)
def test_interpreted_kernels(check: str, count: int, run_checks: Any) -> None:
    process = run_checks(INTERPRET, check, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


def test_op_contract() -> None:
    q, k, v = draw(2, 5, 4, 64), draw(2, 7, 2, 64, seed=1), draw(2, 7, 2, 64, seed=2)
    settings = (None, None, 5, 7, True, 0, 0.125)
    ops = torch.ops.taut
    torch.library.opcheck(ops.attention.default, (q, k, v, *settings))
    strided = k.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(ops.attention.default, (q, strided, v, *settings))
    wanting = tuple(x.clone().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(ops.attention.default, (*wanting, *settings))
    o, lse = ops.attention(q, k, v, *settings)
    torch.library.opcheck(ops.attention_backward.default, (o, q, k, v, o, lse, *settings))
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = (q[0], k[0, :5], v[0, :5], bounds, bounds, 3, 3, True, 2, 0.125)
    torch.library.opcheck(ops.attention.default, packed)


def test_gradient_reaches_the_inputs_and_lse_has_none() -> None:
    inputs = [draw(1, 6, 2, 64, seed=seed).requires_grad_() for seed in range(3)]
    o, lse = attention(*inputs)
    assert o.requires_grad
    assert not lse.requires_grad
    o.sum().backward()  # an expanded gradient: all its strides are 0
    for x in inputs:
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
    with pytest.raises(RuntimeError, match="attention can be derived once"):
        o, _ = attention(*inputs)
        (first,) = torch.autograd.grad(o.sum(), inputs[:1], create_graph=True)
        first.sum().backward()


def test_compiles_without_graph_breaks() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q * 2, k, v, window=3)[0] + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 8):
        inputs = [draw(2, tokens, 2, 64, seed=seed).requires_grad_() for seed in range(3)]
        found, wanted = compiled(*inputs), layer(*inputs)
        assert torch.equal(found, wanted)
        grads = [torch.autograd.grad(each.sum(), inputs) for each in (found, wanted)]
        for ours, right in zip(*grads, strict=True):
            assert torch.equal(ours, right)


def test_compiles_once_for_all_lengths() -> None:
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 8, 9):
            inputs = [draw(2, tokens, 2, 64, seed=seed) for seed in range(3)]
            assert torch.equal(compiled(*inputs)[0], attention(*inputs)[0])


def test_backward_reads_lse_and_its_row_sums_at_the_same_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        prefill, "launch_backward", lambda *arguments: seen.append(arguments[7].stride())
    )
    q, k = draw(2, 5, 4, 64), draw(2, 5, 2, 64)
    lse = torch.zeros(2, 5, 4).transpose(1, 2)
    prefill._launch_attention_backward(q, q, k, k, q, lse, None, None, 5, 5, True, 0, 1.0)
    assert seen == [(20, 5, 1)]


Q = torch.zeros(2, 4, 4, 64, dtype=torch.float16)
K = torch.zeros(2, 6, 2, 64, dtype=torch.float16)
CU = torch.tensor([0, 4, 8], dtype=torch.int32)
PACKED = {"q": Q.view(8, 4, 64), "k": K.view(12, 2, 64), "v": K.view(12, 2, 64), "max_seqlen_q": 4}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": Q[0]}, r"q must be \[B, tokens, heads, D\], got shape \(4, 4, 64\)"),
    ({"q": Q.float()}, "q must be bfloat16 or float16, all alike, got torch.float32"),
    ({"k": K.bfloat16()}, "k must be bfloat16 or float16, all alike, got torch.bfloat16"),
    ({"v": K.to("meta")}, "v must be on cpu, got meta"),
    ({"q": Q.repeat(1, 1, 1, 2)[..., ::2]}, "q must have the elements of a head next to each"),
    ({"q": Q[..., :48]}, "q must have heads of 64, 96, 128 or 256 elements, got 48"),
    ({"k": torch.zeros(2, 6, 2, 128).half()}, "k must fit q"),
    ({"k": K[:1]}, "k must fit q"),
    ({"v": K[:, :5]}, "v must have the shape of k"),
    ({"q": torch.zeros(2, 4, 3, 64).half()}, "q has 3 heads, not a multiple of the 2 of k"),
    ({"k": K[:, :, :0], "v": K[:, :, :0]}, "q has 4 heads, not a multiple of the 0 of k"),
    ({"window": 0}, "window must be at least 1 and needs causal"),
    ({"window": 4, "causal": False}, "window must be at least 1 and needs causal"),
    ({"scale": 0.0}, "scale must be positive and finite"),
    ({"scale": float("nan")}, "scale must be positive and finite"),
    ({"max_seqlen_q": 4}, "max_seqlen are for packed sequences"),
    ({"cu_seqlens_k": CU}, "max_seqlen are for packed sequences"),
    ({"cu_seqlens_q": CU}, r"q must be \[tokens, heads, D\]"),
    ({**PACKED, "cu_seqlens_q": CU, "max_seqlen_q": None}, "max_seqlen_q must be given"),
    ({**PACKED, "cu_seqlens_q": CU.long()}, r"cu_seqlens_q must be \[B \+ 1\] int32"),
    ({**PACKED, "cu_seqlens_q": CU.to("meta")}, "cu_seqlens_q must be contiguous and on cpu"),
    (
        {**PACKED, "cu_seqlens_q": CU, "cu_seqlens_k": CU[:2], "max_seqlen_k": 6},
        "cu_seqlens_k must have as many bounds",
    ),
    (
        {**PACKED, "cu_seqlens_q": torch.zeros(32769, dtype=torch.int32), "max_seqlen_q": 2**19},
        "must be shorter for 32768 sequences of 4 heads, got 524288 and 524288",
    ),
    ({**PACKED, "cu_seqlens_q": torch.zeros(65537, dtype=torch.int32)}, "at most 65535 sequences"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": [0, 5, 3]}, r"cu_seqlens_q must rise from 0 .* got \[0, 5, 3\]"),
        ({"cu_seqlens_q": [1, 4, 8]}, "cu_seqlens_q must rise from 0"),
        ({"cu_seqlens_q": [0, 4, 9]}, "to at most the 8 tokens of q, got"),
        ({"cu_seqlens_k": [0, 4, 13], "max_seqlen_k": 9}, "at most the 12 tokens of k, got"),
        ({"cu_seqlens_q": [0, 3, 8]}, "max_seqlen_q must be at least 5, the longest .* got 4"),
        ({"cu_seqlens_k": [0, 4, 12], "max_seqlen_k": 7}, "max_seqlen_k must be at least 8"),
    ],
)
def test_bounds_that_do_not_fit_are_refused_on_the_cpu(
    change: dict[str, Any], message: str
) -> None:
    bounds = {
        name: torch.tensor(x, dtype=torch.int32) for name, x in change.items() if "cu" in name
    }
    with pytest.raises(ValueError, match=message):
        attention(**{**PACKED, "cu_seqlens_q": CU} | change | bounds)


def test_tokens_behind_the_last_bound_are_nobodys() -> None:
    attention(**PACKED, cu_seqlens_q=torch.tensor([0, 4, 6], dtype=torch.int32))


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": K}
    assert attention(**arguments)[0].shape == Q.shape
    with pytest.raises(ValueError, match=message):
        attention(**arguments | change)


@pytest.mark.parametrize("shape", [(0, 4, 4, 64), (2, 0, 4, 64)])
def test_empty_batches_and_sequences(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, dtype=torch.float16)
    o, lse = attention(q, K[: shape[0]], K[: shape[0]])
    assert o.shape == q.shape
    assert lse.shape == (shape[0], 4, shape[1])


def test_variants_cover_every_form() -> None:
    from taut_bench.instruments.forms import attention as attention_forms

    found = list(attention_forms.prefill_variants())
    assert len(found) == len({(v.label, v.tile, v.target) for v in found})
    for target in ("sm_80", "sm_90"):
        labels = [v.label for v in found if target == v.target]
        for dim in (64, 96, 128, 256):
            for name in ("attention", "attention dkv", "attention dq"):
                assert sum(f"{name} " in v and v.endswith(f"D={dim}") for v in labels) >= 3


def check_on_gpu(
    dtype: torch.dtype, count_q: int, count_k: int, heads: int, heads_k: int, dim: int, mask: Any
) -> None:
    causal, window = mask
    q = draw(2, heads, count_q, dim, dtype=dtype, device="cuda").transpose(1, 2)
    k = draw(2, count_k, heads_k, dim, seed=1, dtype=dtype, device="cuda")
    v = draw(2, count_k, heads_k, dim, seed=2, dtype=dtype, device="cuda")
    do = draw(2, count_q, heads, dim, seed=3, dtype=dtype, device="cuda")
    settings = (None, None, count_q, count_k, causal, window, dim**-0.5)
    with testing.nan_poison():
        o, lse = torch.ops.taut.attention(q, k, v, *settings)
    reference, reference_lse = attention_reference.attention_ref(q, k, v, *settings)
    doubles = (q.double(), k.double(), v.double())
    gold, gold_lse = attention_reference.attention_ref(*doubles, *settings)
    testing.assert_within_budget(o, gold, reference)
    assert torch.allclose(lse.double(), gold_lse, atol=1e-3)
    with testing.nan_poison():
        args = (do, q, k, v, o, lse, *settings)
        found = torch.ops.taut.attention_backward(*args)
    again = torch.ops.taut.attention_backward(*args)
    wanted = attention_reference.attention_backward_ref(
        do, q, k, v, reference, reference_lse, *settings
    )
    right = attention_reference.attention_backward_ref(
        do.double(), *doubles, gold, gold_lse, *settings
    )
    for ours, repeated, theirs, exact in zip(found, again, wanted, right, strict=True):
        testing.assert_within_budget(ours, exact, theirs)
        assert torch.equal(ours, repeated)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", [(False, 0), (True, 0), (True, 100)])
@pytest.mark.parametrize(("count_q", "count_k"), [(1, 700), (300, 300), (257, 600), (700, 130)])
def test_gpu_kernels_match_reference(
    count_q: int, count_k: int, mask: Any, dim: int, dtype: torch.dtype
) -> None:
    check_on_gpu(dtype, count_q, count_k, 8, 2, dim, mask)


@pytest.mark.gpu
def test_gpu_packed_equals_batch() -> None:
    # Each long enough alone for the kernel of the packed ones (`_prefill_hopper.MIN_QUERIES`).
    bounds = torch.tensor([0, 600, 600, 1133, 2157], dtype=torch.int32, device="cuda")
    inputs = [
        draw(2157, heads, 128, seed=heads, dtype=torch.bfloat16, device="cuda")
        for heads in (8, 2, 2)
    ]
    inputs = [x.requires_grad_() for x in inputs]
    packed, lse = attention(*inputs, cu_seqlens_q=bounds, max_seqlen_q=1024)
    grads = torch.autograd.grad(packed.square().sum(), inputs)
    for first, last in ((0, 600), (600, 1133), (1133, 2157)):
        alone = [x[None, first:last].detach().requires_grad_() for x in inputs]
        one, one_lse = attention(*alone)
        assert torch.equal(packed[first:last], one[0])
        assert torch.equal(lse[:, first:last], one_lse[0])
        one_grads = torch.autograd.grad(one.square().sum(), alone)
        for whole, part in zip(grads, one_grads, strict=True):
            assert torch.equal(whole[first:last], part[0])
