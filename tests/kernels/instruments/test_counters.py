"""Bytes and FLOPs against counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from taut_bench.instruments import counters, memory
from taut_bench.instruments.attention_cases import CASES as ATTENTION_CASES
from taut_bench.instruments.attention_work import ATTENTION_WORK
from taut_bench.instruments.counters import count, touched_bytes
from taut_bench.instruments.loss_work import LOSS_WORK
from taut_bench.instruments.op_cases import OP_CASES, from_op
from taut_bench.instruments.op_work import OP_WORK
from taut_bench.instruments.subject import Subject
from taut_bench.instruments.training_cases import CASES as TRAINING_CASES
from taut_bench.instruments.training_work import TRAINING_WORK
from taut_bench.instruments.work import Work

CPU = torch.device("cpu")

# By hand, for M=3, N=64, K=128, groups of 64, bf16 activations; RoPE: 3 tokens, 2 + 1 heads of 8.
BY_HAND: list[tuple[str, dict[str, int], Work]] = [
    # x 3·128·2, weights 64·128/2, scales (2 groups fill one quad of 4) 64·4·2
    ("w4a16_gemm", {}, Work(2 * 3 * 64 * 128, 768 + 4096 + 512, 384)),
    # zeros 64·4/2, bias 64·2
    ("w4a16_gemm", {"zeros": 1, "bias": 1}, Work(49152, 768 + 4096 + 512 + 128 + 128, 384)),
    # scales and zeros as pairs: 2 groups · 64 · 2 · 2
    ("w4a16_gemm_cpu", {}, Work(49152, 768 + 4096 + 512, 384)),
    # x 3·128, weight 64·128, scales 3·4 and 64·4
    ("w8a8_gemm", {}, Work(49152, 384 + 8192 + 12 + 256, 384)),
    ("fp8_gemm", {"bias": 1}, Work(49152, 384 + 8192 + 12 + 256 + 128, 384)),
    # 192 elements: 4 FLOPs each; x 384, weight 128
    ("rms_norm", {}, Work(4 * 192, 384 + 128, 384)),
    # the residual is added (5), read and written
    ("rms_norm", {"residual": 1}, Work(5 * 192, 384 + 128 + 384, 384 + 384)),
    # 3 more FLOPs; a byte an element and a scale of 4 a row
    ("rms_norm_quant", {}, Work(7 * 192, 512, 192 + 12)),
    ("rms_norm_quant", {"int8": 1, "residual": 1}, Work(8 * 192, 896, 192 + 12 + 384)),
    ("rms_norm_static_quant", {}, Work(5 * 192, 512 + 4, 192)),
    # x 3·128·2
    ("silu_mul", {}, Work(3 * 192, 768, 384)),
    # alpha, beta and three clamps
    ("silu_mul", {"gpt_oss": 1}, Work(8 * 192, 768, 384)),
    ("silu_mul_quant", {}, Work(6 * 192, 768, 192 + 12)),
    ("silu_mul_static_quant", {}, Work(4 * 192, 768 + 4, 192)),
    # 192 elements: 3 FLOPs each; x 384; a byte an element and a scale of 4 a row
    ("row_quant", {}, Work(3 * 192, 384, 192 + 12)),
    ("row_quant", {"int8": 1}, Work(3 * 192, 384, 192 + 12)),
    # 3 tokens · 3 heads · 8; q and k 144, angles of 3 rows 48, positions 24
    ("rope", {}, Work(3 * 72, 144 + 48 + 24, 144)),
    ("rope_apart", {}, Work(3 * 72, 144 + 48 + 24, 144)),
    # a 3·128, b 128·64, c 3·64
    ("matmul", {}, Work(49152, 768 + 16384, 384)),
    ("matmul", {"bias": 1}, Work(49152, 768 + 16384 + 128, 384)),
    ("transpose", {}, Work(0, 384, 384)),
    # 2 images of 6×6, 24 channels: 72 windows of 9 · 24, 64 channels out
    ("conv2d", {}, Work(2 * 72 * 64 * 216, 3456 + 64 * 216 * 2, 72 * 64 * 2)),
    # 3×3 windows of 9 elements, then of 4 and a factor
    ("max_pool2d", {}, Work(9 * 2 * 24 * 9, 3456, 2 * 24 * 9 * 2)),
    ("avg_pool2d", {}, Work(5 * 2 * 24 * 9, 3456, 2 * 24 * 9 * 2)),
    ("reduce", {}, Work(192, 384, 6)),
    # x 3·128, weight 64·128·4, scales 3·4 and 64·4
    ("int8_gemm_cpu", {}, Work(49152, 384 + 32768 + 12 + 256, 384)),
    # x 3·128 in bf16, weight 64·128, scales and sums 64·4
    ("int8_linear_cpu", {}, Work(49152, 768 + 8192 + 512, 384)),
    # scales 2 groups · 64 · 2
    ("weight_only_linear_cpu", {}, Work(49152, 768 + 4096 + 256, 384)),
    # zero points 2 · 64, bias 64 · 2
    ("weight_only_linear_cpu", {"zeros": 1, "bias": 1}, Work(49152, 768 + 4096 + 256 + 256, 384)),
]
# M=3, H=32, Ht=64, V=96 in bf16: 288 logits; targets 24; loss 4, lse 12.
STUDENT, TEACHER, LOGITS = 3 * 32 * 2 + 96 * 32 * 2, 3 * 64 * 2 + 96 * 64 * 2, 3 * 96
PRODUCT, TEACHER_PRODUCT = 2 * 3 * 32 * 96, 2 * 3 * 64 * 96
LOSSES_BY_HAND: list[tuple[str, bool, str, Work]] = [
    ("cross_entropy", False, "cross_entropy", Work(4 * LOGITS, 2 * LOGITS + 24, 16)),
    ("cross_entropy", True, "cross_entropy", Work(7 * LOGITS, 600, 16 + 2 * LOGITS)),
    ("cross_entropy", True, "scale_", Work(LOGITS, 2 * LOGITS + 4, 2 * LOGITS)),
    (
        "linear_cross_entropy",
        False,
        "linear_cross_entropy",
        Work(PRODUCT + 4 * LOGITS, STUDENT + 24, 16),
    ),
    (
        "linear_cross_entropy",
        True,
        "linear_cross_entropy",
        Work(3 * PRODUCT + 7 * LOGITS, STUDENT + 24, 16 + STUDENT),
    ),
    (
        "linear_kl",
        False,
        "linear_divergence",
        Work(PRODUCT + TEACHER_PRODUCT + 11 * LOGITS, STUDENT + TEACHER + 3, 4),
    ),
    (
        "linear_jsd",
        True,
        "linear_divergence",
        Work(3 * PRODUCT + TEACHER_PRODUCT + 14 * LOGITS, STUDENT + TEACHER + 3, 4 + STUDENT),
    ),
]
FORWARD_ONLY = sorted(
    op for op, case in OP_CASES.items() if case.call is None and op not in ATTENTION_CASES
)
SMALL = {"M": 3, "N": 64, "K": 128, "G": 64, "Hq": 2, "Hk": 1, "D": 8, "H": 32, "Ht": 64, "V": 96}
SMALL |= {"B": 2, "C": 24, "side": 6}


def small(op: str, **sizes: int) -> Subject:
    known = {name: SMALL[name] for name in OP_CASES[op].sizes if name in SMALL}
    return from_op(op, known | sizes, CPU)


@pytest.mark.parametrize(("op", "sizes", "expected"), BY_HAND)
def test_work_of_every_op_is_that_counted_by_hand(
    op: str, sizes: dict[str, int], expected: Work
) -> None:
    counted = count(small(op, **sizes))
    assert counted.dispatched == expected
    assert [entry.op for entry in counted.by_op] == [f"taut::{op}"]


@pytest.mark.parametrize(("loss", "backward", "op", "expected"), LOSSES_BY_HAND)
def test_work_of_every_loss_is_that_counted_by_hand(
    loss: str, backward: bool, op: str, expected: Work
) -> None:
    sizes = {name: SMALL[name] for name in OP_CASES[loss].sizes}
    counted = count(from_op(loss, sizes, CPU, backward=backward))
    found = {entry.op: entry.work for entry in counted.by_op}[f"taut::{op}"]
    assert found == expected


def test_backward_passes_of_their_own_count_by_hand() -> None:
    """With ``none`` the gradient waits for the backward pass."""
    work = {}
    for loss in ("cross_entropy", "linear_cross_entropy", "linear_kl"):
        sizes = {name: SMALL[name] for name in OP_CASES[loss].sizes}
        subject = from_op(loss, sizes, CPU, backward=True)
        later = replace(subject, kwargs={"reduction": "none"})
        work |= {entry.op: entry.work for entry in count(later).by_op}
    assert work["taut::cross_entropy_backward"] == Work(
        3 * LOGITS, 12 + 2 * LOGITS + 24 + 12, 2 * LOGITS
    )
    assert work["taut::linear_cross_entropy_backward"] == Work(
        3 * PRODUCT + 3 * LOGITS, STUDENT + 12 + 12 + 24, STUDENT
    )
    assert work["taut::linear_divergence_backward"] == Work(
        3 * PRODUCT + TEACHER_PRODUCT + 14 * LOGITS, STUDENT + TEACHER + 12 + 3, STUDENT
    )


def test_every_op_is_counted_by_hand_above() -> None:
    # The latter two in test_training_work.py and test_attention_work.py.
    elsewhere = set(LOSS_WORK) | set(TRAINING_WORK) | set(ATTENTION_WORK)
    assert {op for op, _, _ in BY_HAND} == set(OP_WORK) - elsewhere == set(FORWARD_ONLY)
    losses = set(OP_CASES) - set(FORWARD_ONLY) - set(TRAINING_CASES) - set(ATTENTION_CASES)
    assert {loss for loss, _, _, _ in LOSSES_BY_HAND} == losses


def _argument_names(op: str) -> list[str]:
    packet = getattr(torch.ops.taut, op)
    schema = getattr(packet, packet.overloads()[0])._schema
    return [argument.name for argument in schema.arguments]


@pytest.mark.parametrize("op", sorted(set(FORWARD_ONLY) - {"rope", "rope_apart"}))
def test_formula_agrees_with_the_schema(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes by formula are those of all operands but the counters of split sums."""
    subject = small(op)
    formula = count(subject).dispatched
    monkeypatch.setattr(counters, "OP_WORK", {})
    schema = count(subject).dispatched
    arrivals = sum(
        touched_bytes(tensor)
        for name, tensor in zip(_argument_names(op), subject.args, strict=False)
        if name == "arrivals"
    )
    assert (schema.read, schema.written) == (formula.read + arrivals, formula.written)


def test_every_op_of_every_group_has_a_formula(run_python: Any) -> None:
    code = (
        "import pkgutil, importlib, torch\n"
        "rooms = 'gemm norm activation rope rowwise attention loss primitives'.split()\n"
        "[importlib.import_module(m.name) for room in rooms"
        " for m in pkgutil.walk_packages("
        "importlib.import_module('taut_kernels.' + room).__path__, f'taut_kernels.{room}.')]\n"
        "names = torch._C._dispatch_get_all_op_names()\n"
        "print(*sorted(n[6:].split('.')[0] for n in names if n.startswith('taut::')))"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == set(OP_WORK)


@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_static_quant"])
def test_norms_without_a_residual_count_alike_in_both_overloads(op: str) -> None:
    x, weight, epsilon = torch.ones(3, 64), torch.ones(64), 1e-5
    scale = (torch.ones(1),) if op == "rms_norm_static_quant" else ()
    both = getattr(torch.ops.taut, op)

    def counted(overload: Any, *residual: None) -> Any:
        return count(Subject("norm", overload, (x, weight, *residual, epsilon, *scale), CPU))

    plain, default = counted(both.plain), counted(both.default, None)
    assert plain.dispatched == default.dispatched
    assert [entry.op for entry in plain.by_op] == [f"taut::{op}"]


def a(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1.0)


# name, callable, inputs, FLOPs, bytes read and written as dispatched, compulsory bytes likewise
CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = [
    ("matrix product", torch.mm, (a(4, 8), a(8, 16)), (1024, 640, 256, 640, 256)),
    ("bf16 moves half", torch.mm, (a(4, 8).bfloat16(), a(8, 16).bfloat16()), (1024, 320, 128) * 1),
    (
        "two operations",
        lambda x, w: (x @ w).relu(),
        (a(4, 8), a(8, 16)),
        (1088, 896, 512, 640, 256),
    ),
    ("addmm", torch.nn.functional.linear, (a(4, 8), a(16, 8), a(16)), (1024, 704, 256, 704, 256)),
    ("views move nothing", lambda x: x.view(8, 4).t()[1:], (a(4, 8),), (0, 0, 0, 0, 0)),
    ("stride 0 is one element", lambda x: x.expand(100, 8) + 1, (a(8),), (800, 32, 3200, 32, 3200)),
    ("a slice is read, not its base", lambda x: x[:, :2] * 2, (a(4, 8),), (8, 32, 32, 32, 32)),
    ("in place reads and writes", in_place, (a(10),), (10, 40, 40, 40, 40)),
    ("fill only writes", lambda x: x.fill_(3.0), (a(10),), (0, 0, 40, 0, 40)),
    ("cast", lambda x: x.to(torch.bfloat16), (a(10),), (0, 40, 20, 40, 20)),
    ("empty moves nothing", lambda x: torch.empty_like(x), (a(10),), (0, 0, 0, 0, 40)),
    ("ones_like reads nothing", lambda x: torch.ones_like(x), (a(10),), (0, 0, 40, 0, 40)),
    ("reduction", lambda x: x.sum(1), (a(4, 8),), (32, 128, 16, 128, 16)),
    ("softmax", lambda x: x.softmax(1), (a(4, 8),), (160, 128, 128, 128, 128)),
    (
        "lookup reads its rows and indices",
        torch.nn.functional.embedding,
        (torch.arange(3), a(1000, 8)),
        (0, 96 + 24, 96, 96 + 24, 96),
    ),
    (
        "attention on a CPU",
        torch.nn.functional.scaled_dot_product_attention,
        (a(1, 2, 16, 8), a(1, 2, 16, 8), a(1, 2, 16, 8)),
        (2 * 2 * 16 * 16 * 16, 3072, 1024 + 128, 3072, 1024),
    ),
    (
        "convolution",
        torch.nn.functional.conv2d,
        (a(1, 3, 8, 8), a(4, 3, 3, 3)),
        (2 * 4 * 36 * 27, 4 * (192 + 108), 4 * 144, 4 * (192 + 108), 4 * 144),
    ),
    ("a tensor used twice is there once", lambda x: x * x, (a(10),), (10, 80, 40, 40, 40)),
    ("integer product", torch._int_mm, (a(32, 8).char(), a(8, 16).char()), (8192, 384, 2048)),
]


@pytest.mark.parametrize(
    ("call", "args", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_counts_are_those_by_hand(
    call: Callable[..., Any], args: tuple[Any, ...], expected: tuple[int, ...]
) -> None:
    counted = count(Subject("f", call, args, CPU))
    found = (
        counted.dispatched.flops,
        counted.dispatched.read,
        counted.dispatched.written,
        counted.compulsory.read,
        counted.compulsory.written,
    )
    assert found[: len(expected)] == expected


# Two nonzero elements of 4×4: fp32 values, int64 indices.
TWO = torch.zeros(4, 4).index_put((torch.tensor([0, 2]), torch.tensor([1, 3])), torch.ones(2))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    ("layout", "blocks", "size"),
    [
        (torch.sparse_coo, None, 2 * 2 * 8 + 2 * 4),
        (torch.sparse_csr, None, (5 + 2) * 8 + 2 * 4),
        (torch.sparse_csc, None, (5 + 2) * 8 + 2 * 4),
        (torch.sparse_bsr, (2, 2), (3 + 2) * 8 + 8 * 4),
    ],
)
def test_a_sparse_tensor_is_its_indices_and_values(
    layout: torch.layout, blocks: tuple[int, int] | None, size: int
) -> None:
    def sparse(x: torch.Tensor) -> torch.Tensor:
        return x.to_sparse(layout=layout, blocksize=blocks)

    subject = Subject("dense", lambda x: x.to_dense(), (sparse(TWO),), CPU)
    assert count(subject).compulsory == Work(0, size, 4 * 16)
    assert memory.measure(subject).before == size
    made = count(Subject("sparse", sparse, (TWO,), CPU)).compulsory
    assert (made.read, made.written) == (4 * 16, size)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_and_onednn_tensors_are_counted_whole() -> None:
    nested = torch.nested.nested_tensor([a(2, 3), a(4, 3)])
    for x, size in ((nested, 4 * 18), (a(4, 4).to_mkldnn(), 4 * 16)):
        counted = count(Subject("relu", torch.relu, (x,), CPU))
        assert (counted.compulsory.read, counted.compulsory.written) == (size, size)


def test_sparse_gradients_are_kept() -> None:
    table = torch.nn.Embedding(1000, 4, sparse=True)
    counted = count(Subject("table", table, (torch.tensor([1, 2]),), CPU, backward=True))
    # The result, and of the gradient two rows with their indices.
    assert counted.compulsory.written == 2 * 4 * 4 + 2 * 4 * 4 + 2 * 8


def test_gradients_are_counted_and_kept() -> None:
    layer = torch.nn.Linear(8, 16)
    counted = count(Subject("layer", layer, (a(4, 8),), CPU, backward=True))
    # y = xWᵀ and dW = dyᵀx are 1024 each; the sum of y and the bias' gradient 64 each.
    assert counted.dispatched.flops == 2 * 1024 + 2 * 64
    # y, dW and db stay.
    assert counted.compulsory.written == 256 + 512 + 64
    assert counted.compulsory.read == 128 + 512 + 64


def test_our_op_inside_a_callable_counts_by_its_formula() -> None:
    subject = small("rms_norm")

    def twice(*args: Any) -> torch.Tensor:
        y = torch.ops.taut.rms_norm(*args)
        return torch.ops.taut.rms_norm(y, *args[1:])

    counted = count(Subject("twice", twice, subject.args, CPU))
    one = BY_HAND[5][2]
    assert counted.dispatched == one + one
    assert counted.by_op[0].calls == 2
    # The first result is made and dropped inside; the weight is there once.
    assert counted.compulsory == Work(2 * one.flops, one.read, one.written)


def test_intensity() -> None:
    assert Work(10, 3, 2).intensity == 2.0
    assert Work(0, 0, 0).intensity == 0.0
    assert Work(1, 0, 0).intensity == float("inf")
