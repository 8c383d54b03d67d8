"""taut through optimum: its command line, its quantizer, its configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from optimum.configuration_utils import BaseConfig
from optimum.exporters.tasks import TasksManager
from optimum.quantization_base import OptimumQuantizer
from tiny_models import (
    edit_json,
    job_for,
    make_recipe,
    recipe_data,
    write_calibration_text,
    write_llama,
    write_recipe,
)
from transformers import AutoModelForCausalLM, StableLmConfig, StableLmForCausalLM
from validate_setup import VOCABULARY, write_text, write_tokenizer

from optimum.commands import optimum_cli
from taut_deploy.checkpoint import verify
from taut_deploy.compress import driver
from taut_deploy.errors import CheckpointError, OutputError, RecipeError
from taut_deploy.models.store import describe_directory
from taut_deploy.optimum import TautConfig, TautQuantizer

OPTIMUM_CLI = str(Path(sys.executable).with_name("optimum-cli"))


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model``, ``recipe.yaml``, and ``direct``, made by taut itself."""
    path = tmp_path_factory.mktemp("optimum")
    write_llama(path / "model")
    data = recipe_data(write_calibration_text(path / "text.txt"))
    write_recipe(path / "recipe.yaml", data)
    driver.compress(job_for(path / "model", data, path / "direct"))
    return path


@pytest.fixture
def home(room, monkeypatch):
    monkeypatch.setenv("TAUT_HOME", str(room / "home"))


@pytest.fixture
def run(home, monkeypatch, capfd):
    """optimum's command in this process: its exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", *arguments])
        with pytest.raises(SystemExit) as ended:
            optimum_cli.main()
        captured = capfd.readouterr()
        return ended.value.code, captured.out, captured.err

    return call


def test_the_real_command_compresses_as_taut_does(room):
    environment = {**os.environ, "TAUT_HOME": str(room / "home"), "OMP_NUM_THREADS": "1"}
    # Options in front of the argument and behind it reach taut unchanged.
    argv = [
        *(OPTIMUM_CLI, "taut", "compress", "--recipe", str(room / "recipe.yaml")),
        *(str(room / "model"), "--output", str(room / "by-cli"), "--json"),
    ]
    answer = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["scheme"] == "W4A16"
    assert verify(room / "by-cli").digest == verify(room / "direct").digest


def test_optimum_cli_validates_and_exits_with_the_verdict(room, run):
    write_text(room / "judged.txt", 400, seed=9)
    policy = room / "policy.yaml"
    policy.write_text("name: strict\nrequire: {mean_kl: {max: 0.000001}}\n")
    code, out, err = run(
        *("taut", "validate", "--baseline", str(room / "model")),
        *("--candidate", str(room / "direct"), "--policy", str(policy), "--no-served"),
        *("--text", str(room / "judged.txt"), "--output", str(room / "report")),
        *("--sequences", "8", "--sequence-length", "32", "--noise-sequences", "0", "--json"),
    )
    assert code == 1, out + err
    assert json.loads(out)["verdict"] == "FAIL"


def test_optimum_cli_shrinks_and_exits_with_the_outcome(room, run, monkeypatch):
    monkeypatch.chdir(room)
    write_text(room / "seen.txt", 600, seed=9)
    for name, bits in (("w2", "W2A16"), ("w8", "W8A16")):
        data = recipe_data(room / "text.txt", scheme=bits, algorithm="rtn")
        write_recipe(room / f"{name}.yaml", {**data, "name": name})
    command = (
        *("taut", "shrink", "model", "--recipe", "w2.yaml", "--recipe", "w8.yaml"),
        *("--text", "seen.txt", "--sequences", "6", "--sequence-length", "24"),
        *("--bootstrap", "300", "--noise-sequences", "2", "--no-served", "--served-by", "h100"),
    )
    for limit, code, name in ((1000.0, 0, "w2"), (1e-9, 1, None)):
        policy = room / f"{limit}.yaml"
        policy.write_text(f"name: p\nrequire: {{mean_kl: {{max: {limit:.10f}}}}}\n")
        output = room / f"shrunk-{limit}"
        found, out, err = run(*command, "--policy", str(policy), "--output", str(output))
        assert found == code, out + err
        left = [path for path in (output / "tries").iterdir() if path.name[0] != "."]
        assert [verify(path).recipe["name"] for path in left] == ([name] if name else [])


def test_a_mistake_is_one_line_of_taut(room, run):
    code, _, err = run("taut", "compress", str(room / "model"), "--recipe", "w4a17")
    assert code == 2
    line = err.strip().splitlines()[-1]
    assert line.startswith("taut: ")
    assert "w4a17" in line
    assert "Traceback" not in err


def test_help_is_that_of_taut(run):
    code, out, _ = run("taut", "compress", "--help")
    assert code == 0
    assert "--recipe" in out


def test_the_quantizer_is_optimums_and_gives_the_same_checkpoint(room, home):
    quantizer = TautQuantizer.from_pretrained(room / "model")
    assert isinstance(quantizer, OptimumQuantizer)
    config = TautConfig.from_recipe(str(room / "recipe.yaml"))
    manifest = quantizer.quantize(room / "by-quantizer", config=config)
    assert manifest.digest == verify(room / "direct").digest


def test_a_model_type_that_optimum_does_not_list_is_quantized_too(room, home, tmp_path):
    torch.manual_seed(0)
    config = StableLmConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    StableLmForCausalLM(config).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    recipe = TautConfig.from_recipe(str(room / "recipe.yaml"))
    made = TautQuantizer.from_pretrained(tmp_path / "model").quantize(
        tmp_path / "out", config=recipe
    )
    assert made.scheme == "W4A16"


def test_settings_of_other_quantizers_are_refused(room, home):
    with pytest.raises(OutputError, match="file_name: taut has no such setting"):
        TautQuantizer.from_pretrained(room / "model", "model.onnx")
    quantizer = TautQuantizer(describe_directory(room / "model"))
    config = TautConfig.from_recipe(str(room / "recipe.yaml"))
    for name in ("file_prefix", "use_external_data_format"):
        with pytest.raises(OutputError, match=f"{name}: taut has no such setting"):
            quantizer.quantize(room / "never", config=config, **{name: "x"})
    assert not (room / "never").exists()


def test_a_checkpoint_loads_verified_and_as_transformers_loads_it(room, tmp_path, monkeypatch):
    ids = torch.arange(2, 30)[None]
    asked = []
    named = TasksManager.get_model_class_for_task

    def spied(task, **options):
        asked.append((task, options))
        return named(task, **options)

    monkeypatch.setattr(TasksManager, "get_model_class_for_task", spied)
    ours = TautQuantizer.load(room / "direct").eval()(ids).logits
    assert asked == [("text-generation", {"framework": "pt"})], "optimum's table names the class"
    theirs = AutoModelForCausalLM.from_pretrained(room / "direct").eval()(ids).logits
    assert torch.equal(ours, theirs)
    for file in (room / "direct").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "config.json", bos_token_id=3)
    with pytest.raises(CheckpointError, match=r"config\.json: its sha256 differs"):
        TautQuantizer.load(tmp_path)


def test_a_recipe_goes_through_a_configuration_file_unchanged(room, tmp_path):
    config = TautConfig.from_recipe(str(room / "recipe.yaml"))
    assert isinstance(config, BaseConfig)
    config.save_pretrained(tmp_path)
    assert (tmp_path / "taut_recipe.json").is_file()
    assert not (tmp_path / "config.json").exists()
    read = TautConfig.from_pretrained(tmp_path)
    assert read.to_recipe() == config.to_recipe()
    assert read.to_recipe().hash == make_recipe(recipe_data(room / "text.txt")).hash


def test_a_wrong_recipe_in_a_configuration_is_named(room, tmp_path):
    TautConfig.from_recipe("w8a8").save_pretrained(tmp_path)
    document = json.loads((tmp_path / "taut_recipe.json").read_text())
    document["recipe"]["stages"][-1]["scheme"] = "W8A9"
    (tmp_path / "taut_recipe.json").write_text(json.dumps(document))
    with pytest.raises(RecipeError, match=r"taut_recipe\.json: stages\.1\.quantize\.scheme"):
        TautConfig.from_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"taut_recipe\.json"):
        TautConfig().to_recipe()
