"""``--devices`` of what trains: processes that hold a part of the models each train as one does."""

from __future__ import annotations

import csv
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import job_for, recipe_data, write_llama
from transformers import AutoModelForCausalLM
from validate_setup import write_text

from taut_deploy.checkpoint import verify
from taut_deploy.cli import main
from taut_deploy.compress import driver, pipeline, pipeline_plan
from taut_deploy.compress.pipeline_plan import plan
from taut_deploy.compress.train.distil import DistilJob, distil
from taut_deploy.compress.train.parts import Sharded
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.errors import ModelError, OutputError, RecipeError
from taut_deploy.models.store import describe_directory

TWO = ("cpu", "cpu")
SETTINGS = TrainSettings(
    tokens=6 * 8 * 16,
    sequence_length=16,
    batch_size=8,
    micro_batch=2,
    held_out=5,  # three micro-batches for two processes
    learning_rate=1e-3,
    state_every=2,
    gradient_checkpointing=True,
    hidden=0.5,
    cross_entropy=0.5,
)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``base`` (head and embeddings are one weight), a W4A16 ``student`` of it, and a text."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "base", tie=True)
    text = write_text(path / "text.txt", 2400, seed=6)
    driver.compress(job_for(path / "base", recipe_data(text, algorithm="rtn"), path / "student"))
    return path


def job(room: Path, output: Path, devices=TWO, **settings) -> DistilJob:
    return DistilJob(
        describe_directory(room / "student"),
        describe_directory(room / "base"),
        output,
        (str(room / "text.txt"),),
        SETTINGS.model_copy(update=settings),
        room / "cache",
        devices=devices,
    )


def curve(directory: Path) -> list[dict[str, float]]:
    with (directory / "training_loss.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_two_processes_train_as_one_does(room, tmp_path):
    one = distil(job(room, tmp_path / "one", ()))
    two = distil(job(room, tmp_path / "two"))
    # A mean of eight sequences, taken as one of two fours: fp32 rounds each sum by 6e-8 of it.
    for ours, single in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(single, rel=2e-5)
    for when in ("before", "after"):
        found, wanted = (made.recipe["held_out"][when] for made in (two, one))
        assert found == pytest.approx(wanted, rel=1e-6 if when == "before" else 2e-5)
    held_out = one.recipe["held_out"]  # what was trained moved it by far more than that
    assert abs(held_out["after"]["loss"] / held_out["before"]["loss"] - 1) > 2e-3
    verify(tmp_path / "two")
    ours, single = (
        {
            name: tensor
            for shard in sorted((tmp_path / run).glob("*.safetensors"))
            for name, tensor in load_file(shard).items()
        }
        for run in ("two", "one")
    )
    assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
        k: (v.shape, v.dtype) for k, v in single.items()
    }
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        got, wanted, before = (
            AutoModelForCausalLM.from_pretrained(place).eval()(ids).logits
            for place in (tmp_path / "two", tmp_path / "one", room / "student")
        )
    # A code that lay between two may fall to the other side: far less than training moved.
    assert (got - wanted).norm() < 0.05 * (wanted - before).norm()


def ranks_of(parent: int) -> list[int]:
    """The processes that a process's fork server has forked, in the order of their start."""
    servers = [one for one in children_of(parent) if b"forkserver" in command_of(one)]
    return sorted(one for server in servers for one in children_of(server))


def children_of(process: int) -> list[int]:
    return [
        int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def command_of(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def shards(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def test_a_killed_process_is_named_and_the_next_run_ends_in_the_same_bytes(room, tmp_path):
    distil(job(room, tmp_path / "whole"))
    told = []

    def kill_the_second(done, total, what):
        told.append(done)
        if done == 3:
            os.kill(ranks_of(os.getpid())[-1], signal.SIGKILL)

    with pytest.raises(OutputError, match=r"^--devices: process 1, of cpu, .*9.*run again"):
        distil(job(room, tmp_path / "killed"), kill_the_second)
    assert ranks_of(os.getpid()) == []
    seen = []
    distil(job(room, tmp_path / "killed"), lambda done, *_: seen.append(done))
    assert seen[0] == 3  # after the state of step 2
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")
    log = json.loads((tmp_path / "killed" / "compression_log.json").read_text())
    assert log["resumed"] is True


def test_what_a_process_refuses_is_told_in_a_line(room, tmp_path):
    numpy.save(tmp_path / "ids.npy", numpy.full(600, 999))
    with pytest.raises(ModelError, match=r"^--text: holds token 999, the student's vocabulary has"):
        distil(replace(job(room, tmp_path / "out"), text=(str(tmp_path / "ids.npy"),)))
    assert ranks_of(os.getpid()) == []


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("batches", [1, 2, 3, 7])
def test_processes_take_equally_many_turns_and_each_batch_counts_once(batches, count):
    given = [torch.tensor([i]) for i in range(batches)]
    taken = [Sharded(rank, count).turns(given) for rank in range(count)]
    assert {len(turns) for turns in taken} == {-(-batches // count)}
    counted = [int(batch) for turns in taken for batch, counts in turns if counts]
    assert sorted(counted) == list(range(batches))


def recipe_of(room: Path, *stages: dict) -> dict:
    data = {**recipe_data(room / "text.txt"), "stages": list(stages)}
    data["calibration"]["sequences"] = 66  # two batches
    return data


def training(room: Path, method: str, **settings) -> dict:
    given = SETTINGS.model_copy(update=settings).model_dump(exclude={"start", "hidden"})
    return {"method": method, "text": [str(room / "text.txt")], **given}


QUANTIZE = recipe_data(Path("text"))["stages"][0]


def test_a_recipe_trains_on_the_devices_of_its_blocks(room, tmp_path):
    data = recipe_of(room, QUANTIZE, training(room, "qat"))
    request = job_for(room / "base", data, tmp_path / "one")
    shared = replace(request, output=tmp_path / "two", devices=TWO)
    assert "on each of cpu, cpu, which hold a part each" in plan(shared).whole_model[-1]
    assert "a part each" not in plan(request).whole_model[-1]
    one = pipeline.compress(request)
    processes = []
    two = pipeline.compress(shared, lambda *_: processes.append(len(ranks_of(os.getpid()))))
    assert max(processes) == 2
    results = [made.recipe["results"][-1]["held_out"] for made in (two, one)]
    for when in ("before", "after"):
        assert results[0][when] == pytest.approx(results[1][when], rel=2e-5)
    assert abs(results[1]["after"]["loss"] / results[1]["before"]["loss"] - 1) > 2e-3
    assert verify(tmp_path / "two").recipe_hash == one.recipe_hash


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        ({"micro_batch": 8}, RecipeError, r"2 devices for 1 micro-batches of .*\(stages\.1\)$"),
        ({"optimizer": "adamw8bit"}, OutputError, r"adamw8bit keeps moments .*\(stages\.1\)$"),
    ],
)
def test_a_training_that_devices_cannot_share_is_refused_first(
    settings, error, reason, room, tmp_path, monkeypatch
):
    monkeypatch.setattr(pipeline_plan, "require_optimizer", lambda settings: None)
    data = recipe_of(room, QUANTIZE, training(room, "qat", **settings))
    shared = replace(job_for(room / "base", data, tmp_path / "out"), devices=TWO)
    with pytest.raises(error, match=reason):
        pipeline.compress(shared, lambda *_: pytest.fail("began"))
    left = [one.name for one in tmp_path.iterdir() if one.name != "cache"]
    assert left == [".out.lock"], "nothing but the lock file stays"


def test_what_cannot_be_shared_is_refused_before_anything_is_read(room, tmp_path):
    with pytest.raises(RecipeError, match=r"--devices: 2 devices for 1 micro-batches of a step; "):
        distil(job(room, tmp_path / "out", micro_batch=8))
    with pytest.raises(OutputError, match="--devices: adamw8bit keeps moments of whole weights"):
        distil(job(room, tmp_path / "out", optimizer="adamw8bit"))
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--devices", "cpu"], "--devices cpu: name two or more, or use --device"),
        (["--devices", "cpu,cuda:0"], "leave cpu out"),
    ],
)
def test_the_command_refuses_what_is_no_list_of_devices(room, tmp_path, options, reason, capsys):
    argv = ["distil", str(room / "student"), "--output", str(tmp_path / "out")]
    assert main([*argv, "--teacher", str(room / "base"), *options]) != 0
    assert reason in capsys.readouterr().err
