"""Names that no file system takes, homes that are none, and letters that move a cursor."""

from __future__ import annotations

import sys

import pytest
from tiny_models import recipe_data, write_calibration_text, write_llama, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from taut_deploy import cli
from taut_deploy.commands.output import printable

LONG = {"300": "x" * 300, "5000": "x" * 5000, "below": "a/" + "b" * 300, "escape": "a/\x1b[31mb"}
COMMANDS = {
    "fetch": ["model", "fetch", "NAME"],
    "inspect": ["model", "inspect", "NAME"],
    "compress": ["compress", "NAME", "--plan"],
    "recipe": ["compress", "model", "--recipe", "NAME", "--plan"],
    "output": ["compress", "model", "--recipe", "recipe.yaml", "--output", "NAME"],
    "baseline": [
        *("validate", "--baseline", "NAME", "--candidate", "model", "--policy", "balanced"),
        *("--text", "text.txt", "--output", "report"),
    ],
    "report": [
        *("validate", "--baseline", "model", "--candidate", "model", "--policy", "balanced"),
        *("--text", "text.txt", "--output", "NAME"),
    ],
    "shrink": ["shrink", "NAME", "--policy", "balanced", "--text", "text.txt"],
    "shrink policy": ["shrink", "model", "--policy", "NAME", "--text", "text.txt"],
    "shrink text": ["shrink", "model", "--policy", "balanced", "--text", "NAME"],
    "shrink output": [
        *("shrink", "model", "--policy", "balanced", "--text", "text.txt"),
        *("--recipe", "recipe.yaml", "--output", "NAME"),
    ],
    "worker": ["worker", "NAME"],
    "key": ["cache", "key", "NAME"],
    "serve": ["serve", "--config", "NAME"],
    "doctor": ["doctor", "NAME"],
}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    path = tmp_path_factory.mktemp("names")
    write_llama(path / "model", layers=1)
    write_recipe(path / "recipe.yaml", recipe_data(write_calibration_text(path / "text.txt")))
    return path


@pytest.fixture
def run(room, monkeypatch, capfd):
    monkeypatch.chdir(room)
    monkeypatch.setenv("TAUT_HOME", str(room / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["taut", *arguments])
        code = cli.main()
        return code, capfd.readouterr().err

    return call


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_cannot_be_is_one_printable_line(command, name, run):
    code, err = run(*(LONG[name] if word == "NAME" else word for word in COMMANDS[command]))
    assert code in {2, 3}
    (line,) = err.splitlines()
    assert line.startswith("taut: ")
    assert line.isprintable()


HOMES = {
    "a file": ("text.txt", "is not a directory"),
    "below a file": ("text.txt/x", "is not a directory"),
    "a device": ("/dev/null", "is not a directory"),
    "too long": ("x" * 300, "file name too long"),
    "an escape": ("a\x1bb", "control characters"),
}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("command", [["list"], ["fetch", "smollm2-135m-instruct"]])
def test_a_home_that_is_none_is_named_before_anything_is_done(command, home, run, monkeypatch):
    value, reason = HOMES[home]
    monkeypatch.setenv("TAUT_HOME", value)
    code, err = run("model", *command)
    assert code == 2
    assert err.startswith("taut: TAUT_HOME=")
    assert reason in err


def test_a_home_where_nothing_can_be_made_is_one_line(run, monkeypatch):
    monkeypatch.setenv("TAUT_HOME", "/proc/nowhere")
    code, err = run("model", "fetch", "smollm2-135m-instruct")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "/proc/nowhere" in err


def test_a_pattern_of_ignore_that_matches_nothing_is_named(run, room):
    data = recipe_data(room / "text.txt") | {"ignore": ["lm_head", "re:.*experts.*"]}
    write_recipe(room / "odd.yaml", data)
    code, err = run("compress", "./model", "--recipe", "odd.yaml", "--plan")
    assert code == 2
    assert "ignore: 're:.*experts.*' matches no linear layer" in err


def test_a_generation_config_that_is_none_is_refused_in_the_plan(run, room, tmp_path):
    model = write_llama(tmp_path / "broken", layers=1)
    (model / "generation_config.json").write_text('{"temperature": }')
    code, err = run("compress", str(model), "--recipe", "recipe.yaml", "--plan")
    assert code == 2
    assert "generation_config.json: not valid JSON" in err


def test_what_the_licence_asks_for_travels_with_the_checkpoint(run, room, tmp_path):
    model = write_llama(tmp_path / "model", layers=1)
    (model / "additional_chat_templates").mkdir()
    kept = {
        *("LICENSE", "NOTICE", "README.md", "tokenizer.tiktoken"),
        *("chat_template.jinja", "additional_chat_templates/tool.jinja"),
    }
    left = {"modeling_x.py", "training_args.bin", ".gitattributes"}
    for name in kept | left:
        (model / name).write_text(name)
    code, err = run(
        "compress", str(model), "--recipe", "recipe.yaml", "--output", str(tmp_path / "out")
    )
    assert code == 0, err
    assert {name for name in kept if (tmp_path / "out" / name).is_file()} == kept
    assert not any((tmp_path / "out" / name).exists() for name in left)
    from taut_deploy.checkpoint import verify

    assert kept <= verify(tmp_path / "out").files.keys()


@pytest.mark.parametrize("mode", [["--plan"], ["--output", "beyond"]])
def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(mode, run, tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    config = AutoConfig.from_pretrained(model, vocab_size=20)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    code, err = run("compress", str(model), "--recipe", "recipe.yaml", *mode)
    assert code == 2
    assert "config.json: vocab_size is 20, but the tokenizer gives the id" in err


def test_control_characters_are_written_out():
    assert printable("a\x1b[31m\x00é") == "a\\x1b[31m\\x00é"
