"""``pytorch_model.bin``: read as tensors and nothing else, and rewritten as safetensors."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from tiny_models import write_llama

from taut_deploy.errors import ModelError
from taut_deploy.models.store import ModelStore


def pickled(path: Path, shards: int = 1) -> dict[str, torch.Tensor]:
    """A model whose only weights are pickles, tied ones sharing memory; its tensors."""
    model = write_llama(path, tie=True)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    (model / "LICENSE").write_text("yours")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if shards == 1:
        torch.save(tensors, model / "pytorch_model.bin")
        return tensors
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        mine = names[number::shards]
        torch.save({name: tensors[name] for name in mine}, model / file)
        weight_map |= dict.fromkeys(mine, file)
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_of_pickles_is_rewritten_into_the_store(shards, tmp_path):
    tensors = pickled(tmp_path / "model", shards)
    models = ModelStore(tmp_path / "store")
    record = models.fetch(str(tmp_path / "model"))
    path = Path(record.path)
    assert path.parent == tmp_path / "store"
    found = {}
    for shard in path.glob("*.safetensors"):
        found |= load_file(shard)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert (path / "LICENSE").read_text() == "yours"
    assert not list(path.glob("*.bin*"))
    assert models.fetch(str(tmp_path / "model")) == record, "made once"
    modes = {file.stat().st_mode & 0o777 for file in path.iterdir()}
    assert modes == {0o666 & ~_umask()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_that_is_code_is_refused_and_not_run(tmp_path):
    pickled(tmp_path / "model")
    file = tmp_path / "model" / "pytorch_model.bin"
    torch.save({"model.norm.weight": Harmful(tmp_path / "harm")}, file)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: not a pickle of tensors alone"):
        ModelStore(tmp_path / "store").fetch(str(tmp_path / "model"))
    assert not (tmp_path / "harm").exists()
    assert not list((tmp_path / "store").iterdir())
    torch.load(file, weights_only=False)
    assert (tmp_path / "harm").exists(), "it would have"


@pytest.mark.parametrize(
    "content",
    [
        lambda file: torch.save([torch.ones(2)], file),
        lambda file: torch.save({"a": {"b": 1}}, file),
        lambda file: file.write_bytes(pickle.dumps({"a": 1})),
        lambda file: file.write_bytes(file.read_bytes()[:-200]),
        lambda file: file.write_bytes(b""),
    ],
)
def test_what_holds_no_named_tensors_is_refused_in_one_line(content, tmp_path):
    pickled(tmp_path / "model")
    content(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: .*take the model's") as refused:
        ModelStore(tmp_path / "store").fetch(str(tmp_path / "model"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["../elsewhere.bin", "pytorch_model-00009-of-00009.bin", 7])
def test_an_index_that_names_another_place_is_refused(name, tmp_path):
    pickled(tmp_path / "model", 2)
    index = tmp_path / "model" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map: .* of this directory"):
        ModelStore(tmp_path / "store").fetch(str(tmp_path / "model"))


def test_a_directory_used_as_it_is_says_how_to_rewrite_it(tmp_path):
    pickled(tmp_path / "model")
    with pytest.raises(ModelError, match="'taut model fetch DIRECTORY' rewrites"):
        ModelStore(tmp_path / "store").find(str(tmp_path / "model"))


def test_pickles_of_a_hub_are_fetched_only_without_safetensors(tmp_path, monkeypatch):
    on_hub = tmp_path / "hub"
    pickled(on_hub)
    asked = []

    def snapshot_download(repo_id, *, revision, local_dir, allow_patterns):
        names = [file.name for file in on_hub.iterdir()]
        asked.append(sorted(filter_repo_objects(names, allow_patterns=allow_patterns)))
        for name in asked[-1]:
            shutil.copy(on_hub / name, local_dir)

    info = SimpleNamespace(sha="a" * 40, siblings=None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    record = ModelStore(tmp_path / "store").fetch("owner/pickled")
    assert asked[1:] == [["pytorch_model.bin"]]
    assert "LICENSE" in asked[0]
    names = {file.name for file in Path(record.path).iterdir()}
    assert {"LICENSE", "config.json", "model-00001-of-00001.safetensors"} <= names
    assert "pytorch_model.bin" not in names


@pytest.mark.parametrize("stray", ["model.safetensors", "model-00009-of-00009.safetensors"])
def test_a_second_set_of_weights_is_refused(stray, tmp_path):
    """transformers reads the single file, vLLM what the index names."""
    model = write_llama(tmp_path / "model", shard_bytes=60_000)
    shutil.copy(sorted(model.glob("model-*.safetensors"))[0], model / stray)
    with pytest.raises(ModelError, match=rf"{stray}: weights beside those of .* no index names"):
        ModelStore(tmp_path / "store").fetch(str(model))


def test_shards_without_an_index_beside_a_single_file_are_refused(tmp_path):
    model = write_llama(tmp_path / "model")
    shutil.copy(model / "model.safetensors", model / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors: weights beside"):
        ModelStore(tmp_path / "store").fetch(str(model))
