"""What a worker asks of the plugin: ``TAUT_KERNELS``."""

from __future__ import annotations

import os

MODE_VARIABLE = "TAUT_KERNELS"
MODES = ("prefer", "require", "off")


def requested_mode() -> str:
    """Read ``TAUT_KERNELS``.

    Returns:
        ``prefer``, ``require`` or ``off``; ``prefer`` where it is unset or empty.

    Raises:
        ValueError: any other value.
    """
    mode = os.environ.get(MODE_VARIABLE) or "prefer"
    if mode not in MODES:
        raise ValueError(f"{MODE_VARIABLE} must be one of {', '.join(MODES)}, got {mode!r}")
    return mode
