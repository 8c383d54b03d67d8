"""An estimate for shapes nobody measured: by neighbours, cautious, and called an estimate."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taut_kernels.gemm.w4a16 import neighbours, verdict
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import measured_here, tile_tables
from taut_kernels.launch.measured_here import Document, Machine

SIDES = (1024, 2048, 4096, 8192)
GRID = list(itertools.product(SIDES, SIDES))
CARD = "a card of its own"


@pytest.fixture(autouse=True)
def _fresh_tables() -> Iterator[None]:
    yield
    verdict.tables.cache_clear()
    verdict._estimates.cache_clear()
    measured_here._document.cache_clear()


def _brute_force(ratios: dict[tuple[int, int], float], shape: tuple[int, int]) -> float:
    """Three nearest in (log N, log K), weighted by 1 / (0.05 + distance), geometric mean."""
    found = []
    for (N, K), ratio in ratios.items():
        distance = math.sqrt(math.log(N / shape[0]) ** 2 + math.log(K / shape[1]) ** 2)
        found.append((distance, (N, K), ratio))
    near = sorted(found)[:3]
    weights = [1 / (0.05 + distance) for distance, *_ in near]
    told = sum(w * math.log(ratio) for w, (*_, ratio) in zip(weights, near, strict=True))
    return math.exp(told / sum(weights))


def test_an_estimate_is_the_neighbours_mean_less_the_worst_over_estimate() -> None:
    decode = {shape: 1 + 8192 / (shape[0] + shape[1]) for shape in GRID}
    overall = {shape: 1 + 1024 / shape[1] for shape in GRID}
    known = neighbours.estimates({shape: (decode[shape], overall[shape]) for shape in GRID})
    assert known is not None
    assert len(GRID) <= neighbours.LOWERED_BY, "or the largest over-estimate is of fewer than all"
    least = known.of(3072, 3072)
    assert least is not None
    for index, ratios in enumerate((decode, overall)):
        over = max(
            _brute_force({o: r for o, r in ratios.items() if o != shape}, shape) / true
            for shape, true in ratios.items()
        )
        assert over > 1
        assert least[index] == pytest.approx(_brute_force(ratios, (3072, 3072)) / over)


def test_a_far_shape_that_is_told_badly_lowers_no_estimate_here() -> None:
    """Of 33 shapes on a line the last is half as good as all others."""
    line = {(1024 * (i + 1), 4096): (2.0, 2.0) for i in range(neighbours.LOWERED_BY)}
    known = neighbours.estimates(line | {(65536, 4096): (1.0, 1.0)})
    assert known is not None
    assert known.of(1536, 4096) == (pytest.approx(2.0), pytest.approx(2.0))
    near = known.of(40960, 4096)
    assert near == (pytest.approx(1.0), pytest.approx(1.0))


def test_shapes_that_machete_refuses_do_not_speak() -> None:
    ratios = dict.fromkeys(GRID, (1.5, 1.5)) | {(3072 + 64, 3072): (9.0, 9.0)}
    known = neighbours.estimates(ratios)
    assert known is not None
    assert known.of(3072, 3072) == (pytest.approx(1.5), pytest.approx(1.5))


def _held_out(ratios: dict[tuple[int, int], tuple[float, float]]) -> Iterator[tuple[Any, Any]]:
    """A fifth of the shapes after the other without measurement: each one's word and its truth."""
    shapes = random.Random(0).sample(sorted(ratios), len(ratios))
    for fold in range(5):
        held = shapes[fold::5]
        known = neighbours.estimates({s: r for s, r in ratios.items() if s not in held})
        assert known is not None
        for shape in held:
            yield known.of(*shape), ratios[shape]


@pytest.mark.parametrize("named", ["g128", "g32-zp"])
@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_of_the_shipped_tables_no_loser_is_chosen_by_an_estimate(gpu: str, named: str) -> None:
    ratios = {
        (N, K): (measured.decode, measured.overall)
        for (N, K, weights), measured in verdict.tables()[gpu].choices.items()
        if weights is WeightFormat(named)
    }
    judged = list(_held_out(ratios))
    over = [
        max(told / has for told, has in zip(least, true, strict=True))
        for least, true in judged
        if least is not None
    ]
    # What the record says of such estimates.
    share, factor = neighbours.TOO_HIGH
    assert 0 < sum(one > 1 for one in over) < share / 100 * len(over)
    assert max(over) < factor
    chosen = [true for least, true in judged if least is not None and min(least) >= 1]
    assert min(min(true) for true in chosen) >= 0.98
    ours = sum(min(true) >= 1 for _, true in judged)
    assert len(chosen) > 0.5 * ours, "an estimate that never says win is none"


def test_there_is_no_estimate_outside_of_what_was_measured() -> None:
    ratios = dict.fromkeys(GRID, (2.0, 2.0))
    known = neighbours.estimates(ratios)
    assert known is not None
    assert known.of(3072, 3072) == (pytest.approx(2.0), pytest.approx(2.0))
    assert known.of(512, 2048) is None, "narrower than all that were measured"
    assert known.of(4096, 16384) is None
    lonely = {shape: (2.0, 2.0) for shape in GRID if max(shape) <= 2048}
    lonely |= {(65536, K): (2.0, 2.0) for K in range(1024, 1024 + 16 * 64, 64)}
    apart = neighbours.estimates(lonely)
    assert apart is not None
    assert apart.reach < 2
    assert apart.of(12000, 1500) is None, "between two clouds, far from both"
    assert neighbours.estimates(dict.fromkeys(GRID[:15], (9.0, 9.0))) is None


def _given(monkeypatch: pytest.MonkeyPatch, path: Path, ratio: float, named: str) -> None:
    field = {} if named == "g128" else {"format": named}
    rows = [
        {"N": N, "K": K, "M": [1, 256], "us": [1.0, 1.0], "vllm_us": [ratio, ratio]} | field
        for N, K in GRID
    ]
    measured_here.write(path, Document(Machine(CARD, "1", {}), "s", {"w4a16_measured": rows}))
    monkeypatch.setenv(measured_here.VARIABLE, str(path))
    verdict.tables.cache_clear()


def test_ours_is_preferred_where_the_estimate_says_win_and_the_record_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    asked = (3072, 3072)
    _given(monkeypatch, tmp_path / "won.json", 1.5, "g128")
    assert verdict.why_not_preferred(CARD, *asked) is None
    assert verdict.why_not_preferred(CARD, *asked, WeightFormat.G64) is None
    assert not verdict.is_measured(CARD, *asked, WeightFormat.G128)
    said = verdict.remark(CARD, *asked, 128, torch.bfloat16, has_zeros=False)
    assert said == (
        "not measured; estimated from the nearest measured shapes: 1.50 of vLLM's speed in decode "
        "(held out on an H100 and an H200, fewer than 6 of 100 were too high, by less than 25 %)"
    )
    # Groups of 32 go by their own rows, of which there are none.
    reason = verdict.why_not_preferred(CARD, *asked, WeightFormat.G32_ZP)
    assert reason == f"3072×3072 in groups of 32 not measured against vLLM's kernels on {CARD}"
    assert verdict.why_not_preferred(CARD, 512, 512) is not None
    verdict._estimates.cache_clear()
    _given(monkeypatch, tmp_path / "lost.json", 0.9, "g128")
    reason = verdict.why_not_preferred(CARD, *asked)
    assert reason == f"3072×3072 not measured against vLLM's kernels on {CARD}"


def test_a_card_without_measurements_has_no_estimate() -> None:
    assert verdict.expected("NVIDIA X", 4096, 4096, WeightFormat.G128) is None
    assert tile_tables.of_card(verdict.tables(), "NVIDIA X") is None
    assert json.dumps(verdict.why_not_preferred("NVIDIA X", 4096, 4096)).startswith('"not measured')
