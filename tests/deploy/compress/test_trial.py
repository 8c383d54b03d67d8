"""``--plan`` compresses one block: what it refuses; memory and kernels foretold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    job_for,
    recipe_data,
    w8a8_data,
    write_calibration_text,
    write_llama,
    write_recipe,
)
from validate_setup import write_text

from taut_deploy.compress import driver
from taut_deploy.errors import ModelError, RecipeError

# Prints the most memory the process held, by the kernel's own account.
RUN = """
import json, sys
from taut_deploy.cli import main
sys.argv = ["taut", *sys.argv[1:]]
code = main()
held = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps({"code": code, "peak": int(held[0].split()[1]) * 1024}), file=sys.stderr)
"""


@pytest.fixture
def taut(run_with_compressor):
    """What a command printed, and the most memory its process held, a fork of the compressor's."""

    def taut(home: Path, *words: object) -> tuple[str, int]:
        done = run_with_compressor(RUN, *words, env={"TAUT_HOME": str(home)})
        told = json.loads(done.stderr.splitlines()[-1])
        assert told["code"] in (0, None), done.stderr[-2000:]
        return done.stdout, told["peak"]

    return taut


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", layers=3)
    write_calibration_text(path / "text.txt")
    return path


def data_of(recipe: str, text: Path) -> dict:
    data = {"w4a16": recipe_data, "w8a8": w8a8_data}[recipe](text)
    data["calibration"] |= {"sequences": 64, "sequence_length": 128}
    return data


@pytest.mark.parametrize("recipe", ["w4a16", "w8a8"])
def test_the_foretold_memory_is_what_the_run_takes(recipe, taut, tmp_path):
    # Large enough for statistics and hidden states to count beside the interpreter's 500 MB.
    model = write_llama(tmp_path / "m", hidden=512, intermediate=2048, layers=2)
    text = write_text(tmp_path / "t.txt", 9000, seed=5)
    file = write_recipe(tmp_path / "r.yaml", data_of(recipe, text))
    asked = ("compress", model, "--recipe", file, "--output", tmp_path / "out", "--json")
    # A process of its own: what the interpreter holds already is a part of what is foretold.
    plan, _ = taut(tmp_path, *asked, "--plan")
    _, held = taut(tmp_path, *asked)
    foretold = json.loads(plan)["peak_memory_bytes"]
    print(f"{recipe}: {foretold / 1e6:.0f} MB foretold, {held / 1e6:.0f} MB held")
    assert foretold == pytest.approx(held, rel=0.15)


def test_a_plan_leaves_nothing_behind(room, tmp_path):
    job = job_for(room / "model", recipe_data(room / "text.txt"), tmp_path / "out")
    plan = driver.plan(job)
    assert plan.seconds is not None
    assert plan.seconds > 0
    assert not list(tmp_path.iterdir())


def test_a_short_calibration_text_is_refused_by_the_plan(room, tmp_path):
    data = recipe_data(write_text(tmp_path / "short.txt", 20, seed=1))
    with pytest.raises(RecipeError, match=r"short\.txt gives 0 sequences of 32 tokens"):
        driver.plan(job_for(room / "model", data, tmp_path / "out"))


def test_an_empty_calibration_text_is_refused_by_the_plan(room, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(RecipeError, match=r"empty\.txt is empty, or holds nothing"):
        driver.plan(job_for(room / "model", recipe_data(tmp_path / "empty.txt"), tmp_path / "out"))


def test_what_overflows_in_a_block_is_refused_by_the_plan(room, tmp_path):
    """Every stored number is finite; their products are not."""
    model = write_llama(tmp_path / "m")
    shard = model / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e30
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 1e30
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    save_file(tensors, shard, metadata={"format": "pt"})
    data = recipe_data(room / "text.txt", algorithm="rtn")
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.down_proj: its input"):
        driver.plan(job_for(model, data, tmp_path / "out"))


def test_the_plan_names_the_kernel_of_each_layer(tmp_path):
    model = write_llama(tmp_path / "m")
    text = write_calibration_text(tmp_path / "t.txt")
    data = recipe_data(text) | {"ignore": ["*.down_proj"]}
    job = job_for(model, data, tmp_path / "out")
    kernels = {layer.name: layer.kernel for layer in driver.plan(job, "cpu").layers}
    assert kernels["model.layers.0.self_attn.q_proj"].startswith("taut::weight_only_linear_cpu")
    assert kernels["model.layers.0.mlp.down_proj"].startswith("vLLM's own (not quantised")
    on_card = {layer.name: layer.kernel for layer in driver.plan(job, "h100").layers}
    # 128 rows of q, k and v together, which no table of that card has.
    assert "128×64" in on_card["model.layers.0.self_attn.k_proj"]
    assert "not measured" in on_card["model.layers.0.self_attn.k_proj"]


def test_the_printed_plan_says_each_kind_of_layer_once(room, call_taut, tmp_path):
    data = recipe_data(room / "text.txt") | {"ignore": ["model.layers.1.mlp.down_proj"]}
    recipe = write_recipe(tmp_path / "r.yaml", data)
    asked = ("compress", room / "model", "--recipe", recipe, "--plan", "--served-by", "cpu")
    code, text, err = call_taut(*map(str, asked))
    assert code == 0, err
    lines = [line.strip() for line in text.splitlines() if "down_proj" in line]
    assert len(lines) == 2
    assert lines[0].startswith("mlp.down_proj [64, 128]: quantize: W4A16 g32, 0.0 MB -> 0.0 MB; ")
    assert lines[0].endswith("; blocks 0, 2")
    assert lines[1].startswith("mlp.down_proj [64, 128]: ignored by the recipe: dense")
    assert lines[1].endswith("; blocks 1")
    assert sum("q_proj" in line for line in text.splitlines()) == 1
    assert "s for the blocks" in text.splitlines()[-1]
