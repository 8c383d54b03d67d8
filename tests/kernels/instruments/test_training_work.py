"""Bytes and FLOPs of the fused training ops against counts by hand."""

from __future__ import annotations

import pytest
import torch

from taut_bench.instruments import counters
from taut_bench.instruments.counters import count
from taut_bench.instruments.op_cases import from_op
from taut_bench.instruments.training_cases import CASES
from taut_bench.instruments.training_work import TRAINING_WORK
from taut_bench.instruments.work import Work

CPU = torch.device("cpu")
SMALL = {"M": 3, "N": 64, "Hq": 2, "Hk": 1, "D": 8}

# By hand, for M=3, N=64 in bf16: 192 elements, 384 bytes; a row's statistics 12 bytes, weight 128.
# RoPE: 3 tokens, 2 + 1 heads of 8: 72 elements; angles of 3 rows 48, positions 24.
X = 384
BY_HAND: list[tuple[str, dict[str, int], str, Work]] = [
    ("softmax", {}, "softmax", Work(5 * 192, X, X)),
    ("softmax", {}, "softmax_backward", Work(4 * 192, 2 * X, X)),
    ("rms_norm_train", {}, "rms_norm_train", Work(4 * 192, X + 128, X + 12)),
    ("rms_norm_train", {"residual": 1}, "rms_norm_train", Work(960, 2 * X + 128, 2 * X + 12)),
    ("rms_norm_train", {}, "rms_norm_backward", Work(9 * 192, 2 * X + 128 + 12, X + 128)),
    # the gradient of the sum, too
    (
        "rms_norm_train",
        {"residual": 1},
        "rms_norm_backward",
        Work(10 * 192, 3 * X + 128 + 12, X + 128),
    ),
    ("layer_norm", {}, "layer_norm", Work(7 * 192, X + 256, X + 24)),
    ("layer_norm", {}, "layer_norm_backward", Work(13 * 192, 2 * X + 128 + 24, X + 256)),
    ("silu", {}, "silu", Work(2 * 192, X, X)),
    ("silu", {}, "silu_backward", Work(6 * 192, 2 * X, X)),
    ("swiglu", {}, "swiglu", Work(3 * 192, 2 * X, X)),
    ("swiglu", {"gpt_oss": 1}, "swiglu", Work(8 * 192, 2 * X, X)),
    ("swiglu", {}, "swiglu_backward", Work(8 * 192, 3 * X, 2 * X)),
    ("swiglu", {"gpt_oss": 1}, "swiglu_backward", Work(16 * 192, 3 * X, 2 * X)),
    ("swiglu_packed", {}, "swiglu_packed", Work(3 * 192, 2 * X, X)),
    ("swiglu_packed", {"gpt_oss": 1}, "swiglu_packed_backward", Work(16 * 192, 3 * X, 2 * X)),
    # forward and backward are one op, called twice
    ("rope_train", {}, "rope_train", Work(2 * 3 * 72, 2 * (144 + 48 + 24), 2 * 144)),
]


@pytest.mark.parametrize(("case", "sizes", "op", "expected"), BY_HAND)
def test_work_of_every_op_is_that_counted_by_hand(
    case: str, sizes: dict[str, int], op: str, expected: Work
) -> None:
    known = {name: SMALL[name] for name in CASES[case][0] if name in SMALL}
    counted = count(from_op(case, known | sizes, CPU, backward=True))
    found = {entry.op: entry.work for entry in counted.by_op}[f"taut::{op}"]
    assert found == expected


def test_every_op_is_counted_by_hand_above() -> None:
    assert {case for case, _, _, _ in BY_HAND} == set(CASES)
    assert {op for _, _, op, _ in BY_HAND} == set(TRAINING_WORK)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"rope_train"}))
def test_formula_agrees_with_the_schema(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes by formula are those of all operands and results.

    The gradient of a sum is one element, expanded: the schema's count sees 2 bytes of it.
    """
    known = {name: SMALL[name] for name in CASES[case][0] if name in SMALL}

    def bytes_of() -> dict[str, tuple[int, int]]:
        counted = count(from_op(case, known, CPU, backward=True))
        return {entry.op: (entry.work.read, entry.work.written) for entry in counted.by_op}

    formula = bytes_of()
    monkeypatch.setattr(counters, "OP_WORK", {})
    schema = bytes_of()
    ours = [op for op in formula if op.startswith("taut::")]
    forward, backward = sorted(ours, key=lambda op: op.endswith("_backward"))
    assert formula[forward] == schema[forward]
    read, written = schema[backward]
    assert formula[backward] == (read + X - 2, written)
