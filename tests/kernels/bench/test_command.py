"""The kernel benchmark without a GPU: refusal, report, budget."""

from __future__ import annotations

import csv
import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from taut_bench import (
    engine,
    engine_checkpoint,
    engine_measure,
    engine_models,
    engine_modes,
    engine_turns,
    greedy,
    report,
    w4a16,
)
from taut_bench.engine_measure import Settings
from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.tuner import timing
from taut_kernels.tuner.w4a16_layer import Layer, rows_to_check
from tuning import tune_w4a16_decode, tune_w4a16_wgmma

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@needs_no_gpu
@pytest.mark.parametrize("module", [engine, w4a16, tune_w4a16_decode, tune_w4a16_wgmma])
def test_without_a_gpu_the_command_says_so(
    module: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.main(["--output", str(tmp_path)]) == 2  # type: ignore[attr-defined]
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "source"), [(engine, []), (greedy, ["--scheme", "w4a16"])], ids=["engine", "greedy"]
)
def test_no_engine_starts_where_vllm_would_not_find_our_kernels(
    module: Any, source: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(module.cuda_device, "missing", lambda program: False)
    monkeypatch.setattr(engine_modes.selfcheck, "entry_points", lambda *, group: [])
    output = tmp_path / "results"
    assert module.main(["--output", str(output), *source, "--mode", "prefer"]) == 2
    assert "install taut into this environment" in capsys.readouterr().err
    assert not output.exists()


def test_stock_alone_asks_for_no_plugin(monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_modes.selfcheck, "entry_points", lambda *, group: [])
    assert not engine_modes.unready(["off"])
    assert engine_modes.unready(["off", "prefer"])


def test_stock_with_hummings_kernels_is_stock_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_modes.selfcheck, "entry_points", lambda *, group: [])
    options = engine_modes.engine_options("humming", [1])
    assert options == engine_modes.engine_options("off", [1]) | {"linear_backend": "humming"}
    assert engine_modes.environment("humming", tmp_path)["TAUT_KERNELS"] == "off"
    monkeypatch.setattr(engine_modes, "find_spec", lambda name: name)
    assert not engine_modes.unready(["off", "humming"])
    monkeypatch.setattr(engine_modes, "find_spec", lambda name: None)
    assert engine_modes.unready(["off", "humming"])
    said = "error: mode humming: humming-kernels is not installed\n"
    assert capsys.readouterr().err == said


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="the option is vLLM's")
def test_the_option_for_hummings_kernels_is_one_of_vllms(run_with_vllm: Any) -> None:
    known = "import typing; from vllm.config.kernel import LinearBackend as Known"
    done = run_with_vllm("-c", f"{known}; assert 'humming' in typing.get_args(Known)")
    assert done.returncode == 0, done.stderr[-2000:]


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
    checked = torch.tensor([0])
    layer = Layer(x, torch.zeros(4, 1), torch.zeros(4, 1), 8, checked, gold, budget=0.1)
    assert layer.why_wrong(torch.full((1, 4), 0.05)) is None
    assert "above the budget" in str(layer.why_wrong(torch.full((1, 4), 0.2)))
    assert "above the budget" in str(layer.why_wrong(torch.full((1, 4), float("nan"))))


def test_rows_to_check_are_the_first_ones_and_some_of_all_others() -> None:
    assert rows_to_check(17, "cpu").tolist() == list(range(17))
    rows = rows_to_check(4096, "cpu")
    assert rows[:256].tolist() == list(range(256))
    assert rows[-1] == 4095
    assert len(rows) == 512
    assert (rows.diff() > 0).all()
    assert rows.diff().max() <= 16


def test_a_wrong_row_behind_the_first_ones_is_found_by_its_own_gold() -> None:
    checked = torch.tensor([0, 1, 5])
    gold = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    layer = Layer(torch.zeros(6, 8), torch.zeros(1, 1), torch.zeros(1, 1), 8, checked, gold, 0.1)
    right = torch.tensor([[0.0], [1.0], [9.0], [9.0], [9.0], [5.0]])
    assert layer.why_wrong(right) is None
    assert layer.why_wrong(right[:2]) is None
    right[5] = 4.0
    assert "above the budget" in str(layer.why_wrong(right))


def test_table_takes_the_least_sum_over_the_tokens_measured() -> None:
    one, two = (DecodeTile(1, k, 1, 4, 4, 1, False) for k in (2, 4))
    results = [
        tune_w4a16_decode.Result("o", 64, 128, M, us, tile)
        for tile, times in ((one, (1.0, 9.0)), (two, (2.0, 3.0)))
        for M, us in zip((1, 8), times, strict=True)
    ]
    rows = tune_w4a16_decode._table_rows(results)
    assert [(row["max_m"], row["tile"]["k_warps"], row["us"]) for row in rows] == [
        (8, 4, [2.0, 3.0])
    ]


def test_candidates_fit_the_shape() -> None:
    for name, (N, K) in tune_w4a16_decode.SHAPES.items():
        found = list(tune_w4a16_decode.candidates(N, K))
        assert found, name
        assert len(set(found)) == len(found)
        for tile in found:
            steps = -(-K // (512 * tile.k_warps * tile.split_k))
            assert steps * 512 * tile.k_warps * tile.split_k <= 1.1 * K


def test_wgmma_table_takes_the_fastest_choice_and_candidates_fit() -> None:
    for N, K in tune_w4a16_decode.SHAPES.values():
        for M in tune_w4a16_wgmma.TOKENS:
            found = tune_w4a16_wgmma.all_candidates(N, K, M, tune_w4a16_wgmma.REGIMES)
            assert found
            assert len(set(found)) == len(found)
    tile = tune_w4a16_wgmma.all_candidates(4096, 4096, 1024, ("tma",))[0]
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
    assert [(row["max_m"], row["kernel"] == "dense", row["us"]) for row in rows] == [
        (64, False, 9.0),
        (None, True, 8.0),
    ]


def test_wgmma_table_has_the_fastest_of_each_number_of_tokens() -> None:
    tile = tune_w4a16_wgmma.all_candidates(4096, 4096, 1024, ("tma",))[0]
    timed: list[tuple[int, tune_w4a16_wgmma.Choice, float]] = [
        (384, tile, 20.0),
        (384, "dense", 30.0),
        (512, tile, 40.0),
        (512, "dense", 36.0),
        (4096, "dense", 5.0),
    ]
    results = [tune_w4a16_wgmma.Result("o", 4096, 4096, M, us, tile) for M, tile, us in timed]
    rows = tune_w4a16_wgmma.table_rows(results)
    assert [(row["max_m"], row["kernel"] == "dense", row["us"]) for row in rows] == [
        (384, False, 20.0),
        (512, True, 36.0),
        (None, True, 5.0),
    ]
    table = {"gpu": "card", "source": "test", "rows": rows}
    assert len(tiles_wgmma.parse(json.dumps(table), "t.json").choices) == 3


TINY = engine_models.LLAMA_3_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("scheme", "parts"),
    [
        (
            "w4a16",
            {
                "weight_packed": (torch.int32, (128, 256 // 8)),
                "weight_scale": (torch.bfloat16, (128, 256 // 128)),
                "weight_shape": (torch.int64, (2,)),
            },
        ),
        (
            "w4a16-g32-zp",
            {
                "weight_packed": (torch.int32, (128, 256 // 8)),
                "weight_scale": (torch.bfloat16, (128, 256 // 32)),
                "weight_zero_point": (torch.int32, (128 // 8, 256 // 32)),
                "weight_shape": (torch.int64, (2,)),
            },
        ),
        (
            "int8",
            {"weight": (torch.int8, (128, 256)), "weight_scale": (torch.bfloat16, (128, 1))},
        ),
        (
            "fp8",
            {
                "weight": (torch.float8_e4m3fn, (128, 256)),
                "weight_scale": (torch.bfloat16, (128, 1)),
            },
        ),
    ],
)
def test_engine_checkpoint_is_what_vllm_and_our_layout_expect(
    scheme: str, parts: dict[str, tuple[torch.dtype, tuple[int, ...]]], tmp_path: Path
) -> None:
    directory = tmp_path / "c"
    engine_checkpoint.write(directory, scheme, TINY)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    quantization = json.loads((directory / "config.json").read_text())["quantization_config"]
    (group,) = quantization["config_groups"].values()
    assert quantization["format"] == engine_checkpoint._FORMATS[scheme]
    assert (group["input_activations"] is None) == scheme.startswith("w4a16")
    assert group["weights"]["symmetric"] == (scheme != "w4a16-g32-zp")
    name = "model.layers.1.mlp.down_proj"
    found = {key.removeprefix(f"{name}.") for key in index if key.startswith(f"{name}.")}
    assert found == set(parts)
    for part, (dtype, shape) in parts.items():
        with safe_open(directory / index[f"{name}.{part}"], "pt") as shard:
            tensor = shard.get_tensor(f"{name}.{part}")
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert tensor.float().isfinite().all()
        if part == "weight_packed" and scheme == "w4a16":
            # No nibble of 0, which stands for -8: the weights' mean is 0.
            assert all((tensor >> place & 15).ne(0).all() for place in range(0, 32, 4))
    assert set(index.values()) == {path.name for path in directory.glob("*.safetensors")}


def test_weights_with_zero_points_have_the_values_of_symmetric_ones() -> None:
    N, K, G = 64, 256, 32
    drawn = engine_checkpoint._four_bits(N, K, G, True, torch.Generator().manual_seed(0))
    packed = engine_checkpoint._pack_quantized(*drawn)
    zeros = formats.unpack_zero_point(packed["weight_zero_point"], N)
    assert set(zeros.unique().tolist()) == {-1, 0}
    values = formats.unpack_weight(packed["weight_packed"], K)
    assert values.min() == -8, "a nibble of 0 is used"
    values = values.view(N, -1, G) - zeros.unsqueeze(-1)
    assert set(values.unique().tolist()) == set(range(-7, 8))
    assert abs(values.double().mean()) < 0.2


def test_engine_report_has_the_ratio_to_stock(tmp_path: Path) -> None:
    rows = [
        engine_turns.Row("off", 128, 16, 100.0, 2.0, 1.0, 1.0, 1.0, 2),
        engine_turns.Row("prefer", 128, 16, 150.0, 1.5, 1.5, 1.25, 1.75, 2),
        engine_turns.Row("require", 4096, 16, 90.0, 3.0, None, None, None, 1),
    ]
    engine_turns.write(rows, ["- prefer: a note"], "GPU card", tmp_path / "engine-w4a16.csv")
    text = (tmp_path / "engine-w4a16.md").read_text()
    assert "| prefer | 128 | 16 | 150 | 1.50 | 1.50 | 1.25 to 1.75 |" in text
    assert "| require | 4096 | 16 | 90 | 3.00 | – | – |" in text
    assert "- prefer: a note" in text
    assert "prefer,128,16,150.0,1.5,1.5,1.25,1.75,2" in (tmp_path / "engine-w4a16.csv").read_text()


def test_engine_options_follow_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    sizes = {"cudagraph_capture_sizes": [1, 16]}
    assert engine_modes.engine_options("off", [1, 16]) == {"compilation_config": sizes}
    plain = engine_modes.engine_options("prefer", [1, 16])
    assert plain["compilation_config"] == sizes
    assert set(plain) == {"compilation_config", "additional_config"}
    fused = engine_modes.engine_options("prefer+fused", [1, 16])
    assert fused["compilation_config"].items() >= sizes.items()
    assert "inductor_passes" in fused["compilation_config"]
    assert fused["ir_op_priority"]["rms_norm"] == ["taut"]
    attention = engine_modes.engine_options("prefer+attention", [1, 16])
    assert attention == plain | {"attention_backend": "CUSTOM"}
    both = engine_modes.engine_options("prefer+fused+attention", [1, 16])
    assert both == fused | {"attention_backend": "CUSTOM"}
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "card 9")
    for mode in ("prefer+fused", "prefer+attention"):
        with pytest.raises(RuntimeError, match=f"{mode.replace('+', '.')}: not measured"):
            engine_modes.engine_options(mode, [1])


def test_every_mode_of_an_engine_is_told_apart_by_its_parts() -> None:
    assert engine_modes.MODES[0] == "off"
    assert len(engine_modes.MODES) == len(set(engine_modes.MODES)) == 9
    assert {"prefer", "require+attention", "require+fused+attention"} <= set(engine_modes.MODES)
    variables = engine_modes.environment("prefer+fused+attention", Path("report"))
    assert variables["TAUT_KERNELS"] == "prefer"


def run_instead_of_python(worker: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark start this script where it would start an engine."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}{worker}")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))


WORKER = """
import json, os, sys
from multiprocessing.connection import Connection
argument = lambda name: sys.argv[sys.argv.index(name) + 1]
mode = argument("--worker")
print(os.environ["TAUT_KERNELS"], os.environ["TAUT_KERNELS_REPORT"])
channel = Connection(int(argument("--channel")))
def serve(rate):
    channel.send(1.5)
    while (cell := channel.recv()) is not None:
        with open("order", "a") as order:
            print(mode, *cell, file=order)
        channel.send((next(rate), 1.0))
"""


def test_engines_take_turns_in_both_orders_and_one_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = """
print("Triton kernel JIT compilation during inference: f")
if mode == "prefer": sys.exit("no engine")
serve(iter([10.0, 20.0, 20.0, 40.0] if mode == "off" else [15.0, 30.0, 20.0, 40.0]))
"""
    run_instead_of_python(WORKER + own, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "engine-w4a16.csv"
    modes = ["off", "prefer", "require+fused"]
    assert engine.run(tmp_path, modes, Settings((4, 8)), "GPU card", path) == 1
    out, err = capsys.readouterr()
    # Medians over two turns; the ratios are 1.5 in one and 1.0 in the other.
    assert "| require+fused | 128 | 4 | 18 | 1.00 | 1.25 | 1.00 to 1.50 |" in out
    assert "| off | 128 | 8 | 30 | 1.00 | 1.00 | 1.00 to 1.00 |" in out
    assert "- prefer: not measured: the engine ended with 1, see engine-prefer.log" in out
    assert "- off: 1 kinds of kernel compiled after warm-up" in out
    assert err == "error: prefer was not measured: see engine-prefer.log\n"
    assert "no engine" in (tmp_path / "engine-prefer.log").read_text()
    first = (tmp_path / "engine-require-fused.log").read_text().splitlines()[0]
    assert first == f"require {tmp_path / 'engine-require-fused-kernels.json'}"
    assert path.with_suffix(".png").stat().st_size > 1000
    order = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    assert [(mode[:3], batch) for mode, _, batch in order] == [
        *(("off", "4"), ("req", "4"), ("off", "8"), ("req", "8")),
        *(("req", "4"), ("off", "4"), ("req", "8"), ("off", "8")),
    ]


def test_a_compilation_after_warm_up_ends_the_engine_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = """
if mode == "prefer":
    channel.send(1.0)
    channel.recv()
    print("RuntimeError: Triton kernel JIT compilation during inference: late_kernel. This causes")
    sys.exit(argument("--jit-monitor") == "error")
serve(iter([10.0, 10.0]))
"""
    run_instead_of_python(WORKER + own, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "engine-w4a16.csv"
    settings = Settings((4,), jit_monitor="error")
    assert engine.run(tmp_path, ["off", "prefer"], settings, "GPU card", path) == 1
    out = capsys.readouterr().out
    assert (
        "- off: 0 kinds of kernel compiled after warm-up (JIT monitor: error); started in 2 s"
        in out
    )
    ended = "the engine ended with 1 because late_kernel compiled after warm-up"
    assert f"- prefer: not measured: {ended}, see engine-prefer.log" in out


def written_config(folder: Path) -> Path:
    """Write the configuration of a model that no engine here loads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(engine_models.LLAMA_3_8B))
    return folder


def test_a_report_names_our_libraries_and_the_rivals_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(package: str) -> str:
        if package in ("vllm", "gemlite"):
            raise report.importlib.metadata.PackageNotFoundError(package)
        return f"{len(package)}.0"

    monkeypatch.setattr(report.importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    driver = types.SimpleNamespace(stdout="580\n")
    monkeypatch.setattr(report.subprocess, "run", lambda *_, **__: driver)
    facts = report.measured_with("7 cores")
    assert facts.startswith("Measured with GPU a card, driver 580, ")
    assert "vllm not installed as a distribution" in facts
    assert "quack-kernels 13.0" in facts
    assert "gemlite" not in facts


def test_the_cache_holds_the_largest_cell_and_no_more() -> None:
    settings = Settings((1, 32), contexts=(128, 4096))
    token = 32 * 8 * 128 * 2 * 2
    assert settings.cache_bytes(engine_models.LLAMA_3_8B) == token * (4096 + 128) * 33
    halves = Settings((1, 32), contexts=(128, 4096), ranks=2)
    assert halves.cache_bytes(engine_models.LLAMA_3_8B) == token // 2 * (4096 + 128) * 33
    odd = Settings((8,), contexts=(100,))
    assert odd.cache_bytes(engine_models.LLAMA_3_8B) == token * 256 * 9, "whole blocks"
    one = Settings((1,), contexts=(128,))
    assert one.max_tokens == 1024
    assert one.cache_bytes(engine_models.LLAMA_3_8B) > token * 1024, "vLLM starts with that room"


def test_a_profiler_that_fails_costs_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Engine:
        def __init__(self, **options: Any) -> None:
            traces.append(Path(options["profiler_config"]["torch_profiler_dir"]))

        def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> None:
            pass

        def start_profile(self) -> None:
            raise OSError("no CUPTI here")

    traces: list[Path] = []
    vllm = types.SimpleNamespace(LLM=Engine, SamplingParams=lambda **_: None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    path = tmp_path / "profile.csv"
    checkpoint = written_config(tmp_path / "c")
    measured = engine_measure.Engine(checkpoint, "off", Settings((1, 4)), profiled=True)
    assert measured.measure(128, 4).tokens_per_s > 0
    measured.profile(path)
    assert "off: the profile failed: no CUPTI here" in capsys.readouterr().out
    assert not path.exists()
    assert not traces[0].exists()
    with pytest.raises(ValueError, match="profiled=True"):
        measured.profile(path)


def test_an_engine_is_measured_once_its_answers_get_no_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [1.0, 0.8, 0.6, 0.595, 0.1]
    monkeypatch.setattr(engine_measure.Engine, "_seconds", lambda *_: times.pop(0))
    llm = types.SimpleNamespace(LLM=lambda **_: None, SamplingParams=None)
    monkeypatch.setitem(sys.modules, "vllm", llm)
    checkpoint = written_config(tmp_path / "c")
    engine_measure.Engine(checkpoint, "off", Settings((1,))).settle()
    assert times == [0.1]


@pytest.mark.parametrize("jit_monitor", engine.JIT_MONITOR)
def test_the_measured_engine_gets_the_monitor_s_mode(
    jit_monitor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    class StopError(Exception):
        pass

    def llm(**options: object) -> None:
        given.update(options)
        raise StopError

    vllm = types.SimpleNamespace(LLM=llm, SamplingParams=None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    checkpoint, settings = written_config(tmp_path / "c"), Settings((1,), jit_monitor=jit_monitor)
    with pytest.raises(StopError):
        engine_measure.Engine(checkpoint, "off", settings)
    assert given["jit_monitor_mode"] == jit_monitor
    arguments = engine._parser().parse_args(["--output", "out", "--jit-monitor", jit_monitor])
    assert arguments.jit_monitor == jit_monitor
    assert engine._parser().parse_args(["--output", "out"]).jit_monitor == "warn"
