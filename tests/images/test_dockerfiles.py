"""What can be said of the Dockerfiles and of the build context without building."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from built_images import build_module
from container_engine import REPOSITORY, engine, tool

DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))
# A plain name: which registry it comes from is the engine's setting, and no host is named here.
BY_DIGEST = re.compile(r"[\w-]+(/[\w-]+)?:[\w.-]+@sha256:[0-9a-f]{64}$")


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_every_image_has_its_file():
    built = {f"{image}.Dockerfile" for image in build_module().LOCKS}
    assert set(names(DOCKERFILES)) == built


@pytest.mark.parametrize("path", DOCKERFILES, ids=names(DOCKERFILES))
def test_hadolint_finds_nothing(path: Path):
    done = subprocess.run([tool("hadolint"), path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=names(DOCKERFILES))
def test_bases_are_pinned_by_digest(path: Path):
    text = path.read_text()
    defaults = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", text, re.MULTILINE))
    assert defaults and all(BY_DIGEST.match(value) for value in defaults.values()), defaults
    stages = re.findall(r"^FROM .* AS (\w+)$", text, re.MULTILINE)
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    assert bases - {"scratch", *stages} == {f"${{{name}}}" for name in defaults}


@pytest.mark.parametrize("path", DOCKERFILES, ids=names(DOCKERFILES))
def test_trivy_finds_no_high_misconfiguration(path: Path):
    command = [tool("trivy"), "config", "--quiet", "--skip-check-update", "--format", "json", path]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    (result,) = report["Results"]
    assert result["MisconfSummary"]["Successes"] > 20  # it did read the file
    found = [(each["ID"], each["Severity"]) for each in result.get("Misconfigurations", ())]
    # trivy does not put an ARG's value into FROM; the digest is checked above.
    assert set(found) <= {("DS001", "MEDIUM")}


def test_context_holds_the_sources_and_nothing_else():
    here, name = engine(), "localhost/taut/context"
    script = "FROM scratch\nCOPY . /\n"
    command = ["buildah", "bud", "--isolation", "chroot", "--tag", name, "--file", "-", REPOSITORY]
    done = subprocess.run(
        command, input=script, text=True, capture_output=True, env=here.environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    try:
        container = here.run("buildah", "from", name).stdout.strip()
        root = Path(here.run("buildah", "mount", container).stdout.strip())
        files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
        size = sum((root / path).stat().st_size for path in files)
        here.run("buildah", "rm", container)
    finally:
        here.podman("rmi", "--force", name, check=False)
    assert {path.parts[0] for path in files} == {
        *("pyproject.toml", "README.md", "LICENSE"),
        *("requirements", "docker", "kernels", "service", "deploy"),
    }
    packages = {
        path.parts[1] for path in files if path.parts[0] in ("kernels", "service", "deploy")
    }
    assert packages == {
        *("taut_kernels", "taut_bench", "taut_service", "taut_deploy"),
        # What a wheel with a compiled gateway is made by.
        *("compile.py", "hatch_build.py"),
    }
    assert not [path for path in files if "__pycache__" in path.parts or path.name.startswith(".")]
    assert size < 20e6
