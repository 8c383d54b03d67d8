"""The gateway's image: hardened, small, answering, draining."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from built_images import base_image, build_module, image
from container_engine import engine, wait_for
from gateway_container import HARDENED, Gateway, gateway
from http_calls import call, stream
from mock_worker import Faults

pytestmark = pytest.mark.timeout(1800)  # the first test builds
MIB = 1 << 20
COMPLETION = {"model": "m", "prompt": "hello", "max_tokens": 8}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(image("gateway"), tmp_path_factory.mktemp("gateway")) as running:
        yield running


def test_gateway_answers_whole_and_streamed(served: Gateway):
    status, body = call(served.port, "POST", "/v1/completions", COMPLETION)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, " tok" * 4)
    events = list(stream(served.port, "/v1/completions", COMPLETION))
    assert len(events) >= 5 and events[-1] == b"[DONE]"


def test_the_hot_path_is_compiled_and_says_so(served: Gateway):
    status, body = call(served.port, "GET", "/version")
    assert (status, json.loads(body)["build"]) == (200, "compiled")
    assert "hot path: compiled" in served.container.logs()
    look = "from taut_service import call; from taut_service.http import sse; "
    look += "print(call.__file__, sse.__file__)"
    files = served.container.exec("/opt/taut/bin/python", "-c", look).stdout.split()
    assert len(files) == 2 and all(file.endswith(".so") for file in files), files


def test_gateway_runs_without_rights_and_without_a_writable_root(served: Gateway):
    assert served.container.exec("id").stdout.startswith("uid=10001(taut) gid=10001(taut)")
    status = served.container.exec("cat", "/proc/1/status").stdout.split("\n")
    facts = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
    assert facts["NoNewPrivs"].strip() == "1"
    refused = served.container.exec("touch", "/opt/taut/x", "/etc/taut/x", "/x")
    assert refused.stderr.count("Read-only file system") == 3
    assert served.container.exec("touch", "/tmp/x").returncode == 0
    host = engine().inspect(served.container.name, "container")["HostConfig"]
    assert host["Memory"] == 256 * MIB and host["PidsLimit"] == 64


def test_health_check_is_one_word_and_tells_a_gateway_that_hangs(served: Gateway):
    health = engine().inspect(image("gateway"))["Healthcheck"]
    assert health["Test"] == ["CMD", "taut-healthcheck"]
    assert served.container.healthcheck() == 0
    assert served.container.exec("taut-healthcheck", "ready").returncode == 0
    signal = "import os, sys; os.kill(int(sys.argv[1]), int(sys.argv[2]))"
    (child,) = served.container.exec("cat", "/proc/1/task/1/children").stdout.split()
    served.container.exec("python3", "-c", signal, child, 19)  # SIGSTOP
    try:
        assert served.container.healthcheck() == 1
    finally:
        served.container.exec("python3", "-c", signal, child, 18)
    wait_for(lambda: served.container.healthcheck() == 0, 30, served.container.logs)


def test_stopped_gateway_finishes_a_stream_and_ends_with_0(tmp_path: Path):
    with gateway(image("gateway"), tmp_path, Faults(interval_s=0.1, tokens=40)) as running:
        events = stream(running.port, "/v1/completions", COMPLETION)
        first = next(events)
        engine().podman("kill", "--signal", "TERM", running.container.name)
        wait_for(lambda: running.readiness() != 200, 20, running.container.logs)
        rest = list(events)
        assert b"tok" in first and len(rest) == 40 and rest[-1] == b"[DONE]"
        wait_for(lambda: not running.container.state()["Running"], 40, running.container.logs)
        assert running.container.state()["ExitCode"] == 0


def test_gateway_stopped_in_its_first_moment_ends_at_once(tmp_path: Path):
    path = tmp_path / "gateway.yaml"
    path.write_text("models: [{name: m, max_model_len: 64, workers: []}]\n")
    mount = ("-v", f"{path}:/etc/taut/gateway.yaml:ro")
    with engine().container(image("gateway"), options=(*HARDENED, *mount)) as container:
        assert container.stop(30) != 137, container.logs()


def test_gateway_names_what_is_wrong_with_its_file(tmp_path: Path):
    path = tmp_path / "gateway.yaml"
    path.write_text("modles: []\n")
    done = engine().podman(
        *("run", "--rm", *HARDENED, "-v", f"{path}:/etc/taut/gateway.yaml:ro"),
        image("gateway"),
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("taut-gateway:")]
    assert done.returncode == 2 and any("modles" in line for line in said)
    assert "Traceback" not in done.stderr


def test_gateway_adds_less_than_150_mb_to_its_base():
    size = {name: engine().inspect(name)["Size"] for name in (image("gateway"), base_image())}
    assert size[image("gateway")] - size[base_image()] < 150e6


def test_image_says_what_it_is():
    found = engine().inspect(image("gateway"))
    labels = found["Labels"]
    version = build_module().project_version()
    assert labels["org.opencontainers.image.version"] == version
    assert labels["org.opencontainers.image.title"] == "taut gateway"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == base_image()
    assert len(labels["org.opencontainers.image.revision"]) == 40
    assert found["Config"]["User"] == "10001:10001"
    assert "PYTHONSAFEPATH=1" in found["Config"]["Env"]


def test_gateway_holds_neither_pip_nor_a_compiler_nor_a_tensor_library(served: Gateway):
    look = "import importlib.util as u, shutil as s, sys; print([n for n in sys.argv[1].split() if "
    look += "u.find_spec(n)] + [n for n in sys.argv[2].split() if s.which(n)])"
    names = (
        "pip torch triton vllm transformers numpy",
        "pip pip3 gcc g++ cc ld make curl wget git",
    )
    done = served.container.exec("/opt/taut/bin/python", "-c", look, *names)
    assert done.stdout.strip() == "[]", done.stderr


def test_pip_settings_of_a_build_stay_out_of_its_layers(tmp_path: Path):
    secret = "password-that-only-the-build-may-see"
    path, archive = tmp_path / "pip.conf", tmp_path / "image.tar"
    path.write_text(f"[global]\nno-index = true\nuser-agent-user-data = {secret}\n")
    build, here, name = build_module(), engine(), "localhost/taut/built-with-a-secret"
    image("gateway")  # fills the wheels
    wheels = here.storage / "wheels"
    options = build.Options("buildah", base_image(), wheels, pip_conf=path, compiled=False)
    command = build.build_command("gateway", options)
    # One stage is enough: every step gets the settings in the same way.
    command[command.index("--layers")] = "--no-cache"
    command[command.index("--tag") + 1] = name
    command[-1:-1] = ["--target", "taut"]
    try:
        here.run(*command, timeout_s=900)
        here.podman("save", "--output", archive, name, timeout_s=300)
    finally:
        here.podman("rmi", "--force", name, check=False)
    with tarfile.open(archive) as saved:
        kept = [saved.extractfile(member) for member in saved if member.isfile()]
        assert len(kept) > 4
        assert not any(secret.encode() in file.read() for file in kept if file is not None)


@pytest.mark.parametrize("name", ["gateway", "worker-cpu", "toolbox"])
def test_images_keep_no_settings_of_the_build(name: str):
    done = engine().podman(
        *("run", "--rm", "--user", "0", "--entrypoint", "sh", image(name), "-c"),
        "ls /etc/pip.conf /wheelhouse /run/secrets /src /root/.cache /root/.config /tmp/tools",
        check=False,
    )
    assert done.stderr.count("No such file or directory") == 7, done.stdout
