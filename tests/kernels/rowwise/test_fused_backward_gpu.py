"""RMSNorm, SwiGLU, SiLU and RoPE with gradients on a GPU: against the references, bit by bit."""

from __future__ import annotations

import pytest
import torch

from taut_bench import testing
from taut_kernels.activation import silu_mul, swiglu_launch
from taut_kernels.activation.swiglu import silu, swiglu
from taut_kernels.norm import rms_norm
from taut_kernels.norm import rms_norm_train as rn
from taut_kernels.rope import train as rt

pytestmark = [
    pytest.mark.gpu,
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPSILON = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("M", "width"),
    [
        (1, 4096),
        (3, 1),
        (700, 100),
        (333, 1000),
        (264, 2048),
        (300, 5120),
        (63, 8192),
        (40, 16384),
        (9, 32768),
        (5, 50000),
    ],
)
def test_gpu_rms_norm_matches_the_reference(M: int, width: int, dtype: torch.dtype) -> None:
    x, residual, dy, dt = (draw(M, width, dtype=dtype, seed=s).cuda() for s in range(4))
    weight = (draw(width, dtype=dtype) * 0.2 + 1).cuda()
    for other in (None, residual):
        with testing.nan_poison():
            y, t, rstd = torch.ops.taut.rms_norm_train(x, weight, other, EPSILON)
        reference = rn.rms_norm_train_ref(x, weight, other, EPSILON)
        wide = [None if one is None else one.double() for one in (x, weight, other)]
        gold = rn.rms_norm_train_ref(*wide, EPSILON)
        testing.assert_within_budget(y, gold[0], reference[0])
        testing.assert_within_budget(rstd, gold[2], reference[2])
        assert torch.equal(t, reference[1])
        saved, more = (x, None) if other is None else (t, dt)
        with testing.nan_poison():
            found = torch.ops.taut.rms_norm_backward(dy, more, saved, weight, rstd, True)
        arguments = (dy, more, saved, weight, rstd)
        wide = [None if one is None else one.double() for one in arguments]
        gold = rn.rms_norm_backward_ref(*wide, True)
        reference = rn.rms_norm_backward_ref(*arguments, True)
        term = (dy * weight * rstd[:, None]).abs().max().item()
        testing.assert_within_budget(found[0], gold[0], reference[0], term)
        testing.assert_within_budget(found[1], gold[1], reference[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "width"), [(1, 14336), (3, 1), (17, 1000), (300, 2880)])
@pytest.mark.parametrize("form", [(1.0, 0.0, None), (1.702, 1.0, 1.5), (1.5, 0.5, None)])
def test_gpu_activations_match_the_reference(
    M: int, width: int, form: tuple[float, float, float | None], dtype: torch.dtype
) -> None:
    ops, ref = torch.ops.taut, swiglu_launch
    x = 2 * draw(M, 2 * width + 3, dtype=dtype).cuda()[:, : 2 * width]
    dy = draw(M, width, dtype=dtype, seed=1).cuda()
    gate, up = ref.halves(x, False)
    wide_dy, wide_x = dy.double(), x.double()
    wide = ref.halves(wide_x, False)
    with testing.nan_poison():
        y, found = ops.swiglu(gate, up, *form), ops.swiglu_backward(dy, gate, up, *form)
    testing.assert_within_budget(y, ref.swiglu_ref(*wide, *form), ref.swiglu_ref(gate, up, *form))
    gold = ref.swiglu_backward_ref(wide_dy, *wide, *form)
    for triple in zip(found, gold, ref.swiglu_backward_ref(dy, gate, up, *form), strict=True):
        testing.assert_within_budget(*triple)
    for interleaved in (False, True):
        arguments = (*form, interleaved)
        with testing.nan_poison():
            y = ops.swiglu_packed(x, *arguments)
            dx = ops.swiglu_packed_backward(dy, x, *arguments)
        gold_y = silu_mul.silu_mul_ref(wide_x, *arguments)
        testing.assert_within_budget(y, gold_y, silu_mul.silu_mul_ref(x, *arguments))
        gold_dx = ref.swiglu_packed_backward_ref(wide_dy, wide_x, *arguments)
        reference = ref.swiglu_packed_backward_ref(dy, x, *arguments)
        testing.assert_within_budget(dx, gold_dx, reference)
    y, dx = ops.silu(gate), ops.silu_backward(dy, gate)
    testing.assert_within_budget(y, ref.silu_ref(wide[0]), ref.silu_ref(gate))
    gold_dx = ref.silu_backward_ref(wide_dy, wide[0])
    testing.assert_within_budget(dx, gold_dx, ref.silu_backward_ref(dy, gate))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    ("T", "heads", "dim", "rotated"),
    [(7, (32, 8), 128, 128), (3, (7, 1), 96, 40), (5, (4, 4), 64, 6)],
)
def test_gpu_rotation_matches_the_reference(
    T: int, heads: tuple[int, int], dim: int, rotated: int, neox: bool, dtype: torch.dtype
) -> None:
    q = draw(T, heads[0] + 1, dim + 8, dtype=dtype).cuda()[:, : heads[0], :dim]
    k = draw(heads[1], T, dim, dtype=dtype, seed=1).cuda().transpose(0, 1)
    angles = draw(50, rotated // 2, seed=2).cuda()
    cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    positions = torch.randint(0, 50, (T,), device="cuda")
    alone, nothing = torch.ops.taut.rope_train(positions, q, None, cache, neox, False)
    assert torch.equal(alone, torch.ops.taut.rope_train(positions, q, k, cache, neox, False)[0])
    assert nothing.shape == (0,)
    for inverse in (False, True):
        with testing.nan_poison():
            found = torch.ops.taut.rope_train(positions, q, k, cache, neox, inverse)
        reference = rt.rope_train_ref(positions, q, k, cache, neox, inverse)
        wide = (q.double(), k.double(), cache.double())
        gold = rt.rope_train_ref(positions, *wide, neox, inverse)
        for triple in zip(found, gold, reference, strict=True):
            testing.assert_within_budget(*triple)


def test_gpu_training_forward_has_the_bits_of_serving() -> None:
    x, residual = (draw(300, 4096, dtype=torch.bfloat16, seed=s).cuda() for s in range(2))
    weight = draw(4096, dtype=torch.bfloat16).cuda()
    for other in (None, residual):
        updated = None if other is None else other.clone()
        served = rms_norm.rms_norm(x, weight, epsilon=EPSILON, residual=updated)
        y, total, _ = torch.ops.taut.rms_norm_train(x, weight, other, EPSILON)
        assert torch.equal(y, served)
        assert updated is None or torch.equal(total, updated)
    assert torch.equal(swiglu(*x.chunk(2, dim=1)), silu_mul.silu_mul(x))


@pytest.mark.parametrize("width", [1000, 4096, 32768, 50000])
def test_gpu_gradients_are_the_same_bits_every_time(width: int) -> None:
    x, dy = (draw(600, width, dtype=torch.bfloat16, seed=s).cuda() for s in range(2))
    weight = draw(width, dtype=torch.bfloat16).cuda()
    _, _, rstd = torch.ops.taut.rms_norm_train(x, weight, None, EPSILON)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = torch.ops.taut.rms_norm_backward(
            dy, None, x, weight, rstd, True
        )
        return found

    first = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(5):
        graph.replay()
        for one, two, three in zip(first, call(), captured, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, three)


def test_gpu_strided_misaligned_and_far_rows() -> None:
    base = draw(9, 4200, dtype=torch.bfloat16).cuda()
    weight = draw(4096, dtype=torch.bfloat16).cuda()
    rstd = torch.rand(9, device="cuda") + 0.5
    far = torch.empty(2, 2**31 + 4096, dtype=torch.bfloat16, device="cuda")[:, -4096:]
    far.copy_(base[:2, :4096])
    for view in (base[:, :4096], base[:, 3:4099], base[1::2, 8:4104], far):
        some = rstd[: view.shape[0]]
        dense = view.contiguous()
        dx, dw = torch.ops.taut.rms_norm_backward(view, view, view, weight, some, True)
        wanted = torch.ops.taut.rms_norm_backward(dense, dense, dense, weight, some, True)
        assert torch.equal(dx, wanted[0])
        assert torch.equal(dw, wanted[1])
        assert torch.equal(silu(view), silu(dense))
