"""A process with all its descendants, and what they take."""

import contextlib

import psutil


def members(root: psutil.Process) -> list[psutil.Process]:
    """Return a process and its descendants; none if it has ended."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(root: psutil.Process) -> float:
    """Return user and system time of a process and its descendants, those that ended included."""
    total = 0.0
    for member in members(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(member.cpu_times()[:4])
    return total
