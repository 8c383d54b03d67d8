"""Images for another machine: what is asked of the engine and of pip, and what is refused."""

from __future__ import annotations

import platform
from pathlib import Path
from types import ModuleType

import pytest
from built_images import build_module, wheels_module

OTHER = "linux/arm64" if platform.machine() == "x86_64" else "linux/amd64"
ARCHITECTURE = OTHER.partition("/")[2]
HASH = "    --hash=sha256:00\n"


@pytest.fixture
def build() -> ModuleType:
    return build_module()


@pytest.mark.parametrize("engine", ["docker", "buildah"])
def test_platform_is_told_to_the_engine_and_is_in_the_tag(build: ModuleType, engine: str):
    command = build.build_command("gateway", build.Options(engine, platform=OTHER))
    assert command[command.index("--platform") + 1] == OTHER
    assert command[command.index("--tag") + 1].endswith(
        f":{build.project_version()}-{ARCHITECTURE}"
    )
    plain = build.build_command("gateway", build.Options(engine))
    assert "--platform" not in plain
    assert plain[plain.index("--tag") + 1] == f"taut/gateway:{build.project_version()}"


def test_lists_of_packages_are_kept_apart(build: ModuleType, tmp_path: Path):
    (tmp_path / "taut-gateway.debian.txt").write_text("a=1\n")
    with pytest.raises(build.BuildError, match=rf"has no taut-gateway-{ARCHITECTURE}\.debian"):
        build.compare_packages("gateway", ["a=1"], tmp_path, OTHER)


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("enabled\ninterpreter /usr/bin/qemu\nflags: PF\noffset 0\n", True),
        ("enabled\ninterpreter /usr/bin/qemu\nflags: P\noffset 0\n", False),  # not within an image
        ("disabled\ninterpreter /usr/bin/qemu\nflags: PF\n", False),
        (None, False),
    ],
)
def test_platform_that_cannot_run_here_is_refused_before_a_build(
    build: ModuleType, tmp_path: Path, text: str | None, runs: bool
):
    machine = build.MACHINES[OTHER]
    if text is not None:
        (tmp_path / f"qemu-{machine}").write_text(text)
    if runs:
        build.require_runnable(OTHER, tmp_path)
        return
    with pytest.raises(build.BuildError, match=f"--platform {OTHER}: .* no {machine} programs"):
        build.require_runnable(OTHER, tmp_path)


@pytest.mark.parametrize(
    ("image", "name", "refused"),
    [
        ("worker-cuda", "linux/arm64", True),
        ("worker-cuda", "linux/amd64", False),
        ("worker-cuda", None, platform.machine() != "x86_64"),
        ("worker-cpu", "linux/arm64", False),
    ],
)
def test_image_whose_base_is_of_one_platform_is_refused_for_another(
    build: ModuleType, image: str, name: str | None, refused: bool
):
    if not refused:
        build.require_base(image, name)
        return
    with pytest.raises(build.BuildError, match=r"worker-cuda: .* of linux/amd64 alone"):
        build.require_base(image, name)


def test_own_platform_needs_no_emulation(build: ModuleType, tmp_path: Path):
    (own,) = (name for name, machine in build.MACHINES.items() if machine == platform.machine())
    build.require_runnable(own, tmp_path)
    assert build.tag_of("gateway", own) == build.tag_of("gateway")


def test_pins_of_other_machines_are_left_out():
    wheels = wheels_module()
    text = f'# a; b\na==1 \\\n{HASH}b==2 ; platform_machine == "x86_64" \\\n{HASH}c==3 \\\n{HASH}'
    assert wheels.pins_of(text, "aarch64") == f"# a; b\na==1 \\\n{HASH}c==3 \\\n{HASH}"
    taken = wheels.pins_of(text, "x86_64")
    assert "b==2 \\\n" in taken and "platform_machine" not in taken
    with pytest.raises(wheels.BuildError, match=r"a==1 .*marker"):
        wheels.pins_of(f'a==1 ; python_version < "4" \\\n{HASH}', "aarch64")


def test_wheels_of_another_machine_are_asked_for_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wheels = wheels_module()
    asked: list[list[str]] = []

    class Done:
        returncode = 0

    def run(command: list[str], **_: object) -> Done:
        asked.append(command)
        return Done()

    monkeypatch.setattr(wheels.subprocess, "run", run)
    machine = build_module().MACHINES[OTHER]
    wheels.download_wheels(["gateway"], tmp_path, platform=OTHER)
    wheels.download_wheels(["gateway"], tmp_path, platform=OTHER)
    wheels.download_wheels(["gateway"], tmp_path)
    named, own = asked  # the second call found the folder full
    assert f"manylinux_2_28_{machine}" in named and "3.11" in named
    assert "--platform" not in own
