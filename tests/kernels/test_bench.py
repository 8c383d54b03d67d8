"""The kernel benchmark without a GPU: refusal, report, budget."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from taut_kernels.bench import engine, report, timing, tune_w4a16_decode, tune_w4a16_wgmma, w4a16
from taut_kernels.bench.w4a16_layer import Layer
from taut_kernels.tiles_decode import DecodeTile

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@needs_no_gpu
@pytest.mark.parametrize("module", [engine, w4a16, tune_w4a16_decode, tune_w4a16_wgmma])
def test_without_a_gpu_the_command_says_so(
    module: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.main(["--output", str(tmp_path)]) == 2  # type: ignore[attr-defined]
    assert "needs a CUDA device" in capsys.readouterr().err


def test_report_names_the_best_rival_and_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    times = {"taut": 10.0, "Marlin": 15.0, "Machete": 25.0}
    rows = [
        report.Row("o", 64, 128, 1, kernel, timing.Timing(us, us, us), 4_000_000, 1e12)
        for kernel, us in times.items()
    ]
    report.write(rows, ["gemlite: not run"], 1e12, tmp_path, "w4a16")
    text = (tmp_path / "w4a16.md").read_text()
    assert "1.50 (Marlin) | 40% |" in text
    assert "- gemlite: not run" in text
    with (tmp_path / "w4a16.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert [(c["kernel"], c["us"]) for c in cells][1] == ("Marlin", "15.000")
    assert cells[0]["weight_GB_per_s"] == "400.0"


def test_a_wrong_result_is_named() -> None:
    x = torch.zeros(1, 8)
    gold = torch.zeros(1, 4, dtype=torch.float64)
    layer = Layer(x, torch.zeros(4, 1), torch.zeros(4, 1), 8, gold, budget=0.1)
    assert layer.why_wrong(torch.full((1, 4), 0.05)) is None
    assert "above the budget" in str(layer.why_wrong(torch.full((1, 4), 0.2)))
    assert "above the budget" in str(layer.why_wrong(torch.full((1, 4), float("nan"))))


def test_table_takes_the_least_sum_over_the_tokens_measured() -> None:
    one, two = (DecodeTile(1, 1, k, 1, 4, 4, 1, False) for k in (2, 4))
    results = [
        tune_w4a16_decode.Result("o", 64, 128, M, us, tile)
        for tile, times in ((one, (1.0, 9.0)), (two, (2.0, 3.0)))
        for M, us in zip((1, 8), times, strict=True)
    ]
    results.append(tune_w4a16_decode.Result("o", 64, 128, 16, 7.0, one))
    rows = tune_w4a16_decode._table_rows(results)
    assert [(row["max_m"], row["tile"]["k_warps"], row["us"]) for row in rows] == [
        (8, 4, [2.0, 3.0]),
        (16, 2, [7.0]),
    ]


def test_candidates_fit_the_shape() -> None:
    for name, (N, K) in tune_w4a16_decode.SHAPES.items():
        for token_tiles in (1, 2):
            found = list(tune_w4a16_decode.candidates(N, K, token_tiles))
            assert found, name
            assert len(set(found)) == len(found)
            assert all(K % (512 * tile.k_warps * tile.split_k) == 0 for tile in found)


def test_wgmma_table_takes_the_fastest_choice_and_candidates_fit() -> None:
    for N, K in tune_w4a16_decode.SHAPES.values():
        for M in tune_w4a16_wgmma.TOKENS:
            found = list(tune_w4a16_wgmma.candidates(N, K, M))
            assert found
            assert len(set(found)) == len(found)
    tile = next(tune_w4a16_wgmma.candidates(4096, 4096, 64))
    results = [
        tune_w4a16_wgmma.Result("o", 4096, 4096, M, us, choice)
        for M, choice, us in (
            (64, tile, 9.0),
            (64, "dense", 20.0),
            (4096, tile, 9.0),
            (4096, "dense", 8.0),
        )
    ]
    rows = tune_w4a16_wgmma.table_rows(results)
    assert [(row["max_m"], row["tile"] == "dense", row["us"]) for row in rows] == [
        (64, False, 9.0),
        (None, True, 8.0),
    ]


def test_engine_checkpoint_is_what_vllm_and_our_layout_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 64,
        "num_key_value_heads": 1,
    }
    monkeypatch.setattr(engine, "_LLAMA_3_8B", engine._LLAMA_3_8B | small)
    engine.write_checkpoint(tmp_path / "c", layers=2)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["quantization_config"]["format"] == "pack-quantized"
    name = "model.layers.1.mlp.down_proj"
    with safe_open(tmp_path / "c" / index["weight_map"][f"{name}.weight_packed"], "pt") as shard:
        assert shard.get_tensor(f"{name}.weight_packed").shape == (128, 256 // 8)
        assert shard.get_tensor(f"{name}.weight_scale").shape == (128, 256 // 128)
        assert shard.get_tensor(f"{name}.weight_shape").tolist() == [128, 256]
    assert set(index["weight_map"].values()) == {
        p.name for p in (tmp_path / "c").glob("*.safetensors")
    }


def test_engine_report_has_the_ratio_to_stock(tmp_path: Path) -> None:
    rows = [engine.Row("off", 16, 100.0, 2.0), engine.Row("prefer", 16, 150.0, 1.5)]
    engine._write(rows, "GPU card", tmp_path)
    assert "| prefer | 16 | 150 | 1.50 | 1.50 |" in (tmp_path / "engine.md").read_text()
    assert "prefer,16,150.0,1.5" in (tmp_path / "engine.csv").read_text()
