"""The clock of a decoder layer, as far as it runs without a card."""

from __future__ import annotations

import argparse
import csv
import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from taut_bench import decode_chain, other_tiles, report
from taut_bench.decoder_layer import FORMS, PRODUCTS, Step, _in_form
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch import early_start
from taut_kernels.norm import rms_norm, rms_norm_launch
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.tuner.timing import Timing

STEP = Step("fp8", 16, 192, 1024)


def test_it_needs_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode_chain.main(["--output", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--tokens", "0"], ["--scheme", "w8"], ["--contexts", "many"]])
def test_a_wrong_number_is_refused(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        decode_chain.main(["--output", str(tmp_path), *wrong])


def test_late_starts_hold_inside_alone() -> None:
    def early() -> bool:
        return tiles_fused.lookup("NVIDIA H200", "rms_norm", 4096, 1, True).pdl

    assert early()
    with decode_chain.late_starts():
        assert early_start.EARLY_TOKENS == 0
        assert not early()
    assert early()


def test_another_tile_holds_inside_alone() -> None:
    def tiles() -> list[tiles_fused.FusedTile]:
        asked = (("add_rms_norm", 16), ("add_rms_norm", 4096), ("silu_mul", 16))
        return [tiles_fused.lookup("NVIDIA H200", op, 4096, M, True) for op, M in asked]

    shipped = tiles()
    op, tile = other_tiles.parse("add_rms_norm=1x2048/8w/r48")
    with other_tiles.instead({op: tile}):
        # Early where the table's tile is, late where it is late.
        early = dataclasses.replace(tile, pdl=True)
        assert tiles() == [early, tile, shipped[2]]
    assert tiles() == shipped


def test_an_op_runs_with_the_other_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def prepared(tile: tiles_fused.FusedTile, *_: Any) -> None:
        used.append(str(tile))

    monkeypatch.setattr(rms_norm_launch, "_prepared", prepared)
    x = torch.zeros(4, 512)
    _, tile = other_tiles.parse("rms_norm=2x256/2w")
    for tiles in ({}, {"rms_norm": tile}, {}):
        with other_tiles.instead(tiles):
            rms_norm._launch_rms_norm(x, None, None, 1e-6)
    assert used[0] == used[2] != used[1] == "2x256/2w"
    rms_norm_launch.plan.cache_clear()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add_norm=1x2048/8w", "OP one of rms_norm, "),
        ("rms_norm=1x2048", r"got rms_norm=1x2048"),
        ("rms_norm=3x2048/8w", "rows must be a power of two, got 3"),
        ("rms_norm=1x2048/8w/r16", "registers must be 0 or lie in 32..255, got 16"),
    ],
)
def test_a_wrong_tile_is_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        other_tiles.parse(text)


def test_a_form_changes_rings_alone() -> None:
    ring = ScaledMmTile("ring", 16, 64, 256, 4, 6, early=True, prefetch=4)
    forms = {form: _in_form(ring, form) for form in FORMS[:-1]}
    assert forms["table"] == ring
    assert (forms["late"].early, forms["late"].prefetch) == (False, 0)
    assert (forms["early"].early, forms["early"].prefetch) == (True, 0)
    assert (forms["early+prefetch"].early, forms["early+prefetch"].prefetch) == (True, 2)
    fed = ScaledMmTile("hopper", 128, 128, 128, 4, 6)
    assert all(_in_form(fed, form) == fed for form in FORMS)


def test_a_step_has_pages_for_all_it_may_have() -> None:
    assert Step("w4a16", 1, 10, 1024).pages == 64
    assert Step("w4a16", 1, 10, 1025).pages == 65


def test_each_product_is_tried_beside_the_best_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = {"table": 5.0, "late": 4.0, "early": 2.0, "early+prefetch": 3.0, "CUTLASS": 6.0}

    def subject(name: str, forms: dict[str, str]) -> Any:
        return SimpleNamespace(name=name, us=sum(costs[form] for form in forms.values()))

    def measure(subjects: list[Any]) -> list[Timing]:
        return [Timing(s.us, s.us, s.us) for s in subjects]

    monkeypatch.setattr(decode_chain, "_measure", measure)
    chain: Any = SimpleNamespace(step=STEP, subject=subject)
    rows = decode_chain._forms(chain)
    assert len(rows) == len(FORMS) * len(PRODUCTS)
    best = min(rows, key=lambda row: row.timing.median)
    assert best.timing.median == 4 * costs["early"]
    assert best.kernels.startswith("qkv early (o early, gate_up early, down early)")
    cutlass = [row.timing.median for row in rows if " CUTLASS (" in row.kernels]
    assert cutlass == [3 * costs["early"] + costs["CUTLASS"]] * len(PRODUCTS)


def test_what_was_measured_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "a card"})
    rows = [decode_chain.Row(STEP, "as shipped", Timing(75.03, 75.0, 75.1))]
    decode_chain._write(rows, 4e12, tmp_path)
    with (tmp_path / "decode_chain.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert found == [
        {"scheme": "fp8", "tokens": "16", "context": "192", "bound": "1024"}
        | {"kernels": "as shipped", "us": "75.030", "p20_us": "75.000", "p80_us": "75.100"}
    ]
    text = (tmp_path / "decode_chain.md").read_text(encoding="utf-8")
    assert "GPU a card" in text
    assert "| fp8 | 16 | 192 (1024) | as shipped | 75.03 [75.00, 75.10] |" in text


def captured(
    chain: decode_chain.Chain, *, late: bool
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]:
    """Record a chain from its first input on; return the graph, its result and the residual."""
    residual = torch.empty_like(chain.residual)
    forms = dict.fromkeys(PRODUCTS, "late") if late else {}

    def run() -> torch.Tensor:
        residual.copy_(chain.residual)
        x = chain.x
        with decode_chain.late_starts() if late else nullcontext():
            for layer in chain.layers:
                x = layer(x, residual, forms)
        return x

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = run()
    return graph, (x, residual)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(
    ("scheme", "tokens"),
    [("w4a16", 1), ("w4a16", 16), ("w4a16", 64), ("fp8", 1), ("fp8", 64), ("int8", 16)],
)
def test_gpu_layers_that_start_early_have_the_bits_of_those_that_do_not(
    scheme: str, tokens: int
) -> None:
    chain = decode_chain.Chain(Step(scheme, tokens, 192, 1024))
    graphs = [captured(chain, late=late) for late in (False, True)]
    for _ in range(20):
        for tensor in (chain.x, chain.residual):
            tensor.copy_(torch.randn_like(tensor))
        for graph, _ in graphs:
            graph.replay()
        torch.cuda.synchronize()
        (_, early), (_, alone) = graphs
        assert all(tensor.isfinite().all() for tensor in early)
        for found, wanted in zip(early, alone, strict=True):
            assert torch.equal(found, wanted)
