"""``kill -9`` in the middle of ``taut distil``: the next run ends in the same bytes."""

from __future__ import annotations

import pytest
from tiny_models import job_for, recipe_data, write_llama
from validate_setup import write_text

from taut_deploy.compress import driver
from taut_deploy.files import VOLATILE_FILES

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from taut_deploy.compress.train.distil import DistilJob, distil
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.models.store import describe_directory
torch.set_num_threads(1)
room, output, die_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
settings = TrainSettings(tokens=12 * 64, sequence_length=16, batch_size=4, micro_batch=2,
                         held_out=2, state_every=3)
job = DistilJob(describe_directory(room / "student"), describe_directory(room / "base"), output,
                (str(room / "text.txt"),), settings, room)
def progress(done, total, what):
    if done == die_at or (die_at == 99 and what.startswith("writing")):
        os.kill(os.getpid(), signal.SIGKILL)
distil(job, progress)
print("fresh" if die_at == 0 else "not killed")
"""


@pytest.fixture
def run(run_with_transformers):
    """Run SCRIPT, in a process that has most of its imports behind it."""
    return lambda *arguments: run_with_transformers(SCRIPT, *arguments)


def content(directory):
    return {
        path.name: path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in VOLATILE_FILES
    }


def test_a_killed_run_ends_in_the_bytes_of_an_undisturbed_one(run, tmp_path):
    write_llama(tmp_path / "base")
    text = write_text(tmp_path / "text.txt", 800, seed=5)
    driver.compress(job_for(tmp_path / "base", recipe_data(text), tmp_path / "student"))
    done = run(tmp_path, tmp_path / "whole", 0)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = content(tmp_path / "whole")
    assert {"taut.json", "training_loss.csv", "training_loss.png"} <= set(expected)
    for die_at in (5, 99):  # between two saved states, and while the checkpoint is written
        killed = run(tmp_path, tmp_path / "killed", die_at)
        assert killed.returncode == -9, killed.stderr[-2000:]
    assert run(tmp_path, tmp_path / "killed", 0).returncode == 0
    assert content(tmp_path / "killed") == expected
    log = (tmp_path / "killed" / "compression_log.json").read_text()
    assert '"resumed": true' in log
