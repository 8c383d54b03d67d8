"""What compose does with nothing set: GPUs that are shared, images that are built, any folder."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
from compose_files import (
    COMPOSE,
    PROFILES,
    ROOT,
    configuration,
    everything,
    needs_compose,
    with_profiles,
)

pytestmark = needs_compose


def share(service: dict[str, Any]) -> float:
    (word,) = [each for each in service["command"] if each.startswith("--gpu-memory-utilization=")]
    return float(word.partition("=")[2])


def test_both_gpu_workers_fit_on_one_device_with_nothing_set():
    """vLLM takes 0.9 of the device by itself, and ends where that is not free."""
    workers = [
        service for name, service in with_profiles("gpu")["services"].items() if "-gpu" in name
    ]
    devices = [service["deploy"]["resources"]["reservations"]["devices"] for service in workers]
    assert devices[0] == devices[1]
    assert sum(share(service) for service in workers) <= 0.92


def test_devices_of_gpu_workers_can_be_chosen():
    given = {"TAUT_GPU": "0,1", "TAUT_GPU_COUNT": "2", "TAUT_GPU_SHARE": "0.9"}
    services = with_profiles("gpu", **given, TAUT_BASELINE_GPU="2")["services"]
    worker, baseline = services["worker-gpu"], services["worker-baseline-gpu"]
    assert share(worker) == 0.9 and share(baseline) == 0.45
    assert "--tensor-parallel-size=2" in worker["command"]
    ids = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in (worker, baseline)
    ]
    assert ids == [["0,1"], ["2"]]


@pytest.mark.parametrize("folder", [".", "docker", "docker/compose", "kernels"])
def test_configuration_is_the_same_from_every_folder(folder: str):
    assert COMPOSE is not None
    done = subprocess.run(
        [COMPOSE, "config", "--services"],
        cwd=ROOT / folder,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert set(done.stdout.split()) == PROFILES[()], done.stderr


def test_images_of_ours_are_built_and_never_pulled_by_their_placeholder_names():
    for name, service in everything().items():
        if "build" in service:
            assert service["pull_policy"] == "build", name
    files = ("-f", "compose.yaml", "-f", "docker/compose/own-images.yaml", "--profile", "*")
    own = configuration(*files)["services"]
    assert {each["pull_policy"] for each in own.values() if "build" in each} == {"missing"}
