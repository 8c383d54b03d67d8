"""What ``taut shrink`` refuses: one line each, before anything is compressed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
from shrink_room import SAMPLING, make_try, write_policy
from tiny_models import edit_json, recipe_data, write_llama, write_recipe

from taut_deploy import files
from taut_deploy.compress import pipeline
from taut_deploy.frontier import walk

BASE = ("shrink", "model", "--no-served", "--served-by", "h100")
TEXT = ("--text", "text.txt")
POLICY = ("--policy", "loose.yaml")
W4 = ("--recipe", "w4.yaml")

MISTAKES = {
    "unknown policy": (
        (*BASE, *TEXT, *W4, "--policy", "balancd"),
        "'balancd': no such policy; give a YAML file or one of aggressive, aggressive-small-model, "
        "balanced, balanced-small-model, lossless, lossless-small-model; did you mean 'balanced'?",
    ),
    "unknown recipe": (
        (*BASE, *TEXT, *POLICY, "--recipe", "w4a61"),
        "did you mean 'w4a16'?",
    ),
    "no policy": ((*BASE, *TEXT), "Missing option '--policy'"),
    "no text": ((*BASE, *POLICY), "give --text FILE: UTF-8 text that no recipe was calibrated"),
    "key that is none": (
        (*BASE, *TEXT, *POLICY, *W4, "--sign", "text.txt"),
        "--sign text.txt: not a private key in PEM",
    ),
    "text that is not there": (
        (*BASE, *POLICY, *W4, "--text", "nowhere.txt", "--output", "text"),
        "--text nowhere.txt",
    ),
    "short text": (
        (*BASE, *POLICY, *W4, *TEXT, *SAMPLING, "--sequences", "100", "--output", "short"),
        "--text text.txt: 600 tokens, but 100 sequences of 24 need",
    ),
    "long sequences": (
        (*BASE, *POLICY, *W4, *TEXT, "--sequence-length", "129", "--output", "long"),
        "--sequence-length: 129 is more than the 128 positions of model",
    ),
    "one sequence": ((*BASE, *POLICY, *W4, *TEXT, "--sequences", "1"), "--sequences: 1 is below 2"),
    "device": ((*BASE, *POLICY, *W4, *TEXT, "--device", "tpu"), "--device tpu: use cpu or cuda"),
    "machine": (
        ("shrink", "model", *POLICY, *W4, *TEXT, "--served-by", "a100"),
        "--served-by: 'a100' is none of here, cpu, h100, h200",
    ),
    "two limits": (
        (*BASE, *POLICY, *W4, *TEXT, "--memory", "3GiB", "--target-bytes", "1MB"),
        "--memory and --target-bytes: give one of them",
    ),
    "no size": (
        (*BASE, *POLICY, *W4, *TEXT, "--memory", "lots"),
        "--memory: 'lots' is no size; write it as 5GiB, 800MB or a number",
    ),
    "memory that is all reserve": (
        (*BASE, *POLICY, *W4, *TEXT, "--memory", "2GiB"),
        "--memory 2GiB: 2 GiB are kept for the process",
    ),
    "target below everything": (
        (*BASE, *POLICY, *W4, *TEXT, *SAMPLING, "--target-bytes", "1KB", "--output", "below"),
        "--target-bytes 1KB: the smallest is predicted to take 0.1 MB (recipe w4)",
    ),
    "bits": (
        (*BASE, *POLICY, *W4, *TEXT, "--target-bits", "4,x"),
        "--target-bits: 'x' is no number of bits up to 16",
    ),
    "bits out of range": (
        (*BASE, *POLICY, *W4, *TEXT, "--target-bits", "nan"),
        "--target-bits: 'nan' is no number of bits",
    ),
    "minutes": (
        (*BASE, *POLICY, *W4, *TEXT, "--budget-minutes", "nan"),
        "--budget-minutes: nan is no number of minutes",
    ),
    "unknown model": (
        ("shrink", "nope", *POLICY, *W4, *TEXT, "--no-served"),
        "'nope': no such model",
    ),
    "output that is a file": (
        (*BASE, *POLICY, *W4, *TEXT, *SAMPLING, "--output", "text.txt"),
        "text.txt",
    ),
}


@pytest.fixture
def never_compressed(monkeypatch):
    def never(*_):
        raise AssertionError("nothing may be compressed")

    monkeypatch.setattr(pipeline, "compress", never)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_compressed(run, never_compressed, mistake):
    arguments, expected = MISTAKES[mistake]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert err.startswith("taut: ")
    assert expected in err


def test_a_model_that_is_quantised_already(room, run, never_compressed):
    shutil.copytree(room.path / "model", room.path / "quantised", dirs_exist_ok=True)
    entry = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    edit_json(room.path / "quantised" / "config.json", quantization_config=entry)
    asked = ("shrink", "quantised", *POLICY, *W4, *TEXT, *SAMPLING, "--no-served")
    code, _, err = run(*asked, "--output", "already")
    assert code == 2
    assert "its config.json says it is quantised already" in err
    assert len(err.splitlines()) == 1


def test_the_ledger_of_another_model(room, run, never_compressed):
    write_llama(room.path / "other", hidden=128)
    (room.path / "shared").mkdir(exist_ok=True)
    (room.path / "shared" / "ledger.jsonl").write_text(f"{make_try().model_dump_json()}\n")
    asked = ("shrink", "other", *POLICY, *W4, *TEXT, *SAMPLING, "--no-served")
    code, _, err = run(*asked, "--output", "shared")
    assert code == 2
    assert "ledger.jsonl:1: is of another model (sha256:aaaaaaaaaaaa) than other" in err
    assert err.rstrip().endswith("choose another --output")


def test_a_disk_that_is_too_small(room, run, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage(1000, 0, 1000))
    code, _, err = run(*room.command("loose", "disk"))
    assert code == 2
    assert "but the disk has 0 MB free" in err.splitlines()[-1]
    assert not (room.path / "disk" / "ledger.jsonl").exists()


def test_a_policy_that_bounds_a_task_without_a_source(room, run, never_compressed):
    write_policy(room.path / "tasks.yaml", "tasks", mean_kl={"max": 1.0})
    with (room.path / "tasks.yaml").open("a") as policy:
        policy.write("tasks: {mmlu: {recovery: {min: 0.9}}}\n")
    code, _, err = run(*room.command("tasks", "tasks"))
    assert code == 2
    assert "tasks.mmlu: nothing supplies it, so no checkpoint passes; give its file" in err


def test_a_policy_that_requires_latency(room, run, never_compressed):
    latency = {"itl_p50_ratio_at_most": 1.05}
    write_policy(room.path / "latency.yaml", "latency", latency=latency, mean_kl={"max": 1.0})
    code, _, err = run(*room.command("latency", "latency"))
    assert code == 2
    assert "--policy latency.yaml: requires latency" in err
    assert "set latency.required to false" in err


def test_a_text_that_candidates_are_calibrated_on(room, run, never_compressed):
    data = recipe_data(room.path / "text.txt", algorithm="rtn")
    data["calibration"] |= {"sequences": 2, "sequence_length": 80}
    write_recipe(room.path / "leaky.yaml", {**data, "name": "leaky"})
    more = ("--sequences", "4", "--sequence-length", "120")
    code, _, err = run(*room.command("loose", "leaky", *more, recipes=("leaky",)))
    assert code == 2
    assert "--text text.txt: recipe leaky is calibrated on a passage of it" in err.splitlines()[-1]


def test_two_searches_at_once_in_one_place(room, run, never_compressed):
    with walk.sole_writer(room.path / "busy", "taut shrink"):
        code, _, err = run(*room.command("loose", "busy"))
    assert code == 2
    assert "busy: another 'taut shrink' is writing it" in err


def test_another_machines_workers_are_not_started_here_and_that_is_said(room, run):
    asked = [part for part in room.command("loose", "far") if part != "--no-served"]
    code, _, err = run(*asked)
    assert code == 0
    assert "--served-by h100: no worker is compared here" in err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--policy", "balancd"), "'balancd': no such policy"),
        (("--text", "nowhere"), "--text nowhere"),
        (("--memory", "24Gib"), "--memory: '24Gib' is no size"),
        (("--target-bits", "4,x"), "--target-bits: 'x' is no number"),
    ],
)
def test_what_was_mistyped_is_told_of_before_a_tensor_library_is_loaded(tmp_path, changed, said):
    (tmp_path / "text.txt").write_text("a b c")
    code = (
        "import sys; from taut_deploy.cli import main; status = main(sys.argv[1:]); "
        "print(status, {'torch', 'transformers'} & set(sys.modules))"
    )
    given = {"--policy": "balanced", "--text": "text.txt"} | dict([changed])
    command = ["shrink", "model", *(word for pair in given.items() for word in pair)]
    run = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert said in run.stderr
    assert run.stdout == "2 set()\n"
