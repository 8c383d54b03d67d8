"""What vLLM loads through the ``vllm.general_plugins`` entry point ``taut``.

Importing this package imports neither vLLM nor torch, so that loading the entry point cannot fail:
vLLM only logs a failed load, and the worker would serve without our kernels. :func:`register` does
the work, and raises where it cannot.

``TAUT_KERNELS`` says what a worker asks for:

- ``prefer`` (default): our kernels where they are the faster ones, vLLM's own for the rest; the
  reasons are recorded and logged once
- ``require``: the load fails unless every W4A16 layer, and at least one layer, runs on our kernels
- ``off``: nothing is registered, for A/B runs
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from taut_kernels.launch import measured_here
from taut_kernels.vllm_plugin.mode import MODE_VARIABLE, MODES, requested_mode

__all__ = ["MODES", "MODE_VARIABLE", "cache_key", "register", "requested_mode"]
_SOURCE_SUFFIXES = {".py", ".cpp", ".json"}


def cache_key(verdicts: Path | None = None) -> str:
    """Identify what our part of a compiled graph depends on.

    vLLM's compile cache knows nothing about plugins: the launcher passes this key with
    ``--additional-config '{"taut": "<key>"}'``, which enters vLLM's hash.

    Args:
        verdicts: file of this machine's verdicts that a worker is to read.

    Returns:
        The mode and 16 hex digits over the sources and tables of `taut_kernels` and over the
        verdicts of this machine, which decide whose kernels a graph calls; for example
        ``prefer-0123456789abcdef``.

    Raises:
        ValueError: ``TAUT_KERNELS`` holds an unknown mode, or ``verdicts`` is damaged.
    """
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in _SOURCE_SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    if verdicts is not None:
        digest.update(json.dumps(measured_here.read(verdicts).tables, sort_keys=True).encode())
    return f"{requested_mode()}-{digest.hexdigest()[:16]}"


def register() -> None:
    """Put our kernels in front of vLLM's.

    vLLM calls this in each of its processes; calling it again changes nothing.

    Raises:
        ValueError: ``TAUT_KERNELS`` holds an unknown mode.
        ImportError: this vLLM lacks something the plugin builds on.
        IncompatibleVllmError: likewise, but found by a check of our own.
    """
    mode = requested_mode()
    if mode == "off":
        return
    from taut_kernels.vllm_plugin import registration

    registration.install(mode)
