"""The gateway's image for arm64, built and run by emulation where this is another machine.

That takes many minutes, so it is not part of CI: ``make test-arm`` runs it, as root on Debian
with ``qemu-user-static`` and ``binfmt-support``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from built_images import build_module, foreign_image
from container_engine import engine
from gateway_container import Gateway, gateway
from http_calls import call, stream

PLATFORM = "linux/arm64"
COMPLETION = {"model": "m", "prompt": "hello", "max_tokens": 8}
pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        os.environ.get("TAUT_TEST_ARM64") != "1",
        reason="NOT RUN, no image for arm64: emulation takes many minutes (make test-arm)",
    ),
]


@pytest.fixture(scope="module")
def built() -> str:
    compiled = os.environ.get("TAUT_COMPILE") == "1"
    return foreign_image("gateway", PLATFORM, compiled=compiled)


@pytest.fixture(scope="module")
def served(built: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(built, folder, ready_within_s=600) as running:
        yield running


def test_image_and_its_programs_are_of_arm64(built: str, served: Gateway):
    assert engine().inspect(built)["Architecture"] == "arm64"
    assert served.container.exec("uname", "-m").stdout == "aarch64\n"


def test_it_answers_whole_and_streamed(served: Gateway):
    assert call(served.port, "GET", "/health/live")[0] == 200
    status, body = call(served.port, "POST", "/v1/completions", COMPLETION)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, " tok" * 4)
    events = list(stream(served.port, "/v1/completions", COMPLETION))
    assert len(events) >= 5 and events[-1] == b"[DONE]"


def test_it_runs_without_rights(served: Gateway):
    assert served.container.exec("id").stdout.startswith("uid=10001(taut) gid=10001(taut)")
    assert served.container.exec("taut-healthcheck", "ready").returncode == 0
    refused = served.container.exec("touch", "/opt/taut/x")
    assert "Read-only file system" in refused.stderr


def test_hot_path_is_what_the_build_says(served: Gateway):
    wanted = "compiled" if os.environ.get("TAUT_COMPILE") == "1" else "python"
    status, body = call(served.port, "GET", "/version")
    assert (status, json.loads(body)["build"]) == (200, wanted)


def test_its_debian_packages_are_those_of_arm64(built: str, monkeypatch: pytest.MonkeyPatch):
    for variable in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"):
        monkeypatch.setenv(variable, engine().environment[variable])
    build = build_module()
    listed = build.debian_packages("gateway", build.Options("buildah", platform=PLATFORM))
    assert any(each.startswith("tini=0.") for each in listed)


def test_stopped_it_ends_with_0(built: str, tmp_path: Path):
    with gateway(built, tmp_path, ready_within_s=600) as running:
        assert running.container.stop(60) == 0, running.container.logs()
