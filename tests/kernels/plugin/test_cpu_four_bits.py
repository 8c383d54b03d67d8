"""Which int4 product a worker on a CPU takes: the faster one that is right, chosen once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.vllm_plugin import cpu_choice, cpu_four_bits

_WHY_NOT = cpu_linear.why_not_here()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(cpu_choice, "cache_dir", lambda: str(tmp_path))
    cpu_four_bits.why_ours.cache_clear()
    yield
    cpu_four_bits.why_ours.cache_clear()


def _times(monkeypatch: pytest.MonkeyPatch, *ours: float) -> list[float]:
    """Let torch's product take 1 s, and ours these seconds, one after the other."""
    left = list(ours)
    monkeypatch.setattr(cpu_choice, "least_times", lambda *_: (left.pop(0), 1.0))
    return left


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (
            (0.8, 0.25, 0.1),
            "torch's int4 product takes 1.25, 4.00, 10.00 times as long at 1, 8, 64 tokens on this "
            "CPU",
        ),
        ((0.5, 2.0, 1.1), None),
    ],
)
def test_the_faster_product_is_chosen_once_and_kept(
    ours: tuple[float, ...], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = _times(monkeypatch, *ours)
    assert cpu_four_bits.why_ours() == said
    assert not left
    note = cpu_four_bits.why_not_ours()
    other = (
        "multiplied by torch's int4 product: taut::weight_only_linear_cpu is not faster on this CPU"
    )
    assert note == (None if said else other)
    # A compiled graph of the first start calls that product, however the second would measure.
    cpu_four_bits.why_ours.cache_clear()
    assert cpu_four_bits.why_ours() == said


def test_a_wrong_product_is_not_chosen_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _times(monkeypatch, 0.1, 0.1, 0.1)
    right = cpu_four_bits.cpu_linear.multiply

    def wrong(*operands: object) -> torch.Tensor:
        y = right(*operands)  # type: ignore[arg-type]
        y[3, 17] += y.abs().max() / 16
        return y

    monkeypatch.setattr(cpu_four_bits.cpu_linear, "multiply", wrong)
    assert cpu_four_bits.why_ours() is None
    assert len(left) == 3, "it was not timed"


def test_without_a_compiler_torchs_product_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "why_not_here", lambda: "no C++ compiler")
    assert cpu_four_bits.why_ours() is None
    assert cpu_four_bits.why_not_ours() == "multiplied by torch's int4 product: no C++ compiler"


def test_both_products_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_choice, "COPIES", 1)
    monkeypatch.setattr(cpu_choice, "_ROUNDS", 1)
    reason = cpu_four_bits._measure()
    assert reason is None or reason.startswith("torch's int4 product takes ")
