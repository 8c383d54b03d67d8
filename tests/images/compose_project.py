"""A compose project that really runs, on podman's API instead of Docker's, under a name of its own.

What podman 4.3 lacks: without systemd nothing asks for health by itself, so a test asks; and it
gives names of networks where compose expects ids, so compose would make every container anew.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from compose_files import COMPOSE, ROOT
from container_engine import Engine


@dataclass(frozen=True)
class Project:
    """One project: what compose is told, and what the engine knows of it.

    Args:
        engine: where it runs.
        name: the project's name; no other project of this machine has it.
        override: compose file on top of the repository's.
        environment: of compose.
        port: of the gateway on this machine.
    """

    engine: Engine
    name: str
    override: Path
    environment: dict[str, str]
    port: int

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start ``docker compose`` with these arguments; its output is in one pipe."""
        assert COMPOSE is not None
        # Images that the tests have built are used as they are.
        own = "docker/compose/own-images.yaml"
        files = ["-f", "compose.yaml", "-f", own, "-f", str(self.override)]
        return subprocess.Popen(
            [COMPOSE, "--progress", "plain", "-p", self.name, *files, *arguments],
            cwd=ROOT,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def compose(
        self, *arguments: str, timeout_s: float = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``docker compose`` to its end; the exit code is in the result."""
        with self.start(*arguments, **variables) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                output += f"\n(killed after {timeout_s:g} s)"
        return subprocess.CompletedProcess(arguments, process.returncode, output)

    def containers(self) -> dict[str, str]:
        """Ids of the project's containers, by service."""
        listed = self.engine.podman(
            *("ps", "--all", "--filter", f"label=com.docker.compose.project={self.name}"),
            *("--format", "json"),
        )
        return {
            entry["Labels"]["com.docker.compose.service"]: entry["Id"]
            for entry in json.loads(listed.stdout or "null") or ()
        }

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container."""
        return self.engine.inspect(self.containers()[service], "container")

    def state(self, service: str) -> dict[str, Any]:
        """``Running``, ``ExitCode``, ``Pid`` and more."""
        found: dict[str, Any] = self.inspect(service)["State"]
        return found

    def python(self, service: str, code: str) -> str:
        """What a Python program prints inside a service's container.

        Raises:
            EngineError: it did not return 0.
        """
        return self.engine.podman("exec", self.containers()[service], "python3", "-c", code).stdout

    def logs(self) -> str:
        """The end of every container's output."""
        return self.compose("logs", "--no-color", "--tail", "15", timeout_s=60).stdout

    def leftovers(self) -> dict[str, str]:
        """What the engine still has of this project."""
        names = {
            "containers": ("ps", "--all", "--format", "{{.Names}}"),
            "volumes": ("volume", "ls", "--format", "{{.Name}}"),
            "networks": ("network", "ls", "--format", "{{.Name}}"),
        }
        found = {}
        for what, command in names.items():
            lines = self.engine.podman(*command).stdout.splitlines()
            if mine := [line for line in lines if self.name in line]:
                found[what] = " ".join(mine)
        return found

    def readiness(self) -> int:
        """Status of the gateway's readiness; 0 if it does not answer."""
        return self.get("/health/ready")[0]

    def get(self, path: str) -> tuple[int, bytes]:
        """GET from the gateway; status 0 if it does not answer."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=10
            ) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except (OSError, http.client.HTTPException):
            return 0, b""

    def post(self, body: dict[str, Any], timeout_s: float = 120) -> tuple[int, dict[str, Any]]:
        """A completion from the gateway; status 0 if it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            with self._asked(connection, body) as answer:
                return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            return 0, {"error": str(error)}
        finally:
            connection.close()

    @contextmanager
    def stream(
        self, body: dict[str, Any], timeout_s: float = 120
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed completion; ends at ``[DONE]``, and fails if it never comes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            with self._asked(connection, {**body, "stream": True}) as answer:
                assert answer.status == 200, answer.read()
                yield _events(answer)
        finally:
            connection.close()

    def _asked(
        self, connection: http.client.HTTPConnection, body: dict[str, Any]
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection.getresponse()


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")


@contextmanager
def project(
    engine: Engine, folder: Path, port: int, override: dict[str, Any], variables: dict[str, str]
) -> Iterator[Project]:
    """A project with a name of its own; whatever happens, nothing of it is left behind.

    Args:
        engine: where it runs.
        folder: for the override and a home without the user's Docker settings.
        port: a free port for the gateway.
        override: compose file on top of the repository's.
        variables: of compose.
    """
    path = folder / "override.yaml"
    path.write_text(yaml.safe_dump(override))
    with engine.api_socket() as address:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "DOCKER_HOST": address,
            # The engine has no BuildKit.
            "DOCKER_BUILDKIT": "0",
            "TAUT_PORT": str(port),
            **variables,
        }
        mine = Project(engine, f"taut-{uuid.uuid4().hex[:8]}", path, environment, port)
        try:
            yield mine
        finally:
            mine.compose(
                *("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "0")
            )
            for identifier in mine.containers().values():
                engine.podman("rm", "--force", "--time", "0", identifier, check=False)
