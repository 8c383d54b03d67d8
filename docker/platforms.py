"""Platforms that images are built for, and whether this machine runs a platform's programs."""

from __future__ import annotations

import platform
from pathlib import Path

MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
"""Docker's name of a platform → the kernel's, which wheels and QEMU use too."""
ONE_PLATFORM = {"worker-cuda": "linux/amd64"}
"""Images whose pinned base is of one platform."""
_HANDLERS = Path("/proc/sys/fs/binfmt_misc")


class BuildError(Exception):
    """The images cannot be built; one line for the user."""


def is_foreign(name: str) -> bool:
    """Whether programs of platform ``name`` are not this machine's own."""
    return MACHINES[name] != platform.machine()


def require_base(image: str, name: str | None) -> None:
    """Refuse an image for a platform that its pinned base is not of.

    Args:
        image: its name.
        name: of the platform, as Docker spells it; None for this machine's.

    Raises:
        BuildError: naming the platform that the base is of.
    """
    only = ONE_PLATFORM.get(image)
    if only is None or (name == only if name is not None else not is_foreign(only)):
        return
    raise BuildError(
        f"{image}: its pinned base is of {only} alone; give --platform {only},"
        " or --base-image with one of the platform you want"
    )


def require_runnable(name: str, handlers: Path = _HANDLERS) -> None:
    """Refuse a platform whose programs do not run here: a build runs its image's own.

    Args:
        name: as Docker spells it.
        handlers: where the kernel shows which programs run others.

    Raises:
        BuildError: nothing here runs them, or only outside of containers.
    """
    if not is_foreign(name):
        return
    handler = handlers / f"qemu-{MACHINES[name]}"
    said = handler.read_text().splitlines() if handler.is_file() else []
    # F: the kernel opened the emulator when it was registered, so that it is found within an image.
    if "enabled" not in said or not any(
        line.startswith("flags:") and "F" in line.removeprefix("flags:") for line in said
    ):
        raise BuildError(
            f"--platform {name}: this machine runs no {MACHINES[name]} programs:"
            " apt-get install qemu-user-static binfmt-support"
        )
