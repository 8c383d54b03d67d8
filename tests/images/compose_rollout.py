"""Profile ``rollout`` of a running compose project: settings, traffic, its promote command."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml
from compose_project import Project

SECTIONS = {
    # Every answer is read again. Two workers and the guard share one core.
    "guard": {
        "sample": 1,
        "max_kl_excess_nats": 0.2,
        "max_disagreement_excess": 0.3,
        "max_slowdown": 20,
        "max_cpu_share": None,
    },
    "rollout": {
        "steps": [0, 50, 100],
        "min_step_s": 2,
        "min_answers": 10,
        "min_tokens": 100,
        "min_streams": 5,
        "max_first_token_ratio": 20,
        "max_inter_token_ratio": 20,
    },
}
"""A rollout of a minute: what is tried is the way through the containers."""
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "The first president of the United States was",
    "A triangle has",
    "The opposite of hot is",
    "Once upon a time there was",
)


def sections_file(folder: Path) -> Path:
    """Write SECTIONS; returns the file for ``TAUT_ROLLOUT_CONFIG``."""
    file = folder / "rollout.yaml"
    file.write_text(yaml.safe_dump(SECTIONS))
    file.chmod(0o644)  # read by the container's user
    return file


def promote(project: Project, *arguments: str) -> str:
    """What ``taut promote`` prints beside the gateway.

    Raises:
        AssertionError: it did not return 0.
    """
    # As validation: no --rm, with which podman's API loses the exit code.
    done = project.compose("run", "--no-TTY", "--no-deps", "promote", *arguments)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


SWAP = """
import os
from pathlib import Path
import yaml
from taut_deploy.bench.rollout_harm import Harm, harmed_copy

link = Path("/models/serving/compressed")
source = link.resolve()
harmed = source.with_name(source.name + "-harmed")
print(len(harmed_copy(source, harmed, Harm("*.layers.[12].*weight_scale", 3.0))))
fresh = link.with_name("fresh")
fresh.symlink_to(os.path.relpath(harmed, link.parent))
fresh.replace(link)
# What the worker says first would keep it from any traffic: the guard has to find the rest.
file = Path("/etc/taut/gateway.yaml")
told = yaml.safe_load(file.read_text())
for variant in told["models"][0]["variants"]:
    variant.pop("golden", None)
file.write_text(yaml.safe_dump(told))
"""


def harm_candidate(project: Project) -> int:
    """Have the candidate's worker load a copy of its checkpoint with wrong scales.

    Returns:
        How many tensors are wrong; the worker is starting then.

    Raises:
        AssertionError: a command did not return 0.
    """
    swap = ("run", "--no-TTY", "--no-deps", "--entrypoint", "python3", "prepare-rollout")
    told = []
    for command in (
        (*swap, "-c", SWAP),
        ("restart", "--no-deps", "worker"),
        ("restart", "--no-deps", "gateway"),
    ):
        done = project.compose("--profile", "rollout", *command)
        assert done.returncode == 0, done.stdout[-2000:]
        told.append(done.stdout)
    return int(told[0].split()[-1])


def worker_states(project: Project) -> dict[str, str]:
    """What the gateway says of each variant's only worker."""
    url = "http://127.0.0.1:8001/admin/state"
    ask = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=10).read().decode())"
    (model,) = json.loads(project.python("gateway", ask))["models"].values()
    return {name: of["workers"][0]["state"] for name, of in model["variants"].items()}


def status(project: Project, model: str) -> dict[str, Any]:
    """Where a model's rollout stands: the admin API on the loopback of the gateway's container."""
    url = "http://127.0.0.1:8001/admin/rollout"
    ask = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=10).read().decode())"
    told = json.loads(project.python("gateway", ask))
    found: dict[str, Any] = next(each for each in told["rollouts"] if each["model"] == model)
    return found


def ask_until_ended(project: Project, model: str, limit_s: float) -> tuple[dict[str, Any], int]:
    """Read streams, one after the other, until the rollout is over; each must end as it should.

    Returns:
        Its last status, and how many streams were read.
    """
    asked, until = 0, time.monotonic() + limit_s
    while time.monotonic() < until:
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
            with project.stream(body) as events:
                assert {event["model"] for event in events} == {model}
            asked += 1
        now = status(project, model)
        if now["phase"] != "running":
            return now, asked
    raise AssertionError(f"not over in {limit_s:g} s: {status(project, model)}")
