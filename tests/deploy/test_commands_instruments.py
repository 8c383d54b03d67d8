"""``taut roofline | profile | memory | explain`` and ``taut bench kernels --report``, as a user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from tiny_models import write_llama

from taut_bench.instruments import ceilings, explain, memory, profile
from taut_deploy import cli

SUBJECTS = """
import torch

def norm(x, w):
    print("said by the callable")
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
    return y * w

def plain(x, w):
    return x * w

def failing(x, w):
    return x.view(3)

def tiring(x, w, calls=[]):
    calls.append(1)
    if len(calls) > 3:
        raise RuntimeError("tired")
    return x * w

def example_inputs(device):
    return torch.ones(16, 64, device=device), torch.ones(64, device=device)
"""
BENCH = "shape,M,kernel,us\no,1,taut,1.0\no,1,Marlin,2.0\n"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``subjects.py``, a tiny ``model/``, the CSV of a benchmark, and a home of its own."""
    path = tmp_path_factory.mktemp("instruments")
    (path / "subjects.py").write_text(SUBJECTS)
    write_llama(path / "model", layers=1)
    (path / "bench").mkdir()
    (path / "bench" / "w4a16.csv").write_text(BENCH)
    return path


@pytest.fixture
def run(room, monkeypatch, call_taut):
    """The command inside this process; ceilings are measured in no time, and kept."""
    monkeypatch.chdir(room)
    monkeypatch.setenv("TAUT_HOME", str(room / "home"))
    monkeypatch.setattr(ceilings, "_CPU_RUNS", 1)
    monkeypatch.setattr(ceilings, "_CPU_SECONDS", 0.0)
    monkeypatch.setattr(ceilings, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "_load", lambda device: 0.0)
    return call_taut


def test_roofline_of_an_op_over_sizes(run, room: Path) -> None:
    arguments = ("rms_norm", "--shape", "M=1,4", "--shape", "N=64", "--device", "cpu")
    code, out, err = run("roofline", *arguments, "--json")
    assert code == 0, err
    found = json.loads(out)
    # 4 FLOPs an element; x and y of 2 bytes and the weight.
    assert [result["whole"]["flops"] for result in found["results"]] == [256, 1024]
    assert [result["whole"]["moved"] for result in found["results"]] == [384, 1152]
    assert found["ceilings"]["copy_bytes_per_s"] > 0
    assert "runs its reference in plain torch" in err
    assert all(Path(file).stat().st_size for file in found["files"])
    assert (room / "home" / "ceilings.json").is_file()
    code, _, err = run("roofline", *arguments)
    assert code == 0
    assert "measuring" not in err, "the second run takes the ceilings that were kept"


def test_roofline_of_a_model_directory(run) -> None:
    code, out, err = run(
        "roofline", "model", "--tokens", "8", "--batch", "2", "--device", "cpu", "--json"
    )
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert result["subject"] == "model[2x8]"
    assert {"aten::mm", "aten::embedding"} <= {row["name"] for row in result["by_op"]}


def test_profile_of_a_callable_keeps_stdout_for_json(run, room: Path) -> None:
    code, out, err = run(
        "profile", "subjects.py:norm", "--device", "cpu", "--active", "2", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert len(found["step_micros"]) == 2
    assert "said by the callable" in err
    assert (room / "taut-profile" / "trace.json.gz").is_file()
    assert "aten::mul" in {row["name"] for row in found["rows"]}


def test_profile_prints_findings_and_what_is_missing(run, room: Path) -> None:
    code, out, err = run("profile", "subjects.py:norm", "--device", "cpu", "--output", "elsewhere")
    assert code == 0, err
    assert "Findings" in out
    assert "no kernel of a GPU in the trace" in out
    assert (room / "elsewhere" / "profile.md").read_text() in out


def test_memory_before_and_after(run) -> None:
    code, out, err = run(
        "memory", "subjects.py:norm", "--against", "subjects.py:plain", "--device", "cpu", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    one = 16 * 64 * 4
    assert found["against"]["peak"] == one
    assert 2 * one <= found["peak"] < 3 * one
    assert "no GPU: no allocator snapshot" in err


def test_explain_writes_graphs_and_code(run, room: Path) -> None:
    code, out, err = run("explain", "subjects.py:plain", "--device", "cpu", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["graphs"], found["breaks"]) == (1, [])
    assert [one["language"] for one in found["generated"]] == ["c++"]
    assert "code" not in found["generated"][0]
    assert "cpp_fused" in (room / "taut-explain" / "generated_0.py").read_text()


@pytest.mark.parametrize(
    ("subject", "sizes"),
    [("rms_norm", ("--shape", "M=4", "--shape", "N=64")), ("model", ("--tokens", "8"))],
)
def test_the_other_instruments_take_ops_and_models_too(
    run, subject: str, sizes: tuple[str, ...]
) -> None:
    common = (subject, *sizes, "--device", "cpu", "--json")
    code, out, err = run("profile", *common, "--active", "1")
    assert code == 0, err
    assert json.loads(out)["rows"]
    code, out, err = run("memory", *common)
    assert code == 0, err
    assert json.loads(out)["peak"] >= 4 * 64 * 2
    code, out, err = run("explain", *common)
    assert code == 0, err
    assert json.loads(out)["graphs"] == 1


def test_explain_compiles_the_triton_kernels_of_an_op_without_a_gpu(run) -> None:
    sizes = ("--shape", "M=2", "--shape", "N=8")
    code, out, err = run(
        "explain",
        "silu_mul",
        *sizes,
        "--device",
        "cpu",
        "--target",
        "sm_90",
        "--forms",
        "1",
        "--json",
    )
    assert code == 0, err
    found = json.loads(out)["triton"]
    assert found["forms"] > 10
    (kernel,) = found["compiled"]
    assert (kernel["target"], kernel["failure"], kernel["spill_bytes"]) == ("sm_90", None, 0)
    assert kernel["registers"] > 0


def test_auto_says_that_it_looks_at_the_cpu(run) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device: auto does not look at the CPU")
    code, _, err = run("memory", "subjects.py:plain")
    assert code == 0
    assert "no CUDA device here: looking at the CPU" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize(
    "arguments",
    [
        ("roofline", "rms_norm", "--device", "cuda"),
        ("profile", "subjects.py:plain", "--device", "cuda"),
        ("explain", "model", "--device", "cuda"),
        ("memory", "subjects.py:plain", "--snapshot"),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_fails(run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert "CUDA device" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "nothing"), "nothing: no op (attention, "),
        (("profile", "subjects.py:absent"), "subjects.py has no 'absent'"),
        (("profile", "subjects.py:failing"), "raises RuntimeError at"),
        (("profile", "subjects.py:tiring"), "a later step raises RuntimeError at"),
        (("profile", "subjects.py"), "subjects.py: say which function: subjects.py:NAME"),
        (("profile", "nowhere/model"), "taut: 'nowhere/model': not in the model store"),
        (("profile", "bench"), "taut: bench: no config.json"),
        (("profile", "rms_norm", "--shape", "M=1,2"), "one value each"),
        (("roofline", "rms_norm", "--shape", "M"), "--shape M: expected NAME=VALUE"),
        (("roofline", "rms_norm", "--shape", "M=x"), "--shape M=x: expected NAME=VALUE"),
        (("roofline", "rms_norm", "--shape", "M=" + ",".join("1" * 65)), "at most 64"),
        (("roofline", "rms_norm", "--dtype", "int4"), "--dtype int4: use float32"),
        (("roofline", "rms_norm", "--backward"), "--backward: rms_norm is forward only"),
        (("roofline", "subjects.py:plain", "--tokens", "3"), "--tokens: subjects.py:plain is a"),
        (("memory", "model", "--shape", "M=1"), "--shape: model is a model"),
        (("memory", "model", "--tokens", "1000"), "has a context of 128"),
        (("memory", "subjects.py:plain", "--device", "tpu"), "--device tpu: use auto"),
        (("explain", "rms_norm", "--target", "sm_10"), "--target sm_10: use sm_80, sm_90"),
        (("explain", "model", "--target", "sm_90"), "--target: model has no Triton kernel"),
    ],
)
def test_mistakes_are_one_line(run, arguments: tuple[str, ...], message: str) -> None:
    sizes = ("--shape", "N=8") if arguments[:2] == ("explain", "rms_norm") else ()
    code, out, err = run(*arguments, *sizes)
    assert code == 2
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("taut: ")
    assert message in last
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "measures"),
    [
        ("roofline", (ceilings, "measured")),
        ("memory", (memory, "measure")),
        ("profile", (profile, "record")),
        ("explain", (explain, "explain")),
    ],
)
def test_a_folder_that_cannot_be_made_is_found_before_measuring(
    run, monkeypatch, command: str, measures: tuple[ModuleType, str]
) -> None:
    def measure(*_: object, **__: object) -> None:
        pytest.fail("measured")

    monkeypatch.setattr(*measures, measure)
    arguments = ("rms_norm", "--shape", "N=8", "--device", "cpu")
    code, out, err = run(command, *arguments, "--output", "subjects.py/x")
    assert (code, out) == (2, "")
    assert err.strip().splitlines()[-1] == "taut: --output subjects.py/x: Not a directory"


def test_report_of_an_earlier_run(run, room: Path) -> None:
    code, out, err = run(
        "bench", "kernels", "--from", "bench", "--report", "new/report.html", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["sections"] == [{"csv": "w4a16", "no_plot": None, "plots": 1}]
    assert "2.00 (Marlin)" in (room / "new" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "bench"), "--from: give the file to write with --report"),
        (("--from", "home", "--report", "r.html"), "home: no CSV of a benchmark in it"),
        (("--report", "r.html"), "--report: give the folder of the CSVs with --output"),
    ],
)
def test_report_mistakes_are_one_line(run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run("bench", "kernels", *arguments)
    assert code == 2
    assert message in err


def test_help_without_a_group_names_the_groups_and_options_of_all(run) -> None:
    code, out, _ = run("bench", "kernels", "--help")
    assert code == 0
    for word in ("--report", "--from", "fused-backward", "primitives"):
        assert word in out
    with pytest.raises(SystemExit) as ended:  # argparse's own way to end
        run("bench", "kernels", "loss", "--help")
    assert ended.value.code == 0


MANUAL = Path(__file__).parents[2] / "docs" / "instruments.md"
COMMAND = re.compile(r"`?(taut [^`\n#]+)")


@pytest.mark.parametrize("line", sorted(set(COMMAND.findall(MANUAL.read_text(encoding="utf-8")))))
def test_manual_names_commands_and_flags_that_exist(line: str) -> None:
    command = typer.main.get_command(cli.app)
    words = line.split()[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    if "kernels" in line:
        known |= {"--output"}  # taken by the benchmark behind it
    assert {word for word in words if word.startswith("--")} <= known


def test_console_script_ends_cleanly(room: Path) -> None:
    """The whole process: nothing but JSON on stdout, the exit code of the command."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("taut")), "memory", "subjects.py:norm", "--json"],
        capture_output=True,
        text=True,
        cwd=room,
        env={**os.environ, "TAUT_HOME": str(room / "home"), "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak"] > 0
    assert "USDT" not in done.stderr
