"""The manifest: what it vouches for, and every way it can be found wrong."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from tiny_manifest import tiny_manifest
from tiny_models import edit_json

from taut_deploy.checkpoint import Golden, read_manifest, record_validation, seal, verify
from taut_deploy.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    """Two shards, a configuration, a log, and a manifest over them."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "model-00002-of-00002.safetensors").write_bytes(bytes(range(255, -1, -1)) * 8)
    (folder / "config.json").write_text("{}")
    (folder / "compression_log.json").write_text('{"seconds": 1}')
    seal(folder, tiny_manifest())
    return folder


def test_what_was_sealed_reads_back_and_verifies(checkpoint):
    manifest = verify(checkpoint)
    assert manifest == read_manifest(checkpoint)
    assert manifest.golden == Golden("a", "b", 1, 2.0)
    assert sorted(manifest.files) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert manifest.bytes == 2048 + 2048 + 2
    assert manifest.digest.startswith("sha256:")


def test_the_log_may_change_and_the_rest_may_not(checkpoint):
    (checkpoint / "compression_log.json").write_text('{"seconds": 2}')
    verify(checkpoint)


def alter_a_byte(folder):
    shard = folder / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)


def cut_short(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def make_socket(folder):
    before = Path.cwd()
    os.chdir(folder)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s")
    finally:
        os.chdir(before)


FILE_DAMAGE = {
    "altered": (alter_a_byte, r"model-00002-of-00002\.safetensors: its sha256 differs"),
    "cut short": (cut_short, r"model-00001-of-00002\.safetensors: its sha256 differs"),
    "missing": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        r"model-00002-of-00002\.safetensors: listed in taut\.json but missing",
    ),
    "a directory": (
        lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
        r"config\.json: listed in taut\.json but missing",
    ),
    "unlisted weights": (
        lambda f: (f / "adapter.safetensors").write_bytes(b"x"),
        r"adapter\.safetensors: a file that is not listed in taut\.json; remove it",
    ),
    "unlisted template": (
        lambda f: (f / "chat_template.jinja").write_text("x"),
        r"chat_template\.jinja: a file that is not listed in taut\.json; remove it",
    ),
    "unlisted code": (
        lambda f: (f / "modeling_x.py").write_text("x"),
        r"modeling_x\.py: a file that is not listed",
    ),
    "unlisted pickle": (
        lambda f: (f / "pytorch_model.bin").write_bytes(b"x"),
        r"pytorch_model\.bin: a file that is not listed",
    ),
    "a file further down": (
        lambda f: ((f / "a/b").mkdir(parents=True), (f / "a/b/c.json").write_text("{}")),
        r"a/b/c\.json: a file that is not listed",
    ),
    "a pipe": (lambda f: os.mkfifo(f / "pipe"), "pipe: a pipe that is not listed"),
    "a socket": (make_socket, "s: a socket that is not listed"),
    "a link": (lambda f: (f / "x").symlink_to("config.json"), "x: a link that is not listed"),
    "a link to nothing": (lambda f: (f / "x").symlink_to("gone"), "x: a link that is not listed"),
    "a link to a directory": (
        lambda f: (f / "sub").symlink_to("/"),
        "sub: a link that is not listed",
    ),
    "a pipe for the log": (
        lambda f: ((f / "compression_log.json").unlink(), os.mkfifo(f / "compression_log.json")),
        r"compression_log\.json: a pipe that is not listed",
    ),
}


@pytest.mark.parametrize("damage", FILE_DAMAGE)
def test_the_file_that_differs_is_named(damage, checkpoint):
    change, message = FILE_DAMAGE[damage]
    change(checkpoint)
    with pytest.raises(CheckpointError, match=message) as refused:
        verify(checkpoint)
    assert "\n" not in str(refused.value)
    assert str(checkpoint) in str(refused.value)


MANIFEST_DAMAGE = {
    "no manifest": (lambda p: p.unlink(), r"no taut\.json, so this is not a taut checkpoint"),
    "not JSON": (lambda p: p.write_text("{"), r"taut\.json: not valid JSON"),
    "not text": (lambda p: p.write_bytes(b"\xff\xfe{"), r"taut\.json: not valid JSON"),
    "a list": (lambda p: p.write_text("[]"), "format_version is None, this taut reads 1"),
    "a later version": (
        lambda p: edit_json(p, format_version=2),
        "format_version is 2, this taut reads 1",
    ),
    "no version": (lambda p: edit_json(p, format_version=None), "format_version is None"),
    "a key too few": (lambda p: edit_json(p, scheme=None), "scheme"),
    "a key too many": (lambda p: edit_json(p, surprise=1), "surprise"),
    "golden of another kind": (lambda p: edit_json(p, golden=3), r"taut\.json: "),
    "files of another kind": (
        lambda p: edit_json(p, files=["a"]),
        "files: Input should be an obj",
    ),
    "a name that is a flag": (
        lambda p: edit_json(p, name="--trust-remote-code"),
        r"name: .*'--trust-remote-code' is no model name",
    ),
    "a name with a NUL": (lambda p: edit_json(p, name="a\0b"), "holds a NUL or half a character"),
    "a name of two lines": (lambda p: edit_json(p, name="a\nb"), "name: .*is no model name"),
    "a context below zero": (
        lambda p: edit_json(p, max_model_len=-1),
        "max_model_len: Input should be greater than or equal to 1",
    ),
    "a context that is text": (
        lambda p: edit_json(p, max_model_len="64"),
        "max_model_len: Input should be a valid integer",
    ),
    "a context that is yes": (lambda p: edit_json(p, max_model_len=True), "max_model_len: "),
    "a scheme that is a flag": (lambda p: edit_json(p, scheme="--x"), "scheme: "),
    "a file elsewhere": (
        lambda p: edit_json(p, files={"../x": "0" * 64}),
        r"files\..*is no file of the checkpoint",
    ),
    "a margin that is NaN": (
        lambda p: p.write_text(p.read_text().replace('"margin": 2.0', '"margin": NaN')),
        "golden.margin: Input should be a finite number",
    ),
    "brackets without end": (lambda p: p.write_text("[" * 50_000), "nested deeper than 64 levels"),
    "a number without end": (
        lambda p: p.write_text('{"format_version": ' + "9" * 5_000 + "}"),
        "a number of 5000 digits",
    ),
}


@pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
def test_a_manifest_that_is_wrong_is_named(damage, checkpoint):
    change, message = MANIFEST_DAMAGE[damage]
    change(checkpoint / "taut.json")
    with pytest.raises(CheckpointError, match=message) as refused:
        verify(checkpoint)
    assert str(checkpoint) in str(refused.value)


def test_what_others_keep_beside_a_checkpoint_is_left_alone(checkpoint):
    (checkpoint / ".cache").mkdir()
    (checkpoint / ".cache" / "x.json").write_text("{}")
    (checkpoint / ".gitattributes").write_text("x")
    (checkpoint / "taut-model.json").write_text("{}")
    (checkpoint / "lost+found").mkdir(mode=0)
    verify(checkpoint)


def test_files_further_down_are_sealed(checkpoint):
    (checkpoint / "templates").mkdir()
    (checkpoint / "templates" / "tool.jinja").write_text("{{ x }}")
    sealed = seal(checkpoint, read_manifest(checkpoint))
    assert "templates/tool.jinja" in sealed.files
    verify(checkpoint)
    (checkpoint / "templates" / "tool.jinja").write_text("{{ y }}")
    with pytest.raises(CheckpointError, match=r"templates/tool\.jinja: its sha256 differs"):
        verify(checkpoint)


def test_a_verdict_is_recorded_without_touching_the_digest(checkpoint):
    before = verify(checkpoint)
    record_validation(checkpoint, {"verdict": "PASS"})
    after = verify(checkpoint)
    assert after.validation == {"verdict": "PASS"}
    assert after.digest == before.digest
    assert json.loads((checkpoint / "taut.json").read_text())["validation"] == {"verdict": "PASS"}


def test_a_copy_elsewhere_verifies_with_the_same_digest(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere").digest == verify(checkpoint).digest
