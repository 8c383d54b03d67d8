"""Memory that is used up is called so, wherever it is met, and never a fault of the model."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama

from taut_deploy import cli
from taut_deploy.compress import dense, driver
from taut_deploy.compress.source import stream
from taut_deploy.errors import ModelError
from taut_deploy.out_of_memory import where_memory_is_over
from taut_deploy.validate import checkpoint_source
from taut_deploy.validate.checkpoint_source import CheckpointSource
from taut_deploy.validate.errors import CouldNotValidateError


def of_the_host() -> RuntimeError:
    """What torch's allocator itself raises."""
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 50)
    return found.value


def of_a_mapped_file() -> RuntimeError:
    """What torch says where a shard cannot be mapped."""
    said = "unable to mmap 103034600 bytes from file </m/model.safetensors>: Cannot allocate memory"
    return RuntimeError(f"{said} (12)")


def of_the_system() -> OSError:
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def of_a_card() -> RuntimeError:
    said = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"
    return torch.cuda.OutOfMemoryError(said)


ERRORS = pytest.mark.parametrize(
    "error", [of_the_host(), of_a_mapped_file(), of_a_card(), MemoryError()]
)


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (of_the_host(), "this machine"),
        (MemoryError(), "this machine"),
        (of_a_mapped_file(), "this machine"),
        (of_the_system(), "this machine"),
        (OSError(errno.ENOSPC, "no space"), None),
        (of_a_card(), "the card"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ModelError("can't allocate memory"), None),
    ],
)
def test_memory_is_told_apart_from_other_faults(error, place):
    assert where_memory_is_over(error) == place


def raises(error):
    def instead(*_, **__):
        raise error

    return instead


@ERRORS
def test_a_compression_out_of_memory_is_no_fault_of_the_model(error, tmp_path, monkeypatch):
    write_llama(tmp_path / "model")
    write_calibration_text(tmp_path / "text.txt")
    job = job_for(tmp_path / "model", recipe_data(tmp_path / "text.txt"), tmp_path / "out")
    monkeypatch.setattr(stream, "call_block", raises(error))
    with pytest.raises(type(error)) as found:
        driver.compress(job)
    assert found.value is error


@ERRORS
def test_a_load_out_of_memory_is_no_fault_of_the_files(error, tmp_path, monkeypatch):
    write_llama(tmp_path / "model")
    found = type("Found", (), {"from_pretrained": staticmethod(raises(error))})
    for module in (dense, checkpoint_source):
        monkeypatch.setattr(module, "loading_class", lambda *_, **__: found)
    with pytest.raises(type(error)):
        CheckpointSource(tmp_path / "model", "candidate", "cpu")
    with pytest.raises(type(error)):
        dense.load_dense(tmp_path / "model", "cpu", trust_remote_code=False)
    monkeypatch.setattr(found, "from_pretrained", staticmethod(raises(ValueError("bad"))))
    with pytest.raises(CouldNotValidateError, match="cannot be loaded"):
        CheckpointSource(tmp_path / "model", "candidate", "cpu")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (of_the_host(), "the memory of this machine is used up (4503599627370496 bytes more were"),
        (of_a_card(), "the memory of the card is used up (20.00 MiB more were asked for); close"),
        (MemoryError(), "the memory of this machine is used up; close what else uses it"),
        (of_a_mapped_file(), "the memory of this machine is used up; close what else uses it"),
        (of_the_system(), "the memory of this machine is used up; close what else uses it"),
    ],
)
def test_the_command_line_says_whose_memory_in_one_line(error, line, monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", raises(error))
    assert cli.main(["compress", "m"]) == cli.EXIT_FAILED
    said = capsys.readouterr().err
    assert said.startswith(f"taut: {line}")
    assert said.count("\n") == 1
    assert cli.main(["validate"]) == cli.EXIT_COULD_NOT_VALIDATE


def test_other_faults_of_ours_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(cli, "app", raises(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["compress", "m"])
