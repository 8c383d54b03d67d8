"""The compose files as compose reads them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent
COMPOSE = shutil.which("docker-compose", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
needs_compose = pytest.mark.skipif(
    COMPOSE is None,
    reason="NO docker-compose HERE: the compose files are NOT read; make container-tools",
)
OURS = ("prepare", "prepare-rollout", "worker", "worker-baseline", "gateway", "validate", "promote")
PROFILES = {
    (): {"prepare", "gateway", "worker", "worker-baseline"},
    ("cpu",): {"prepare", "gateway", "worker", "worker-baseline"},
    ("gpu",): {"prepare", "gateway", "worker-gpu", "worker-baseline-gpu"},
    ("cpu", "obs"): {
        *("prepare", "gateway", "worker", "worker-baseline"),
        *("prometheus", "grafana"),
    },
    ("rollout",): {"prepare", "prepare-rollout", "gateway", "worker", "worker-baseline"},
    ("rollout-gpu",): {
        *("prepare", "prepare-rollout", "gateway"),
        *("worker-gpu", "worker-baseline-gpu"),
    },
    ("cpu", "validate"): {"prepare", "gateway", "worker", "worker-baseline", "validate"},
    ("gpu", "validate"): {"prepare", "gateway", "worker-gpu", "worker-baseline-gpu", "validate"},
}
"""Profiles asked for on the command line, and the services that then run."""


EVERY = ("cpu", "gpu", "rollout", "obs", "validate", "promote")
"""Profiles that have every service between them."""


def run_compose(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run compose at the root of the checkout with nothing in the environment but ``variables``."""
    assert COMPOSE is not None
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables}
    return subprocess.run(
        [COMPOSE, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def configuration(*arguments: str, **variables: str) -> dict[str, Any]:
    """What ``docker compose config`` makes of the files."""
    done = run_compose(*arguments, "config", "--format", "json", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def with_profiles(*profiles: str, **variables: str) -> dict[str, Any]:
    """The configuration under these profiles."""
    flags = [word for profile in profiles for word in ("--profile", profile)]
    return configuration(*flags, **variables)


@functools.cache
def everything() -> dict[str, dict[str, Any]]:
    """Every service of every profile."""
    services: dict[str, dict[str, Any]] = with_profiles(*EVERY)["services"]
    return services
