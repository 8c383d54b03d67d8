"""Known blocks: what formats hold exactly, what right kernels pass, what wrong ones cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from taut_kernels.rowwise import row_quant
from taut_kernels.vllm_plugin import known_answer, known_ops
from taut_kernels.vllm_plugin.known_answer import WrongAnswerError
from taut_kernels.vllm_plugin.warm_up import Rotation, Widths
from taut_kernels.vllm_plugin.warm_up_decode import DecodeForm

N, K = 96, 14336
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_answer, "_answers", {})


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(5)) * 0.02


def _check(
    weight: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], **other: Any
) -> None:
    asked = {"block": known_answer.plain_block(K), "tokens": (1, 16, 200)} | other
    known_answer.check(
        "Kernel", "W4A16", (N, K), asked["tokens"], multiply, lambda rows: weight[rows],
        asked["block"], torch.bfloat16, CPU,
    )  # fmt: skip


def test_a_product_of_rounded_weights_passes(weight: torch.Tensor) -> None:
    rounded = weight.bfloat16().float()
    _check(weight, lambda x: (x.float() @ rounded.T).bfloat16())
    (answer,) = known_answer.results()
    assert answer["kernel"] == "Kernel" and answer["form"] == f"W4A16, {N}x{K}, bfloat16"
    assert answer["calls"] == 3 and 0 < answer["error"] < 0.5


def _without(columns: slice) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def damage(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        less = weight.clone()
        less[:, columns] = 0
        return x.float() @ less.T

    return damage


def _one_feature_of_a_neighbour(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float() @ weight.T
    y[:, 7] = y[:, 8]
    return y


def _one_row_not_written(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float() @ weight.T
    y[-1] = 0
    return y


def _not_a_number(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float() @ weight.T
    y[0, 0] = torch.nan
    return y


DAMAGE = {
    "32 columns of 14,336 left out": _without(slice(64, 96)),
    "one feature": _one_feature_of_a_neighbour,
    "last row": _one_row_not_written,
    "NaN": _not_a_number,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_product_is_refused(
    weight: torch.Tensor, damage: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(WrongAnswerError, match=r"Kernel for W4A16.* at \d+ tokens.*--kernels off"):
        _check(weight, lambda x: damage(x, weight).bfloat16())
    assert known_answer.results() == []


def test_no_other_kernels_are_offered_for_what_only_we_load() -> None:
    kind = known_answer.Kind("TautLowRankLinearMethod", "low rank 8")
    with pytest.raises(WrongAnswerError, match="'quantize' made") as refused:
        known_answer.settle(kind, 2.0, calls=1, ms=0.0, device=torch.device("cpu"))
    assert "--kernels off" not in str(refused.value)


def test_a_number_of_tokens_that_takes_another_tile_is_asked_for_itself(
    weight: torch.Tensor,
) -> None:
    def wrong_from_100(x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ weight.T * (1.0 if x.shape[0] < 100 else 1.05)).bfloat16()

    with pytest.raises(WrongAnswerError, match="at 200 tokens"):
        _check(weight, wrong_from_100)


def test_rows_are_found_where_torchs_own_type_is_the_models(weight: torch.Tensor) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads
    try:
        _check(weight, lambda x: (x.float() @ weight.T).bfloat16(), tokens=(1, 1153, 1665))
        known_ops.check_ops(WIDTHS, CPU)
        known_ops.check_attention(FORM, CPU)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(known_answer._spread(1665, CPU)[[0, -1]], torch.tensor([0, 1664]))


def test_layers_alike_are_asked_once(weight: torch.Tensor) -> None:
    asked: list[int] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        asked.append(x.shape[0])
        return (x.float() @ weight.T).bfloat16()

    for _ in range(3):
        _check(weight, multiply)
    assert asked == [1, 16, 200]


def test_nothing_is_asked_of_a_kernel_without_numbers_of_tokens(weight: torch.Tensor) -> None:
    _check(weight, DAMAGE["NaN"], tokens=())
    assert known_answer.results() == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_dynamic_blocks_are_quantised_without_rounding(dtype: torch.dtype) -> None:
    make = (
        known_answer.int8_block(512, symmetric=True, scale=None)
        if dtype is torch.int8
        else known_answer.fp8_block(512, group=128, scale=None)
    )
    x = make(9, CPU)
    assert torch.equal(x.bfloat16().float(), x)
    q, scales = row_quant.quantize_rows_ref(x, dtype)
    assert torch.equal(q.float() * scales, x)


def test_asymmetric_blocks_fill_the_range_of_int8() -> None:
    x = known_answer.int8_block(512, symmetric=False, scale=None)(9, CPU)
    scale = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) / 255
    codes = x / scale
    assert torch.equal(codes, codes.round())
    assert codes.min() == -128 and codes.max() == 127


@pytest.mark.parametrize("scale", [0.0173, 3.3])
def test_static_blocks_survive_a_scale_that_is_no_power_of_two(scale: float) -> None:
    x = known_answer.int8_block(512, symmetric=True, scale=scale)(9, CPU)
    codes = (x.bfloat16().float() / scale).round()
    assert torch.equal(codes * scale, x)
    y = known_answer.fp8_block(512, group=512, scale=scale)(9, CPU)
    stored = (y.bfloat16().float() / scale).to(torch.float8_e4m3fn)
    torch.testing.assert_close(stored.float() * scale, y, rtol=1e-6, atol=0)


WIDTHS = Widths(
    norms=frozenset({(64, torch.bfloat16)}),
    activations=frozenset({(48, torch.bfloat16)}),
    quantised=frozenset({torch.int8}),
    inputs=frozenset({(64, torch.bfloat16, torch.int8)}),
    rotations=frozenset({Rotation(4, 2, 16, 16, True, torch.bfloat16, True)}),
)
STATIC = replace(
    WIDTHS, quantised=frozenset({torch.float8_e4m3fn}), inputs=frozenset(), static_scale=True
)
"""Of a model whose activations have a given scale."""
FORM = DecodeForm(4, 2, 16, 16, 0, torch.bfloat16, torch.bfloat16)


def test_every_op_of_a_model_answers_here() -> None:
    known_ops.check_ops(WIDTHS, CPU)
    known_ops.check_attention(FORM, CPU)
    kernels = {answer["kernel"] for answer in known_answer.results()}
    names = ("rms_norm", "rms_norm_quant", "silu_mul", "silu_mul_quant", "row_quant", "rope_apart")
    assert kernels == {f"taut::{name}" for name in (*names, "paged_decode", "cache_write")}


def test_ops_with_a_given_scale_answer_where_a_model_has_one() -> None:
    known_ops.check_ops(STATIC, CPU)
    asked = {answer["kernel"]: answer for answer in known_answer.results()}
    for name in ("rms_norm_static_quant", "silu_mul_static_quant"):
        assert 0 <= asked[f"taut::{name}"]["error"] < 1
    known_answer._answers.clear()
    known_ops.check_ops(replace(STATIC, static_scale=False), CPU)
    assert not any("static" in answer["kernel"] for answer in known_answer.results())


@pytest.mark.parametrize(
    ("specification", "name", "check"),
    [
        ("rms_norm.rms_norm_ref", "rms_norm", lambda: known_ops.check_ops(WIDTHS, CPU)),
        ("silu_mul.silu_mul_quant_ref", "silu_mul_quant",
         lambda: known_ops.check_ops(WIDTHS, CPU)),
        ("rms_norm.rms_norm_static_quant_ref", "rms_norm_static_quant",
         lambda: known_ops.check_ops(STATIC, CPU)),
        ("silu_mul.silu_mul_static_quant_ref", "silu_mul_static_quant",
         lambda: known_ops.check_ops(STATIC, CPU)),
        ("row_quant.quantize_rows_ref", "row_quant", lambda: known_ops.check_ops(WIDTHS, CPU)),
        ("paged_decode_ref", "paged_decode", lambda: known_ops.check_attention(FORM, CPU)),
    ],
)  # fmt: skip
def test_an_op_that_differs_from_its_specification_is_refused(
    specification: str, name: str, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other side of the comparison is damaged: the op's own CPU code is the specification.
    holder: Any = known_ops
    *path, last = specification.split(".")
    for part in path:
        holder = getattr(holder, part)
    original = getattr(holder, last)

    def shifted(*arguments: Any) -> Any:
        result = original(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        first[..., -1] = 0
        return result

    monkeypatch.setattr(holder, last, shifted)
    with pytest.raises(WrongAnswerError, match=f"taut::{name} for "):
        check()
