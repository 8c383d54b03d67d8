"""Gradients of RMSNorm, SwiGLU, SiLU and RoPE: specification, interpreter, op contract, GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.utils.checkpoint import checkpoint

from taut_bench import fused_backward, fused_backward_cases, fused_rivals, testing
from taut_bench.fused_rivals import UnavailableError
from taut_kernels.activation import silu_mul
from taut_kernels.activation.swiglu import silu, swiglu, swiglu_packed
from taut_kernels.loss.softmax import softmax
from taut_kernels.modules import LayerNorm, RMSNorm, SwiGLU
from taut_kernels.norm import rms_norm
from taut_kernels.norm.layer_norm import layer_norm
from taut_kernels.norm.rms_norm_train import add_rms_norm_train, rms_norm_train
from taut_kernels.rope import op as rope
from taut_kernels.rope.train import rope_train
from taut_kernels.rowwise.training_tiles import NormRingTile
from tuning import tune_fused_backward

INTERPRET = Path(__file__).with_name("interpret_fused_backward.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPSILON = 1e-5
GPT_OSS: dict[str, Any] = {"alpha": 1.702, "beta": 1.0, "limit": 1.0}
F = torch.nn.functional
Call = Callable[..., Any]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator).to(dtype)


def as_tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def added(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, EPSILON), total


def turned(x: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    cos, sin = CACHE.to(x.dtype)[POSITIONS].unsqueeze(1).chunk(2, dim=-1)
    a, b, rest = x.split((12, 12, 8), dim=-1)
    return torch.cat((a * cos - b * sign * sin, b * cos + a * sign * sin, rest), dim=-1)


POSITIONS = torch.tensor([0, 3, 8, 1, 2, 2, 7])
CACHE = torch.cat([f(draw(9, 12, seed=5)) for f in (torch.cos, torch.sin)], dim=1)
N = 40
# Ours, plain torch, shapes of the leaves.
OPS: dict[str, tuple[Call, Call, list[tuple[int, ...]]]] = {
    "rms_norm": (
        lambda x, w: rms_norm_train(x, w, epsilon=EPSILON),
        lambda x, w: F.rms_norm(x, (N,), w, EPSILON),
        [(7, N), (N,)],
    ),
    "rms_norm without a weight": (
        lambda x: rms_norm_train(x, epsilon=EPSILON),
        lambda x: F.rms_norm(x, (N,), None, EPSILON),
        [(7, N)],
    ),
    "add_rms_norm": (
        lambda x, r, w: add_rms_norm_train(x, r, w, epsilon=EPSILON),
        added,
        [(7, N), (7, N), (N,)],
    ),
    "silu": (silu, F.silu, [(7, N)]),
    "swiglu": (swiglu, lambda g, u: F.silu(g) * u, [(7, N), (7, N)]),
    "gpt-oss": (lambda g, u: swiglu(g, u, **GPT_OSS), clamped, [(7, N), (7, N)]),
    "packed": (
        swiglu_packed,
        lambda x: F.silu(x[:, :N]) * x[:, N:],
        [(7, 2 * N)],
    ),
    "packed gpt-oss": (
        lambda x: swiglu_packed(x, **GPT_OSS, interleaved=True),
        lambda x: clamped(x[:, ::2], x[:, 1::2]),
        [(7, 2 * N)],
    ),
    "rope": (
        lambda q, k: rope_train(POSITIONS, q, k, CACHE.to(q.dtype)),
        lambda q, k: (turned(q), turned(k)),
        [(7, 4, 32), (7, 2, 32)],
    ),
}


def leaves_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    return [draw(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes)]


def both_passes(call: Call, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = as_tuple(call(*leaves))
    weights = [draw(*y.shape, seed=9 + i).half().to(y.dtype) for i, y in enumerate(outputs)]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, leaves, weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_matches_torch_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    ours, plain, shapes = OPS[name]
    leaves = leaves_of(shapes, dtype)
    gold = both_passes(plain, [t.detach().double().requires_grad_() for t in leaves])
    for triple in zip(both_passes(ours, leaves), gold, both_passes(plain, leaves), strict=True):
        testing.assert_within_budget(*triple)


@pytest.mark.parametrize("name", OPS)
def test_gradient_in_fp64(name: str) -> None:
    ours, _, shapes = OPS[name]
    # Rows are alike: few of them will do. RoPE's positions are as many as its rows.
    rows = 7 if name == "rope" else 2
    small = [(rows, *shape[1:]) if shape[0] == 7 else shape for shape in shapes]
    assert torch.autograd.gradcheck(ours, leaves_of(small, torch.float64), fast_mode=True)


def test_rotation_can_be_differentiated_twice() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        return rope_train(POSITIONS[:2], q, None, CACHE[:, :4].double().contiguous())[0]

    leaves = leaves_of([(2, 2, 6)], torch.float64)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_rotation_there_and_back() -> None:
    q = draw(7, 4, 32, dtype=torch.float64)
    for neox in (True, False):
        there, _ = torch.ops.taut.rope_train(POSITIONS, q, None, CACHE.double(), neox, False)
        back, none = torch.ops.taut.rope_train(POSITIONS, there, None, CACHE.double(), neox, True)
        norms = (CACHE.double()[POSITIONS].view(7, 2, 12).square().sum(dim=1)).repeat(1, 2)
        if not neox:
            norms = norms[:, :12].repeat_interleave(2, dim=1)
        expected = torch.cat((q[..., :24] * norms.unsqueeze(1), q[..., 24:]), dim=-1)
        assert torch.allclose(back, expected)
        assert none.shape == (0,)


CHECKS = {
    "training_forward_has_the_bits_of_serving": 6,
    "activation_shapes": 24,
    "activation_extreme_values": 8,
    "rotation_shapes": 32,
    "empty_batches": 5,
    "sums_of_two_gradients": 4,
}


@interpreter
def test_interpreted_kernels(run_checks: Any) -> None:
    process = run_checks(INTERPRET, *CHECKS, env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines() == [f"{check} {count}" for check, count in CHECKS.items()]


def test_training_forward_is_servings() -> None:
    x, residual = draw(5, N, dtype=torch.bfloat16), draw(5, N, dtype=torch.bfloat16, seed=1)
    weight = draw(N, dtype=torch.bfloat16)
    updated = residual.clone()
    served = rms_norm.rms_norm(x, weight, epsilon=EPSILON, residual=updated)
    y, total = add_rms_norm_train(x, residual, weight, epsilon=EPSILON)
    assert torch.equal(y, served)
    assert torch.equal(total, updated)
    assert torch.equal(swiglu_packed(x), silu_mul.silu_mul(x))
    q, k = draw(7, 4, 32, dtype=torch.bfloat16), draw(7, 2, 32, dtype=torch.bfloat16)
    turned_q, turned_k = rope_train(POSITIONS, q, k, CACHE)
    rope.rope(POSITIONS, q, k, CACHE, head_dim=32)
    assert turned_k is not None
    assert torch.equal(turned_q, q)
    assert torch.equal(turned_k, k)


def test_residual_gets_the_gradient_of_both_outputs() -> None:
    x, residual = (draw(3, N, seed=seed).requires_grad_() for seed in (0, 1))
    y, total = add_rms_norm_train(x, residual, epsilon=EPSILON)
    (2 * total).sum().backward(retain_graph=True)
    assert torch.equal(residual.grad, torch.full((3, N), 2.0))
    y.square().sum().backward()
    assert torch.equal(x.grad, residual.grad)
    assert x.grad is not residual.grad


@pytest.mark.parametrize("name", OPS)
def test_op_contract(name: str) -> None:
    ops = torch.ops.taut
    ours, _, shapes = OPS[name]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for leaves in (leaves_of(shapes, torch.float32), leaves_of(shapes, torch.bfloat16)):
        calls = recorded(lambda leaves=leaves: both_passes(ours, leaves))
        assert len(calls) == 2
        for op, arguments in calls:
            torch.library.opcheck(getattr(ops, op).default, arguments, test_utils=tests)
    forward, arguments = recorded(lambda: both_passes(ours, leaves_of(shapes, torch.float32)))[0]
    torch.library.opcheck(getattr(ops, forward).default, arguments)


def recorded(run: Callable[[], object]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return our ops that ``run`` calls, with their arguments."""
    found = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "taut":
                found.append((func._schema.name.removeprefix("taut::"), args))
            return func(*args, **kwargs or {})

    with Recorder():
        run()
    return found


class Block(torch.nn.Module):
    """Every training op once, as a decoder layer would."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = RMSNorm(32), RMSNorm(32), LayerNorm(32)
        self.gate, self.up = (torch.nn.Linear(32, 48) for _ in range(2))
        self.down, self.activation = torch.nn.Linear(48, 32), SwiGLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).to(x.dtype).view(*x.shape[:2], 4, 8)
        positions = torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1)
        cache = CACHE[:, :6].to(x.device).contiguous()
        q, k = rope_train(positions, heads, heads, cache)
        assert k is not None
        mixed = softmax(q @ k.transpose(-1, -2)) @ heads
        y, total = self.second.add(mixed.flatten(-2).to(x.dtype), x)
        hidden = self.activation(self.gate(y), self.up(y))
        return self.last(silu(self.down(hidden)).to(x.dtype) + total)


def trained(step: Callable[[Block, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    block = Block()
    x = draw(2, 5, 32).requires_grad_()
    # Weighted: a norm's squares add up to a constant.
    (step(block, x) * draw(2, 5, 32, seed=1)).sum().backward()
    found = [parameter.grad for parameter in block.parameters()]
    return [x.grad, *found]


def test_compile_and_checkpoint_give_the_same_gradients() -> None:
    plain = trained(lambda block, x: block(x))
    compiled = trained(
        lambda block, x: torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    )
    again = trained(lambda block, x: checkpoint(block, x, use_reentrant=False))
    for one, two, three in zip(plain, compiled, again, strict=True):
        assert torch.allclose(one, two, atol=1e-5)
        assert torch.equal(one, three)


def test_autocast_keeps_each_ops_type() -> None:
    plain = trained(lambda block, x: block(x))

    def autocast(block: Block, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x)
        assert y.dtype is torch.float32
        return y

    for one, two in zip(plain, trained(autocast), strict=True):
        assert two.dtype is torch.float32
        assert (one - two).abs().max() <= 0.1 * one.abs().max()


@pytest.mark.parametrize("name", [name for name in OPS if name != "rope"])
def test_second_derivative_is_refused_by_name(name: str) -> None:
    ours, _, shapes = OPS[name]
    leaves = leaves_of(shapes, torch.float32)
    total = sum(y.square().sum() for y in as_tuple(ours(*leaves)))
    gradients = torch.autograd.grad(total, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="can be derived once"):
        gradients[0].sum().backward()


X, W = torch.zeros(2, 64), torch.ones(64)
Q = torch.zeros(3, 4, 32)
THREE = torch.zeros(3, dtype=torch.int64)
BAD: list[tuple[Call, str]] = [
    (lambda: rms_norm_train(torch.zeros(64, 2).t(), epsilon=1e-5), "x must have its columns next"),
    (lambda: rms_norm_train(X, torch.ones(63), epsilon=1e-5), r"weight must have shape \(64,\)"),
    (lambda: rms_norm_train(X.half(), W.bfloat16(), epsilon=1e-5), "weight must be torch.float16"),
    (lambda: add_rms_norm_train(X, X.half(), epsilon=1e-5), "residual must be .* got .*float16"),
    (lambda: add_rms_norm_train(X, X[:1], epsilon=1e-5), r"residual must be \(2, 64\)"),
    (lambda: rms_norm_train(X, epsilon=-1.0), "epsilon must be at least 0 and finite, got -1.0"),
    (lambda: add_rms_norm_train(X, X, epsilon=float("nan")), "epsilon must be at least 0 and"),
    (lambda: silu(X.int()), "x must be bfloat16, float16, float32"),
    (lambda: swiglu(X, X[:, :32]), r"up must be \(2, 64\)"),
    (lambda: swiglu(X, X, limit=-1.0), "limit must be positive or None, got -1.0"),
    (lambda: swiglu_packed(torch.zeros(2, 63)), "x must have an even number of columns, got 63"),
    (lambda: rope_train(THREE - 1, Q, None, CACHE), r"positions must lie in 0\.\.8, got -1"),
    (lambda: rope_train(THREE + 9, Q, None, CACHE), r"positions must lie in 0\.\.8, got 9"),
    (lambda: rope_train(THREE, Q.int(), None, CACHE), "q must be bfloat16, float16 or float32"),
    (lambda: rope_train(THREE, Q[:2], None, CACHE), r"q must have shape \[3, heads, 32\]"),
    (lambda: rope_train(THREE, Q, Q[..., :16], CACHE), r"k must have shape \[3, heads, 32\]"),
    (lambda: rope_train(THREE.int(), Q, None, CACHE), "positions must be contiguous torch.int64"),
    (lambda: rope_train(THREE, Q, None, CACHE[:, :7]), r"cos_sin_cache must have shape \[P, R\]"),
    (lambda: rope_train(THREE, Q, None, CACHE.half()), "cos_sin_cache must be torch.float32"),
    (
        lambda: rope_train(THREE, Q, None, CACHE.clone().requires_grad_()),
        "cos_sin_cache requires grad: the table has no gradient",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_rejects_bad_inputs(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_variants_cover_every_op() -> None:
    from taut_bench.instruments.forms import training

    found = list(training.kernel_variants())
    assert len(found) == len({(v.label, v.tile, v.target) for v in found})
    labels = " ".join(v.label for v in found)
    for op in ("softmax", "layer_norm", "add_rms_norm", "swiglu", "silu"):
        assert f"{op}_backward " in labels
    assert "rope_train neox inverse" in labels


def test_benchmark_gate_passes_ours_and_names_what_is_wrong() -> None:
    for op in fused_backward_cases.OPS:
        case = fused_backward_cases.Case(op, 8192, 1024)
        run = fused_backward_cases.PROVIDERS["taut"](op)
        assert fused_backward_cases.why_wrong(case, run, "cpu") is None
    case = fused_backward_cases.Case("softmax", 8192, 1024)
    wrong = fused_backward_cases.why_wrong(case, lambda o: (softmax(o.leaves[0] * 1.1),), "cpu")
    assert wrong is not None
    assert wrong.startswith("output 0: error")


def test_quack_is_given_what_its_ops_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def rmsnorm(
        x: torch.Tensor, weight: torch.Tensor, *, residual: Any = None, eps: float,
        prenorm: bool = False,
    ) -> Any:  # fmt: skip
        total = x if residual is None else x + residual
        y = F.rms_norm(total, (x.shape[-1],), weight, eps)
        return (y, total) if prenorm else y

    library = {
        "quack.rmsnorm": SimpleNamespace(rmsnorm=rmsnorm),
        "quack.softmax": SimpleNamespace(softmax=lambda x: torch.softmax(x, -1)),
    }
    monkeypatch.setattr(fused_rivals.importlib, "import_module", library.__getitem__)
    for op in ("softmax", "rms_norm", "add_rms_norm"):
        run = fused_backward_cases.PROVIDERS["quack"](op)
        case = fused_backward_cases.Case(op, 3, 64)
        assert fused_backward_cases.why_wrong(case, run, "cpu") is None, op
    with pytest.raises(UnavailableError, match="no such op"):
        fused_backward_cases.PROVIDERS["quack"]("rope")
    monkeypatch.setattr(fused_rivals.importlib, "import_module", import_module)
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(UnavailableError, match=r"quack\.softmax: "):
        fused_backward_cases.PROVIDERS["quack"]("softmax")


def test_benchmark_without_a_gpu_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert fused_backward.main(["--output", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_tuning_has_candidates_for_every_width() -> None:
    for name, kernel in tune_fused_backward.KERNELS.items():
        for width in kernel.widths:
            tiles = list(kernel.candidates(width))
            assert tiles, (name, width)
            steps = [tile.block for tile in tiles if not isinstance(tile, NormRingTile)]
            assert max(steps) <= max(1024, width), (name, width)


def test_benchmark_takes_the_shapes_of_the_bars_first() -> None:
    cases = fused_backward.cases(fused_backward_cases.OPS, None)
    assert [case.N for case in cases[:6]] == [4096] * 6
    assert {(case.M, case.N) for case in cases if case.op == "softmax"} == {
        *((8192, N) for N in (2048, 4096, 8192, 16384, 32768)),
        *((4096, N) for N in (65536, 131072, 262144)),
    }
    moved = fused_backward_cases.Case("add_rms_norm", 8192, 4096)
    assert moved.bytes_moved(backward=False) == 8 * 8192 * 4096


@pytest.mark.gpu
def test_gpu_autograd_runs_in_bf16_under_autocast_and_in_a_thread_of_its_own() -> None:
    block, x = Block().cuda(), draw(2, 5, 32).cuda().requires_grad_()
    dy = draw(2, 5, 32, seed=1).cuda()
    block(x).backward(dy)
    plain = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        block(x).backward(dy)
    for one, parameter in zip(plain, block.parameters(), strict=True):
        assert (one - parameter.grad).abs().max() <= 0.1 * one.abs().max()
    y = layer_norm(x, epsilon=EPSILON)
    assert y.shape == x.shape
