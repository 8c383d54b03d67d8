"""Documents from somebody else: beyond a bound they are one line, never a traceback."""

from __future__ import annotations

import os

import pytest
from tiny_models import edit_json, write_llama

from taut_deploy.diagnose.default_kernels import config_of
from taut_deploy.documents import parse_json, parse_yaml, read_json
from taut_deploy.errors import ModelError, RecipeError, TautError
from taut_deploy.models.directory import read_config, read_shape
from taut_deploy.models.store import read_record
from taut_deploy.recipe import parse_recipe
from taut_deploy.serve.settings import load_serve_settings
from taut_deploy.validate.policy import load_policy

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n"
    for before, name in zip("abcdef", "bcdefg", strict=True)
)
YAML = {
    "brackets": ("[" * 50_000, "nested deeper than 64 levels"),
    "braces": ("{a: " * 50_000, "nested deeper than 64 levels"),
    "dashes": ("- " * 50_000, "nested deeper than 64 levels"),
    "digits": ("name: " + "9" * 5_000, "a number of 5000 characters"),
    "hexadecimal": ("name: 0x" + "f" * 5_000, "a number of 5002 characters"),
    "aliases": (BOMB, "more than 100000 values"),
    "an endless alias": ("name: &a [*a]", "names nothing that is finished"),
    "a day that is none": ("2026-99-99: 1", "Field required|unknown key"),
    "a tag that lies": ("name: !!int abc", "not valid YAML"),
    "a tag that runs": ("name: !!python/object/apply:os.getcwd []", "not valid YAML"),
    "a key twice": ("name: a\nname: b", "the key 'name' is given twice"),
    "a key that is a list": ("? [a]\n: 1", "not valid YAML"),
    "a key that is a number": ("1: 2", "expected a key that is text"),
    "half a character": ('name: "\\ud800"', "half a character"),
    "a NUL": ('name: "\\0"', "a NUL"),
    "a control character": ("name: \x07", "not valid YAML"),
}


@pytest.mark.parametrize("case", YAML)
def test_yaml_beyond_a_bound_is_one_line_at_every_door(case, tmp_path):
    text, reason = YAML[case]
    file = tmp_path / "file.yaml"
    file.write_text(text)
    doors = (
        lambda: parse_recipe(text, "file.yaml"),
        lambda: load_policy(file),
        lambda: load_serve_settings(file, {}),
    )
    for door in doors:
        with pytest.raises(TautError, match=reason) as refused:
            door()
        assert "file.yaml" in str(refused.value)
        assert len(str(refused.value)) < 600


JSON = {
    "brackets": ("[" * 50_000, "nested deeper than 64 levels"),
    "closed brackets": ("[" * 500 + "]" * 500, "nested deeper than 64 levels"),
    "objects": ('{"a":' * 50_000, "nested deeper than 64 levels"),
    "digits": ('{"a": ' + "9" * 5_000 + "}", "a number of 5000 digits"),
    "half a character": ('{"a": "\\ud800"}', "half a character"),
    "a NUL": ('{"a": "\\u0000"}', "a NUL"),
    "a list": ("[]", "expected a JSON object"),
    "nothing": ("", "not valid JSON"),
    "not text": (b"\xff\xfe{", "not valid JSON"),
}


@pytest.mark.parametrize("case", JSON)
def test_json_beyond_a_bound_is_one_line(case, tmp_path):
    text, reason = JSON[case]
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "taut-model.json").write_bytes(content)
    with pytest.raises(ModelError, match=reason) as refused:
        read_config(tmp_path)
    assert str(refused.value).startswith(str(tmp_path / "config.json"))
    assert len(str(refused.value)) < 600
    with pytest.raises(ModelError, match=r"taut-model\.json: damaged"):
        read_record(tmp_path)
    assert config_of(tmp_path) == {}


def test_a_record_of_other_types_is_refused(tmp_path):
    (tmp_path / "taut-model.json").write_text(
        '{"name": 3, "path": "p", "digest": "d", "bytes": 1, "source": "s"}'
    )
    with pytest.raises(ModelError, match=r"damaged \(name: Input should be a valid string\)"):
        read_record(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json: not a plain file"):
        read_config(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("taut_deploy.documents.MAX_BYTES", 1 << 20)
    (tmp_path / "x.json").write_text(" " * (2 << 20))
    with pytest.raises(ModelError, match=r"x\.json: larger than 1 MiB"):
        read_json(tmp_path / "x.json", ModelError)


def test_ordinary_documents_read_as_before():
    text = "a: &x [1, 2.5, off, 2026-01-02]\nb: *x\nc: {<<: {d: 1}, e: 2}"
    assert parse_yaml(text, "o", RecipeError) == {
        "a": [1, 2.5, False, "2026-01-02"],
        "b": [1, 2.5, False, "2026-01-02"],
        "c": {"d": 1, "e": 2},
    }
    assert parse_json(b'{"a": [1, -2.5e3, null, "\\u00e9"]}', "o", ModelError) == {
        "a": [1, -2500.0, None, "é"]
    }


@pytest.mark.parametrize("name", ["auto", "int8", "manual_seed", 16])
def test_a_dtype_that_is_none_is_refused_by_field(name, tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    edit_json(model / "config.json", dtype=name)
    with pytest.raises(ModelError, match=r"config\.json: dtype: '.*' is no type of weights"):
        read_shape(model)
