"""A GGUF becomes the model it holds, or one line: no tensor is made up, left out or broken."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from tiny_gguf import write_gguf

from taut_deploy.errors import ModelError, OutputError
from taut_deploy.models import gguf
from taut_deploy.models.gguf_header import read_header
from taut_deploy.models.store import ModelStore


def drop(name):
    return lambda _writer, tensors: tensors.pop(name)


def put(name, value):
    def change(_writer, tensors):
        tensors[name].flat[3] = value

    return change


def add(name, *shape):
    return lambda _writer, tensors: tensors.update({name: np.ones(shape, np.float32)})


def reshape(name, *shape):
    return lambda _writer, tensors: tensors.update({name: np.ones(shape, np.float32)})


def metadata(method, *arguments):
    return lambda writer, _tensors: getattr(writer, method)(*arguments)


UP = "blk.0.ffn_up.weight"
CHANGES = {
    "a linear layer is missing": (drop(UP), f"1 tensors are missing, the first is {UP}"),
    "a norm is missing": (drop("output_norm.weight"), "missing, the first is output_norm.weight"),
    "the embedding is missing": (drop("token_embd.weight"), "missing, the first is token_embd"),
    "a tensor too many": (add("rope_freqs.weight", 8), "no place for 1 .*rope_freqs.weight"),
    "a block too many": (add("blk.1.ffn_up.weight", 64, 32), "block_count is 1, .* 2 blocks"),
    "another shape": (reshape(UP, 32, 32), f"{UP} has 1024 values, its metadata says 2048"),
    "the same size in another shape": (
        reshape(UP, 32, 64),
        r"shape \(32, 64\), its metadata says \(64",
    ),
    "NaN in a norm": (put("output_norm.weight", np.nan), "model.norm.weight holds NaN"),
    "infinity in the embedding": (put("token_embd.weight", np.inf), "embed_tokens.* holds NaN or"),
    "NaN in the head": (put("output.weight", np.nan), "lm_head.weight holds NaN"),
    "infinity in a layer": (put(UP, -np.inf), "up_proj.weight holds NaN or infinity"),
    "a part under another name": (
        metadata("add_uint16", "split.count", 3),
        r"t\.gguf: is part of a model split into 3 files .*NAME-00001-of-00003\.gguf",
    ),
    "a number that is none": (
        metadata("add_float32", "llama.rope.scaling.factor", float("nan")),
        "llama.rope.scaling.factor is nan",
    ),
    "more experts than there are": (
        metadata("add_uint32", "llama.expert_count", 2**31),
        "llama.expert_count is 2147483648",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_not_a_whole_model_is_refused_by_name(case, tmp_path):
    change, message = CHANGES[case]
    file = write_gguf(tmp_path / "t.gguf", change=change)
    with pytest.raises(ModelError, match=message) as refused:
        ModelStore(tmp_path / "s").fetch(str(file))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "s").exists() or list((tmp_path / "s").iterdir()) == []


def test_a_model_without_a_head_of_its_own_is_tied_as_the_format_says(tmp_path):
    from safetensors.torch import load_file

    file = write_gguf(tmp_path / "t.gguf", change=drop("output.weight"))
    record = ModelStore(tmp_path / "s").fetch(str(file))
    assert "lm_head.weight" not in load_file(f"{record.path}/model.safetensors")
    assert '"tie_word_embeddings": true' in (tmp_path / "s/t/config.json").read_text()


def test_transformers_parses_a_file_once(tmp_path, monkeypatch):
    import gguf as reading

    parsed, tables = [], []
    reader, table = reading.GGUFReader, reading.get_tensor_name_map

    def parse(path, *arguments):
        parsed.append(path)
        return reader(path, *arguments)

    def make_table(*of):
        tables.append(of)
        return table(*of)

    monkeypatch.setattr(reading, "GGUFReader", parse)
    monkeypatch.setattr(reading, "get_tensor_name_map", make_table)
    for name in ("a", "b"):  # nothing is kept for another file
        ModelStore(tmp_path / "s").fetch(str(write_gguf(tmp_path / f"{name}.gguf")))
    assert [os.path.basename(path) for path in parsed] == ["a.gguf", "b.gguf"]  # noqa: PTH119
    assert len(tables) == 2


def test_the_header_says_what_the_writer_wrote(tmp_path):
    header = read_header(write_gguf(tmp_path / "t.gguf"))
    assert header.architecture == "llama"
    assert header.metadata["llama.context_length"] == 64
    assert header.metadata["tokenizer.ggml.tokens"] == 30
    assert header.tensors[UP].shape == (32, 64)
    assert header.elements == sum(tensor.size // 4 for tensor in header.tensors.values())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_named(code, tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(*_arguments):
        raise SafetensorError(f"I/O error: {os.strerror(code)} (os error {code})")

    monkeypatch.setattr(gguf, "_save", full)
    file = write_gguf(tmp_path / "t.gguf")
    with pytest.raises(OutputError, match=r"the disk is full|the disk quota is used up"):
        ModelStore(tmp_path / "s").fetch(str(file))
    assert list((tmp_path / "s").iterdir()) == []


def test_a_disk_that_is_too_small_is_named_before_the_work(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(9, 9, 9))
    monkeypatch.setattr(gguf, "_save", lambda *_: pytest.fail("went on"))
    file = write_gguf(tmp_path / "t.gguf")
    with pytest.raises(OutputError, match="set TAUT_HOME to another disk"):
        ModelStore(tmp_path / "s").fetch(str(file))


def test_a_file_called_in_capitals_is_a_gguf(tmp_path):
    file = write_gguf(tmp_path / "T.GGUF")
    assert ModelStore(tmp_path / "s").fetch(str(file)).name == "t"


def test_what_was_fetched_is_found_by_its_name(tmp_path):
    store = ModelStore(tmp_path / "s")
    fetched = store.fetch(str(write_gguf(tmp_path / "mine.gguf")))
    (tmp_path / "mine.gguf").unlink()
    assert store.fetch("mine") == fetched
    with pytest.raises(ModelError, match="'other': no such model; give one of"):
        store.fetch("other")


def test_a_configuration_that_transformers_refuses_is_one_line(tmp_path):
    file = write_gguf(tmp_path / "t.gguf", hidden=33, heads=1)  # rotary embeddings need pairs
    with pytest.raises(ModelError, match=r"t\.gguf: not a GGUF that transformers can read"):
        ModelStore(tmp_path / "s").fetch(str(file))
