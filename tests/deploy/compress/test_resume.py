"""``kill -9`` in the middle of ``taut compress``: the next run ends in the same bytes."""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from check_server import CheckServer
from tiny_models import (
    job_for,
    recipe_data,
    w8a8_data,
    write_calibration_text,
    write_llama,
    write_recipe,
)

from taut_deploy.checkpoint import verify
from taut_deploy.cli import main
from taut_deploy.compress import driver
from taut_deploy.files import VOLATILE_FILES

SCRIPT = Path(__file__).with_name("kill_compress.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/``, ``w8a8.yaml``, ``w4a16.yaml``, ``learned.yaml`` and ``tables.yaml``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", layers=3)
    text = write_calibration_text(path / "text.txt")
    write_recipe(path / "w8a8.yaml", w8a8_data(text))
    write_recipe(path / "w4a16.yaml", recipe_data(text, symmetric=False))
    write_recipe(path / "learned.yaml", recipe_data(text, algorithm="round", steps=8))
    tables = {"embeddings": {"bits": 8}, "head": {"bits": 4, "group_size": 32}}
    learned = recipe_data(text, algorithm="round", steps=2)
    write_recipe(path / "tables.yaml", learned | tables)
    return path


def content(directory: Path) -> dict[str, bytes]:
    """Every byte of a checkpoint but the log, which holds wall-clock times."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in VOLATILE_FILES
    }


@pytest.fixture(scope="module")
def kill(room, tmp_path_factory):
    """Kills runs of a recipe as kill_compress.py says."""
    server = CheckServer(SCRIPT, ENVIRONMENT, tmp_path_factory.mktemp("kills"))

    def kill(recipe: str, work: Path, *how: str) -> dict[str, list[str]]:
        done = server.run([str(room / "model"), str(room / recipe), str(work), *how], 580)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    yield kill
    server.close()


def assert_all_equal(outputs: list[str]) -> None:
    expected = content(Path(outputs[0]))
    assert "taut.json" in expected
    verify(Path(outputs[0]))
    for output in map(Path, outputs[1:]):
        assert content(output) == expected, output
        left = [path.name for path in output.parent.iterdir() if path != output]
        assert left == [f".{output.name}.lock"], "nothing but the lock file stays beside it"


def test_killed_at_twenty_random_moments(kill, tmp_path):
    found = kill("w8a8.yaml", tmp_path, "times", "20")
    assert len(found["hits"]) == 20
    print("\n", collections.Counter(found["hits"]))
    assert len(set(found["hits"])) >= 4, f"the kills must fall on different steps: {found['hits']}"
    assert_all_equal(found["outputs"])


def test_killed_before_every_second_durable_step(kill, tmp_path):
    found = kill("w4a16.yaml", tmp_path, "steps", "2")
    print("\n", collections.Counter(found["hits"]))
    assert len(found["hits"]) > 15
    assert {hit.split(": ")[1] for hit in found["hits"]} >= {
        "0 blocks done",
        "3 blocks done",
        "sealed",
        "published",
    }
    assert_all_equal(found["outputs"])


def test_killed_while_the_original_models_own_stream_is_carried_along(kill, tmp_path):
    found = kill("learned.yaml", tmp_path, "steps", "3")
    assert {hit.split(": ")[1] for hit in found["hits"]} >= {"1 blocks done", "2 blocks done"}
    assert_all_equal(found["outputs"])
    taken = json.loads((Path(found["outputs"][0]) / "taut.json").read_text())
    assert {layer["method"] for layer in taken["layers"]} == {"gptq+round"}


def test_killed_while_embeddings_and_head_are_rounded(kill, tmp_path):
    found = kill("tables.yaml", tmp_path, "steps", "4")
    assert {hit.split(": ")[1] for hit in found["hits"]} >= {"1 blocks done", "sealed"}
    assert_all_equal(found["outputs"])
    taken = json.loads((Path(found["outputs"][0]) / "taut.json").read_text())
    assert [(table["name"], table["bits"]) for table in taken["recipe"]["tables"]] == [
        ("embeddings", 8),
        ("head", 4),
    ]


def test_killed_through_the_command_line(room, tmp_path):
    """The real command, process and all: killed in the middle, then let finish in this one."""
    draw = random.Random(1)

    def asked(output: Path) -> list[str]:
        given = ["compress", str(room / "model"), "--recipe", str(room / "w8a8.yaml")]
        return [*given, "--output", str(output)]

    undisturbed, output = tmp_path / "undisturbed", tmp_path / "out"
    assert main(asked(undisturbed)) == 0
    hits = []
    argv = [sys.executable, "-m", "taut_deploy", *asked(output)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stderr is not None
    for line in process.stderr:
        if "model.layers.1" in line:
            time.sleep(draw.uniform(0.0, 0.02))
            hits.append(line.strip())
            break
    process.kill()
    process.communicate()
    assert hits == ["[1/3] compressing model.layers.1"]
    assert not output.exists()
    assert main(asked(output)) == 0
    assert content(output) == content(undisturbed)


def test_changing_the_recipe_in_between_starts_over(room, tmp_path):
    """State of another recipe is dropped, even where dropping it was itself cut short."""
    output = tmp_path / "out"
    partial = tmp_path / ".out.partial"
    (partial / ".state").mkdir(parents=True)
    (partial / ".state" / "fingerprint.json").write_text(json.dumps({"recipe_hash": "another"}))
    (partial / ".state" / "block-0.json").write_text("[]")
    (partial / "model-00001-of-00004.safetensors").write_bytes(b"of another recipe")
    driver.compress(job_for(room / "model", recipe_data(room / "text.txt"), output))
    assert verify(output).scheme == "W4A16"
    assert not partial.exists()
