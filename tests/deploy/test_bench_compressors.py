"""``taut bench compressors``: rivals run apart, all are judged alike, failures name their log."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from tiny_models import write_llama
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner
from validate_setup import write_text

from taut_deploy.bench import compressors, rival_compressors
from taut_deploy.cli import app
from taut_deploy.errors import MeasureError

LENGTH = 32
# In place of the program for rivals: rounds to nearest, to check what a rival is given and where
# its answer goes. One method fails as a rival does. No import of torch: this starts four times.
STAND_IN = """
import json, os, shutil, sys
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
if job["method"] == "auto-round":
    raise SystemExit("out of memory")
import numpy as np
from safetensors.numpy import load_file, save_file
dense = Path(job["output"]) / "dense"
shutil.copytree(job["model"], dense)
state = load_file(dense / "model.safetensors")
for name in [name for name in state if name.endswith("_proj.weight")]:
    weight = state[name]
    size = weight.shape[1] if job["group_size"] == "channel" else job["group_size"]
    groups = weight.reshape(len(weight), -1, size)
    scale = np.abs(groups).max(-1, keepdims=True) / 7
    state[name] = (np.rint(groups / scale) * scale).reshape(weight.shape)
save_file(state, dense / "model.safetensors", {"format": "pt"})
seen = {**job, "shape": np.shape(json.loads(Path(job["tokens"]).read_text()))}
seen["path"] = os.environ.get("PYTHONPATH")
Path(os.environ["SEEN"]).write_text(json.dumps(seen))
told = {"seconds": 2.5, "version": "stand-in 1.0"}
(Path(job["output"]) / "measured.json").write_text(json.dumps(told))
"""


def run(room, *more: str):
    given = [
        *("bench", "compressors", str(room / "model"), "--text", str(room / "judged.txt")),
        *("--calibration", str(room / "other.txt"), "--calibration-sequences", "8"),
        *("--sequences", "4", "--sequence-length", str(LENGTH), "--output", str(room / "out")),
    ]
    return CliRunner().invoke(app, [*given, "--json", *more], catch_exceptions=False)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A model, two texts, and the stand-in instead of the program for rivals."""
    write_llama(tmp_path / "model")
    write_text(tmp_path / "judged.txt", 400, seed=3)
    write_text(tmp_path / "other.txt", 800, seed=5)
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(compressors, "_PROGRAM", tmp_path / "stand_in.py")
    monkeypatch.setattr(compressors, "_OURS", {"taut gptq": {"algorithm": "gptq"}})
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    return tmp_path


def test_a_rival_gets_the_same_tokens_and_is_judged_by_the_same_code(room):
    given = ("--rival", f"gptqmodel={sys.executable}", "--formats", "g32-asym,g64-sym")
    rows = json.loads(run(room, *given).stdout)
    assert [(row["format"], row["method"]) for row in rows] == [
        ("g32-asym", "taut gptq"),
        ("g32-asym", "gptqmodel"),
        ("g64-sym", "taut gptq"),
        ("g64-sym", "gptqmodel"),
    ]
    seen = json.loads((room / "seen.json").read_text())
    assert seen["shape"] == [8, LENGTH]
    assert seen["path"] is None
    assert (seen["group_size"], seen["symmetric"], seen["device"]) == (64, True, "cpu")
    for row in rows:
        judged = row["judged"]
        for name in ("perplexity_ratio", "mean_kl"):
            assert judged[f"{name}_low"] < judged[name] < judged[f"{name}_high"]
    rival = rows[3]
    assert (rival["seconds"], rival["version"]) == (2.5, "stand-in 1.0")
    # GPTQ of the same grid is closer to the base than rounding to nearest.
    assert 0 < rows[2]["judged"]["mean_kl"] < rival["judged"]["mean_kl"]
    table = (room / "out" / "compressors.md").read_text()
    ours = {name: f"{value:.4f}" for name, value in rows[2]["judged"].items()}
    ratio, kl = (
        f"{mark}{ours[name]}{mark} [{ours[f'{name}_low']}, {ours[f'{name}_high']}]"
        for name, mark in (("perplexity_ratio", ""), ("mean_kl", "**"))
    )
    assert f"| g64-sym | taut gptq | {ratio} | {kl} |" in table
    (room / "stand_in.py").write_text("raise SystemExit('asked again')")
    assert json.loads(run(room, *given).stdout) == rows


def test_only_the_methods_asked_for_run_and_a_rows_group_is_a_channel(room):
    given = ("--rival", f"gptqmodel={sys.executable}", "--formats", "channel-sym")
    rows = json.loads(run(room, *given, "--only", "gptqmodel").stdout)
    assert [(row["format"], row["method"]) for row in rows] == [("channel-sym", "gptqmodel")]
    assert json.loads((room / "seen.json").read_text())["group_size"] == "channel"
    assert [row["method"] for row in json.loads(run(room, *given).stdout)] == [
        "gptqmodel",
        "taut gptq",
    ]


def test_a_rival_that_fails_names_its_log(room):
    given = ("--rival", f"auto-round={sys.executable}", "--formats", "g32-asym")
    with pytest.raises(MeasureError, match=r"auto-round ended with 1 \(out of memory\); its log"):
        run(room, *given)
    assert (room / "out" / "auto-round-g32-asym.log").read_text() == "out of memory\n"
    # What was measured before it is there.
    assert len((room / "out" / "compressors.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--rival", "awq=python"], "--rival 'awq=python': write NAME=PYTHON"),
        (["--rival", "gptqmodel=/nowhere/python"], "/nowhere/python: is no interpreter"),
        (["--only", "awq"], "--only: no method 'awq'; with these rivals there are taut gptq"),
        (["--only", "auto-round"], "--only: no method 'auto-round'; with these rivals"),
        (["--formats", "g16"], "--formats: no format 'g16'; there are g32-asym"),
        (["--formats", "g128-sym"], r"groups of 128 \(g128-sym\) do not divide a width of 64"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_compressed(room, given, reason):
    with pytest.raises(MeasureError, match=reason):
        run(room, *given)
    assert not (room / "out" / "compressors.jsonl").exists()


def test_calibrating_on_what_is_judged_is_refused(room):
    whole = (room / "judged.txt").read_text()
    (room / "other.txt").write_text(whole * 3)
    with pytest.raises(MeasureError, match=r"--calibration: .*other.txt holds tokens"):
        run(room, "--sequence-length", "64")


class Doubled(torch.nn.Module):
    """A layer of a rival: codes and a scale, no weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", (weight * 2).to(torch.int8))
        self.register_buffer("scale", torch.full((1,), 0.5, dtype=weight.dtype))
        self.bias = torch.nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes * self.scale).T + self.bias


def test_the_dense_model_holds_what_the_rivals_modules_multiply_by(room):
    model = AutoModelForCausalLM.from_pretrained(room / "model")
    inner = model.model.layers[1].mlp
    weight = torch.randint(-6, 7, inner.up_proj.weight.shape).float() / 2
    inner.up_proj = Doubled(weight, torch.full((weight.shape[0],), 3.0))
    model.model.norm.weight.data *= 2
    plain = AutoModelForCausalLM.from_pretrained(room / "model")
    dense = rival_compressors.dense({"model": str(room / "model")}, model)
    assert torch.equal(dense.model.layers[1].mlp.up_proj.weight, weight)
    assert torch.equal(dense.model.norm.weight, 2 * plain.model.norm.weight)
    other = dense.model.layers[0].mlp.up_proj.weight
    assert torch.allclose(other, plain.model.layers[0].mlp.up_proj.weight)


def test_the_program_for_rivals_needs_nothing_of_taut():
    source = Path(rival_compressors.__file__).read_text()
    assert "taut_" not in source
    spec = importlib.util.spec_from_file_location("alone", rival_compressors.__file__)
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    listed = {method for methods in compressors.RIVALS.values() for method in methods}
    assert set(alone.METHODS) == listed


def test_what_gptqmodel_imports_and_does_not_name_is_stood_in_for(monkeypatch):
    """It imports torchvision for one model of images; the stand-in holds what that file asks."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    rival_compressors._stand_in_for_torchvision()
    import torchvision.transforms as transforms
    from torchvision.transforms.functional import InterpolationMode

    assert transforms.functional.InterpolationMode is InterpolationMode
    assert InterpolationMode.BICUBIC


def test_an_option_of_another_bench_is_refused(room):
    """``--fit-steps`` fits students of ``taut bench distil``; here it would do nothing."""
    given = ["bench", "compressors", str(room / "model"), "--text", str(room / "judged.txt")]
    answer = CliRunner().invoke(app, [*given, "--fit-steps", "5"])
    assert answer.exit_code == 2
    assert "--fit-steps" in answer.output
