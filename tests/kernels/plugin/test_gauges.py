"""The worker's gauges of its kernels: counted, bounded, shown by vLLM's own /metrics."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taut_kernels.vllm_plugin import compat, gauges, record

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
ATENS = "multiplied by torch's int4 product: taut::weight_only_linear_cpu is not faster on this CPU"
REASON = "group size must be 32, 64, 128 or one group a channel, got 16; vLLM CPUWNA16LinearKernel"
NO_CUDA = "no CUDA device: vLLM's CPU graph is compiled as a whole"
START_TIMEOUT_S = 600


def _layer(name: str, reason: str | None = None, **change: Any) -> dict[str, Any]:
    fields = {"kernel": "Ours", "scheme": "uint4b8", "in_scope": True, "shape": "64x128"}
    return fields | {"layer": name, "reason": reason, "note": None} | change


# --- counting ------------------------------------------------------------------------------------


def test_layers_are_counted_by_kind_not_by_number() -> None:
    layers = [
        _layer(f"model.layers.{i}.mlp.{kind}_proj") for i in range(200) for kind in ("up", "down")
    ]
    found = gauges.layer_series(layers)
    assert {(series.layer, count) for series, count in found.items()} == {
        ("up_proj", 200),
        ("down_proj", 200),
    }


@pytest.mark.parametrize(
    ("change", "ours", "reason"),
    [
        ({}, "yes", ""),
        ({"note": "slower at 32"}, "yes", "slower at 32"),
        ({"reason": "too odd"}, "no", "too odd"),
        ({"reason": "slower at 64", "kernel": "Ours+Theirs"}, "partly", "slower at 64"),
        ({"reason": "too odd", "note": "slower at 32"}, "no", "too odd"),
    ],
)
def test_a_series_says_whose_and_why(change: dict[str, Any], ours: str, reason: str) -> None:
    (series,) = gauges.layer_series([_layer("a.o_proj", **change)])
    assert (series.ours, series.reason) == (ours, reason)


def test_a_model_of_many_shapes_has_a_bounded_number_of_series() -> None:
    layers = [_layer(f"{i}.o_proj", shape=f"{i}x64") for i in range(300)]
    layers += [_layer("x.common", shape="1x1")] * 5
    found = gauges.layer_series(layers)
    assert len(found) == gauges.MOST_SERIES + 1
    assert sum(found.values()) == 305
    assert {series.layer: count for series, count in found.items()}["common"] == 5
    assert found[gauges._OTHER] == 305 - 5 - (gauges.MOST_SERIES - 1)


def test_ops_are_counted_by_owner() -> None:
    ops: dict[str, Any] = {
        "providers": {"rms_norm": "taut"},
        "custom_ops": {"SiluAndMul": {"taut": 30, "vllm": 2}},
        "reason": None,
        "attention": [
            {"owner": "taut", "reason": None, "layers": 31},
            {"owner": "vllm", "reason": "a soft cap", "layers": 1},
        ],
        "cache_writes": [{"owner": "vllm", "reason": "slots of torch.int32", "layers": 32}],
        "refused": {"rms_norm": ["activations are torch.float64"]},
    }
    assert gauges.op_series(ops) == {
        ("rms_norm", "taut", ""): 1,
        ("rms_norm", "vllm", "activations are torch.float64"): 1,
        ("SiluAndMul", "taut", ""): 30,
        ("SiluAndMul", "vllm", ""): 2,
        ("decode_attention", "taut", ""): 31,
        ("decode_attention", "vllm", "a soft cap"): 1,
        ("cache_write", "vllm", "slots of torch.int32"): 32,
    }
    del ops["attention"], ops["cache_writes"], ops["refused"]  # as a record of before has it
    assert len(gauges.op_series(ops)) == 3


# --- the record between the processes ------------------------------------------------------------


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record.write([_layer("a")], "prefer", path, {"reason": None})
    assert record.read(path) == {
        "format": 1,
        "mode": "prefer",
        "layers": [_layer("a")],
        "ops": {"reason": None},
    }
    path.write_text('{"format": 2}')
    with pytest.raises(ValueError, match=r"record\.json: not a kernel record of format 1"):
        record.read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"record\.json: not JSON"):
        record.read(path)


def test_parts_of_a_record_are_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    ops = {"reason": None, "attention": [1], "cache_writes": [2]}
    record.write([_layer("a")], "prefer", path, ops)
    before = record.read(path)
    record.amend(path, {"attention": [], "cache_writes": [3]})
    assert record.read(path) == before | {
        "ops": {"reason": None, "attention": [], "cache_writes": [3]}
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    with pytest.raises(OSError, match="none"):
        record.amend(tmp_path / "none.json", {})


PLACE = """
import os, sys
from taut_kernels.vllm_plugin import record
record.make_place(); named = os.environ[record.REPORT_VARIABLE]; record.make_place()
assert os.environ[record.REPORT_VARIABLE] == named
child = os.fork()
if child == 0:
    record.make_place()
    place = record.place()
    record.write([], "same" if str(place) == named else "other", place)
    sys.exit()
os.waitpid(child, 0)
print(named, record.read(record.place())["mode"])
"""


def test_children_write_to_their_parents_file_which_goes_with_it(run_python: Any) -> None:
    process = run_python("-c", PLACE)
    assert process.returncode == 0, process.stderr
    named, written_by_child = process.stdout.split()
    assert written_by_child == "same"
    assert not Path(named).parent.exists()


def test_a_place_the_user_named_stays(run_python: Any, tmp_path: Path) -> None:
    named = tmp_path / "mine.json"
    process = run_python("-c", PLACE, env={"TAUT_KERNELS_REPORT": str(named)})
    assert process.stdout.split() == [str(named), "same"], process.stderr
    assert named.exists()


# --- in prometheus_client ------------------------------------------------------------------------

PUBLISH = """
import json, os, sys
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
from taut_kernels.vllm_plugin import gauges
for document in json.loads(sys.argv[1]):
    gauges.publish(document)
registry = REGISTRY
if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def _samples(text: str) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    """Samples of ours: (name, labels, value)."""
    found = re.findall(r"^(taut_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
    label = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
    return {(name, frozenset(label.findall(labels)), float(value)) for name, labels, value in found}


def _sample(
    name: str, value: float, **labels: str
) -> tuple[str, frozenset[tuple[str, str]], float]:
    return name, frozenset(labels.items()), value


@pytest.mark.parametrize("processes", ["one API server", "several"])
def test_a_new_record_takes_the_place_of_the_old(
    processes: str, run_python: Any, tmp_path: Path
) -> None:
    documents = [
        {"mode": "require", "layers": [_layer("a.o_proj", "old")]},
        {"mode": "prefer", "layers": [_layer("a.o_proj")]},
    ]
    env = {} if processes == "one API server" else {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    shown = {"layer": "o_proj", "shape": "64x128", "scheme": "uint4b8", "kernel": "Ours"}
    process = run_python("-c", PUBLISH, json.dumps(documents[1:]), env=env)
    assert process.returncode == 0, process.stderr
    expected = {
        _sample("taut_kernel_layers", 1, **shown, ours="yes", reason=""),
        _sample("taut_kernels_mode", 1, mode="prefer"),
    }
    assert _samples(process.stdout) == expected
    if processes == "one API server":
        process = run_python("-c", PUBLISH, json.dumps(documents))
        assert _samples(process.stdout) == expected


def test_the_callback_runs_once_after_vllms_own_and_a_changed_vllm_is_named() -> None:
    seen: list[str] = []

    class Logger:
        def log_engine_initialized(self) -> None:
            seen.append("vllm")

    for _ in range(3):
        compat.after_engine_start(Logger, lambda: seen.append("taut"))
    Logger().log_engine_initialized()
    assert seen == ["vllm", "taut"]
    with pytest.raises(compat.IncompatibleVllmError, match="log_engine_initialized"):
        compat.after_engine_start(object, lambda: None)


def test_an_engine_without_a_record_is_logged_not_invented(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TAUT_KERNELS_REPORT", str(tmp_path / "none.json"))
    gauges.publish_record()
    assert "the engine left no record at" in caplog.text


# --- in a real worker ----------------------------------------------------------------------------


def _start(directory: Path, log: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(directory), "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TAUT_", "VLLM_"))}
    environment = inherited | {
        "TAUT_KERNELS": "prefer",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as sink:
        return subprocess.Popen(
            command, stdout=sink, stderr=sink, env=environment, start_new_session=True
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(120)
    # Its engine process, wherever it is by now.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _metrics(process: subprocess.Popen[bytes], port: int, log: Path) -> str:
    """Wait until the server answers; what it exports."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"no answer within {START_TIMEOUT_S} s: {log.read_text()[-3000:]}")


@needs_vllm
@pytest.mark.vllm
def test_a_worker_exports_each_kind_of_layer_with_its_kernel_and_reason(
    make_tiny_llama: Callable[[int], Path], tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = _start(make_tiny_llama(16), log, port)
    try:
        samples = _samples(_metrics(process, port, log))
    finally:
        _stop(process)
    (reason,) = {
        dict(labels)["reason"]
        for name, labels, _ in samples
        if name == "taut_kernel_layers" and ("ours", "yes") in labels
    }
    assert reason in ("", ATENS)  # as the timing of both at the start found
    ours = {"kernel": "TautW4A16LinearKernel", "ours": "yes", "reason": reason}
    theirs = {"kernel": "CPUWNA16LinearKernel", "ours": "no", "reason": REASON}
    expected = {
        _sample("taut_kernel_layers", 2, **labels)
        for labels in (
            {"layer": "qkv_proj", "shape": "256x128", "scheme": "uint4b8"} | ours,
            {"layer": "o_proj", "shape": "128x128", "scheme": "uint4b8"} | ours,
            {"layer": "gate_up_proj", "shape": "512x128", "scheme": "uint4"} | ours,
            {"layer": "down_proj", "shape": "128x256", "scheme": "uint4"} | theirs,
        )
    }
    expected |= {
        _sample("taut_kernel_ops", 1, op=op, owner="native", reason=NO_CUDA)
        for op in ("rms_norm", "fused_add_rms_norm")
    }
    attention = {"owner": "vllm", "reason": "no CUDA device; vLLM CPUAttentionBackendImpl"}
    for op in ("decode_attention", "cache_write"):
        expected.add(_sample("taut_kernel_ops", 2, op=op, **attention))
    assert samples == expected | {_sample("taut_kernels_mode", 1, mode="prefer")}
