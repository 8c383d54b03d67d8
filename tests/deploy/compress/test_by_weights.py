"""``--workers``: the same bytes whatever their number, after a kill too, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from killed_at_block import compress_or_die
from stood_for import logits_of
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama, write_recipe
from transformers import AutoModelForCausalLM

from taut_deploy.checkpoint import verify
from taut_deploy.cli import main
from taut_deploy.compress import by_weights, driver
from taut_deploy.errors import OutputError, RecipeError
from taut_deploy.files import VOLATILE_FILES

LAYERS = 6


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` of six blocks, ``text.txt``, and ``whole/``, made by two processes."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", layers=LAYERS, shard_bytes=200_000)
    write_calibration_text(path / "text.txt")
    driver.compress(job(path, path / "whole", 2))
    return path


def job(room, output: Path, workers: int, **quantize):
    stage = {"scheme": "FP8", "group_size": None, "algorithm": "rtn", **quantize}
    return replace(
        job_for(room / "model", recipe_data(room / "text.txt", **stage), output), workers=workers
    )


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in VOLATILE_FILES
    }


def test_the_number_of_processes_changes_no_byte(room, tmp_path):
    one = driver.compress(job(room, tmp_path / "one", 1))
    assert content(tmp_path / "one") == content(room / "whole")
    assert verify(tmp_path / "one") == one
    # Calibrated, the weights are the same: no stage looked at any text.
    calibrated = driver.compress(job(room, tmp_path / "calibrated", 0))
    for name, digest in calibrated.files.items():
        if name.endswith(".safetensors"):
            assert one.files[name] == digest
    assert [entry["samples"] for entry in one.layers] == [0] * 7 * LAYERS
    base = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "one").eval()
    logits_of(ours)  # unpacks the weights
    for entry in one.layers:
        weight, got = (model.get_submodule(entry["name"]).weight for model in (base, ours))
        lost = float((got - weight).square().sum() / weight.square().sum())
        assert entry["relative_error"] == pytest.approx(lost, rel=1e-3)
    # Golden prompts ran through what was stored, inputs rounded as the scheme says.
    assert one.golden.expected_token == calibrated.golden.expected_token
    assert one.golden.margin == pytest.approx(calibrated.golden.margin, rel=1e-3)


def descendants(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [*map(int, found), *(one for child in found for one in descendants(int(child)))]


def test_a_killed_run_goes_on_to_the_same_bytes_and_leaves_no_process(room, tmp_path):
    data = recipe_data(room / "text.txt", scheme="FP8", group_size=None, algorithm="rtn")
    recipe = write_recipe(tmp_path / "r.yaml", data)
    output = tmp_path / "out"
    argv = [
        *(sys.executable, "-m", "taut_deploy", "compress", str(room / "model")),
        *("--recipe", str(recipe), "--output", str(output), "--workers", "2"),
    ]
    run = subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"})
    state = tmp_path / ".out.partial" / ".state"
    while run.poll() is None and not (state / "block-0.json").exists():
        time.sleep(0.002)
    children = descendants(run.pid)
    assert len(children) >= 4  # multiprocessing's two, and those that compress
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert state.is_dir()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "a process went on after its run was killed"
        time.sleep(0.05)
    # With another number of processes, each of which would import torch anew.
    assert main([*argv[3:-1], "1"]) == 0
    shards = {name: one for name, one in content(output).items() if name.endswith(".safetensors")}
    assert shards == {name: content(room / "whole")[name] for name in shards}
    assert len(shards) == LAYERS + 1


def test_a_process_that_is_killed_is_told_and_finished_blocks_stay(room, tmp_path, monkeypatch):
    request = job(room, tmp_path / "out", 1)
    monkeypatch.setattr(by_weights, "_compress", compress_or_die)
    with pytest.raises(OutputError, match=r"--workers 1: a process ended .* run again with fewer"):
        driver.compress(request)
    monkeypatch.undo()
    state = tmp_path / ".out.partial" / ".state"
    assert len(list(state.glob("block-*.json"))) == 2
    driver.compress(request)
    assert content(tmp_path / "out") == content(room / "whole")


@pytest.mark.parametrize(
    ("quantize", "reason"),
    [
        ({"algorithm": "gptq"}, r"--workers: stages.0 \(gptq\) looks at inputs"),
        ({"scheme": "FP8-STATIC"}, "scales of inputs fixed beforehand"),
        ({"scheme": "FP8-TENSOR"}, "scales of inputs fixed beforehand"),
    ],
)
def test_what_looks_at_inputs_is_refused_before_anything_is_written(
    room, tmp_path, quantize, reason
):
    with pytest.raises(RecipeError, match=reason):
        driver.compress(job(room, tmp_path / "out", 2, **quantize))
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--recipe", "w8a8"], r"--workers: stages.0 (smooth) looks at inputs"),
        (["--recipe", "mixed"], r"--workers: stages.0 (mixed) looks at inputs"),
        (["--recipe", "slim"], "--workers: recipe 'slim' does nothing block by block"),
        (["--workers", "-1"], "--workers"),
    ],
)
def test_the_command_refuses_what_cannot_be_shared(room, tmp_path, arguments, reason, capsys):
    argv = ["compress", str(room / "model"), "--output", str(tmp_path / "out")]
    assert main([*argv, "--workers", "2", *arguments]) != 0
    assert reason in capsys.readouterr().err
