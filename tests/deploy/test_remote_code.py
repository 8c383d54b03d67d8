"""Python code that comes with a model: never run without leave, and named before it runs."""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_models import edit_json, recipe_data, write_calibration_text, write_llama, write_recipe

import taut_deploy
from taut_deploy.cli import main
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import read_shape
from taut_deploy.models.pretrained import load_tokenizer
from taut_deploy.models.remote_code import describe_code

CONFIGURATION = """
from transformers import LlamaConfig
import pathlib
pathlib.Path({mark!r}).touch()
class TinyConfig(LlamaConfig):
    model_type = "tiny_own"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_tiny import TinyConfig
class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    """``model/`` of a kind only its own code knows; the code leaves ``ran`` behind."""
    model = write_llama(tmp_path / "model", layers=1)
    edit_json(
        model / "config.json",
        model_type="tiny_own",
        architectures=["TinyForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_tiny.TinyConfig",
            "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
        },
    )
    mark = str(tmp_path / "ran")
    (model / "configuration_tiny.py").write_text(CONFIGURATION.format(mark=mark))
    (model / "modeling_tiny.py").write_text(MODELING)
    data = recipe_data(write_calibration_text(tmp_path / "text.txt"))
    write_recipe(tmp_path / "recipe.yaml", data)
    (tmp_path / "policy.yaml").write_text(
        yaml.safe_dump({"name": "p", "require": {"perplexity_ratio": {"max": 2.0}}})
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = {
    "inspect": ["model", "inspect", "./model"],
    "plan": ["compress", "./model", "--recipe", "recipe.yaml", "--plan"],
    "compress": ["compress", "./model", "--recipe", "recipe.yaml", "--output", "out"],
    "validate": [
        *("validate", "--baseline", "model", "--candidate", "model", "--policy", "policy.yaml"),
        *("--text", "text.txt", "--output", "report", "--sequences", "2"),
        *("--sequence-length", "16", "--noise-sequences", "0", "--bootstrap", "200"),
    ],
}


YES = "y\ny\ny\ny\n"
"""A user who says yes to everything."""


def taut(room: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which puts a model's code into a place of its own."""
    import os

    environment = {
        **os.environ,
        "TAUT_HOME": str(room / "home"),
        "HF_MODULES_CACHE": str(room / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "taut_deploy", *arguments],
        input=YES,
        capture_output=True,
        text=True,
        env=environment,
        cwd=room,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_code_does_not_run_after_a_yes_on_standard_input(command, room, fork_taut):
    home = {"TAUT_HOME": str(room / "home")}
    done = fork_taut(room, *COMMANDS[command], env=home, stdin=YES)
    assert not (room / "ran").exists()
    assert done.returncode in {2, 3}
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert "auto_map names Python code of the model's own" in line
    assert "configuration_tiny.py, modeling_tiny.py" in line
    assert line.endswith("add --trust-remote-code")


def test_code_that_was_asked_for_is_named_with_its_hash_and_runs(room):
    done = taut(room, *COMMANDS["inspect"], "--trust-remote-code")
    digest = hashlib.sha256((room / "model" / "modeling_tiny.py").read_bytes()).hexdigest()
    assert f"taut: --trust-remote-code: may run modeling_tiny.py sha256:{digest}" in done.stderr
    assert (room / "ran").exists()


def test_code_of_another_repository_is_refused_even_when_asked_for(room):
    edit_json(room / "model" / "config.json", auto_map={"AutoConfig": "other/repo--conf.Config"})
    with pytest.raises(ModelError, match="is code of another repository"):
        describe_code(room / "model")
    edit_json(room / "model" / "config.json", auto_map={"AutoConfig": "gone.Config"})
    with pytest.raises(ModelError, match=r"has no file gone\.py there"):
        describe_code(room / "model")


def test_a_tokenizer_of_its_own_is_refused_too(tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    edit_json(
        model / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
    )
    (model / "tokenization_own.py").write_text("raise SystemExit('ran')")
    assert read_shape(model).num_layers == 1
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: auto_map names Python code"):
        load_tokenizer(model)


def test_every_call_that_may_run_code_says_whether_it_may():
    """transformers asks on standard input where ``trust_remote_code`` is left open."""
    silent = []
    for file in sorted(Path(taut_deploy.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in {"from_pretrained", "from_config"}:
                continue
            if "trust_remote_code" not in {keyword.arg for keyword in node.keywords}:
                silent.append(f"{file.name}:{node.lineno}")
    assert silent == []


@pytest.mark.parametrize("words", [["--trust-remote-code"], ["--", "--trust_remote_code"]])
def test_a_worker_names_the_code_before_vllm_runs_it(words, room, monkeypatch, capsys):
    from taut_deploy.commands import worker

    started = []
    monkeypatch.setattr(worker, "exec_worker", started.append)
    monkeypatch.setattr(sys, "argv", ["taut", "worker", "model", "--max-model-len", "64", *words])
    assert main() == 0
    assert "may run configuration_tiny.py sha256:" in capsys.readouterr().err
    (spec,) = started
    assert spec.extra == ("--trust-remote-code" if words[0] != "--" else words[1],)


def test_nothing_of_ours_renders_a_model_s_template():
    """Chat templates are programs: only transformers' sandbox and vLLM's render them."""
    room = Path(taut_deploy.__file__).parent
    named = {
        "compress/report/render.py": ["report.md.j2", "report.html.j2", "slimmed.md.j2"],
        "pages/rollout.py": ["rollout.html.j2"],
        "validate/page/render.py": ["report.html.j2"],
    }
    for file in sorted(room.rglob("*.py")):
        source = file.read_text()
        name = file.relative_to(room).as_posix()
        if name not in named:
            # Its errors may be caught where transformers renders.
            left = source.replace("from jinja2 import TemplateError\n", "")
            assert "jinja2" not in left, file
            continue
        # These render files of the package, by names that are written there.
        templates = [
            ast.unparse(node.args[0])
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get_template")
        ]
        assert templates == [repr(template) for template in named[name]]
        assert "from_string" not in source
        assert "autoescape" in source
