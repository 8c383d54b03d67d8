"""A container engine without a daemon, for every test of images, compose and chart.

Podman and buildah run as root with a storage of their own. Where they cannot, the test is skipped
with the reason. The images are in ``built_images``.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from taut_deploy.home import TautHome

REPOSITORY = Path(__file__).resolve().parents[2]
_PROGRAMS = ("podman", "buildah", "runc", "conmon")
# compat_api_enforce_docker_hub: else compose would look for taut/gateway on Docker's registry only.
# default_ulimits: raising them needs a capability that a container in a container lacks.
_CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[network]
network_backend = "netavark"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
compat_api_enforce_docker_hub = false
infra_image = ""
"""


class EngineError(Exception):
    """A command of the engine failed; the message has its last lines."""


@dataclass(frozen=True)
class Engine:
    """Podman and buildah with a storage of their own.

    Args:
        storage: directory that holds it; kept between sessions, so that layers are cached.
        environment: what podman and buildah need to find it.
    """

    storage: Path
    environment: dict[str, str]

    def run(
        self, *command: object, timeout_s: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program; raises EngineError unless it returned 0 or ``check`` is False."""
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment,
            cwd=REPOSITORY,
        )
        if check and done.returncode:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
            raise EngineError(f"{' '.join(map(str, command[:4]))} …: {done.returncode}: {said}")
        return done

    def podman(
        self, *arguments: object, timeout_s: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run ``podman`` with these arguments."""
        return self.run("podman", *arguments, timeout_s=timeout_s, check=check)

    def inspect(self, what: str, kind: str = "image") -> dict[str, Any]:
        """What podman knows of an image or a container."""
        (found,) = json.loads(self.podman(kind, "inspect", what).stdout)
        return dict(found)

    @contextmanager
    def container(self, image: str, *arguments: object, options: tuple[object, ...] = ()):
        """A container of ``image`` in the background, removed at the end.

        Args:
            image: name of the image.
            arguments: what its entry point gets.
            options: of ``podman run``.

        Yields:
            The :class:`Container`.
        """
        name = f"taut-test-{uuid.uuid4().hex[:12]}"
        self.podman("run", "--detach", "--name", name, *options, image, *arguments)
        try:
            yield Container(self, name)
        finally:
            self.podman("rm", "--force", "--time", "0", "--volumes", name, check=False)

    @contextmanager
    def api_socket(self) -> Iterator[str]:
        """The Docker API on a socket of its own; yields a value for ``DOCKER_HOST``."""
        folder = Path(tempfile.mkdtemp(prefix="taut-podman-"))
        path = folder / "api.sock"
        address = f"unix://{path}"
        with (folder / "log").open("wb") as log:
            service = subprocess.Popen(
                ["podman", "system", "service", "--time=0", address],
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        try:
            wait_for(path.exists, 60, lambda: (folder / "log").read_text())
            yield address
        finally:
            service.terminate()
            service.wait(30)
            shutil.rmtree(folder)


@dataclass(frozen=True)
class Container:
    """A container that was started; it may have ended."""

    engine: Engine
    name: str

    def logs(self) -> str:
        """What it wrote so far, both streams."""
        done = self.engine.podman("logs", self.name, check=False)
        return done.stdout + done.stderr

    def state(self) -> dict[str, Any]:
        """``Running``, ``ExitCode``, ``OOMKilled`` and more."""
        return dict(self.engine.inspect(self.name, "container")["State"])

    def exec(self, *command: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command in it; its exit code is in the result."""
        return self.engine.podman("exec", self.name, *command, timeout_s=timeout_s, check=False)

    def healthcheck(self) -> int:
        """Run the image's health check once, as an engine with timers would."""
        return self.engine.podman("healthcheck", "run", self.name, check=False).returncode

    def stop(self, grace_s: int) -> int:
        """SIGTERM, SIGKILL after ``grace_s``; returns the exit code (137 if it was killed)."""
        self.engine.podman("stop", "--time", grace_s, self.name, timeout_s=grace_s + 60)
        return int(self.state()["ExitCode"])


def wait_for(condition, timeout_s: float, explain=lambda: "") -> None:
    """Wait until ``condition()`` holds; fails the test with ``explain()`` if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:.0f} s: {explain()[-3000:]}")
        time.sleep(0.2)


def _storage() -> Path:
    """Where images lie: ``$TAUT_CONTAINER_STORAGE``, by default in taut's own home."""
    configured = os.environ.get("TAUT_CONTAINER_STORAGE")
    return Path(configured) if configured else TautHome.from_environment().root / "containers"


@functools.cache
def _engine() -> Engine | str:
    """The engine, or why there is none."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here (apt-get install podman buildah runc)"
    if os.geteuid() != 0:
        return "these tests run podman as root, and this is not root"
    root = _storage()
    root.mkdir(parents=True, exist_ok=True)
    (root / "containers.conf").write_text(_CONTAINERS_CONF)
    graph, run = root / "storage", root / "run"
    (root / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{graph}"\nrunroot = "{run}"\n'
    )
    environment = {
        **os.environ,
        "CONTAINERS_CONF": str(root / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(root / "storage.conf"),
    }
    engine = Engine(root, environment)
    info = engine.podman("info", check=False)
    if info.returncode:
        return f"podman does not run here: {info.stderr.strip().splitlines()[-1]}"
    return engine


def engine() -> Engine:
    """The engine of this session; skips the test where none can run."""
    found = _engine()
    if isinstance(found, str):
        pytest.skip(f"NOT RUN, no container engine: {found}")
    return found


def tool(name: str) -> str:
    """A program of ``make container-tools`` or ``make chart-tools``; skips the test without it."""
    found = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if found is None:
        pytest.skip(f"NOT RUN: no {name} here (make container-tools chart-tools)")
    return found
