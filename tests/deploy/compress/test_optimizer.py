"""Moments in 8 bits: they train, survive a kill, and are asked for before anything is loaded."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from tiny_models import job_for, recipe_data, write_llama
from validate_setup import write_text

from taut_deploy.checkpoint import verify
from taut_deploy.compress import driver, pipeline
from taut_deploy.compress.train import distil as module
from taut_deploy.compress.train.distil import DistilJob, distil
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.errors import OutputError
from taut_deploy.models.store import describe_directory

SETTINGS = TrainSettings(
    tokens=12 * 4 * 16,
    sequence_length=16,
    batch_size=4,
    held_out=4,
    state_every=3,
    learning_rate=1e-3,
    optimizer="adamw8bit",
)
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    path = tmp_path_factory.mktemp("optimizer")
    write_llama(path / "base")
    text = write_text(path / "text.txt", 1200, seed=5)
    driver.compress(job_for(path / "base", recipe_data(text), path / "student"))
    return path


def job(room, output) -> DistilJob:
    student, base = (describe_directory(room / name) for name in ("student", "base"))
    return DistilJob(student, base, output, (str(room / "text.txt"),), SETTINGS, room)


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes (taut[train]) is not installed")
def test_a_killed_run_with_8_bit_moments_ends_in_the_same_bytes(room, tmp_path):
    whole = distil(job(room, tmp_path / "whole"))
    losses = whole.recipe["held_out"]
    assert losses["after"]["loss"] < losses["before"]["loss"]

    class Killed(BaseException):
        pass

    def kill(done: int, total: int, what: str) -> None:
        if done == 8:
            raise Killed

    with pytest.raises(Killed):
        distil(job(room, tmp_path / "killed"), kill)
    steps = []
    distil(job(room, tmp_path / "killed"), lambda done, *_: steps.append(done))
    assert steps[0] == 7  # from the state of step 6
    assert verify(tmp_path / "killed").digest == whole.digest


def test_without_the_package_nothing_is_loaded_first(room, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(module, "open_models", lambda *_: pytest.fail("loaded"))
    with pytest.raises(OutputError, match=r"adamw8bit needs .* pip install 'taut\[train\]'"):
        distil(job(room, tmp_path / "out"))


def test_without_the_package_a_recipe_is_refused_before_its_blocks(room, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    data = recipe_data(room / "text.txt")
    data["stages"].append({"method": "distil", "optimizer": "adamw8bit"})
    with pytest.raises(OutputError, match="adamw8bit needs the package bitsandbytes"):
        pipeline.compress(
            job_for(room / "base", data, tmp_path / "out"), lambda *_: pytest.fail("began")
        )
