"""The CUDA caching allocator's own record of a step: every block with the stack that asked for it.

The file is what PyTorch's memory viewer opens; what stands here reads the peak out of it, by line
of the user's code. Format: ``torch.cuda.memory._snapshot()``, documented in PyTorch's
"Understanding CUDA Memory Usage" and in ``torch/cuda/memory.py``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.subject import Subject

_MAX_ENTRIES = 1_000_000
_LIBRARIES = ("/torch/", "/taut_bench/instruments/")


@dataclass(frozen=True, slots=True)
class SnapshotPeak:
    """The peak in an allocator record.

    Attributes:
        size: bytes allocated during the record and live at its peak.
        by_line: ``file:line in function`` → bytes at the peak, the most first.
        segments: bytes the allocator had reserved from the driver at the end.
        cut: the record began later than the step: its buffer was too small.
    """

    size: int
    by_line: dict[str, int]
    segments: int
    cut: bool


def record(subject: Subject, path: Path) -> SnapshotPeak:
    """Record one step of a subject and write the allocator's snapshot.

    Args:
        subject: on a CUDA device; run once before.
        path: pickle to write, for PyTorch's memory viewer.

    Raises:
        InstrumentError: no CUDA device, or the file cannot be written.
    """
    if subject.device.type != "cuda":
        raise InstrumentError(
            f"--snapshot: the allocator snapshot needs a CUDA device, not {subject.device}"
        )
    subject.step()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_ENTRIES)
    try:
        subject.step()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InstrumentError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    index = torch.cuda.current_device() if subject.device.index is None else subject.device.index
    return peak_of(snapshot, index)


def peak_of(snapshot: dict[str, Any], device: int = 0) -> SnapshotPeak:
    """Replay the record of one device up to its peak.

    Args:
        snapshot: as `torch.cuda.memory._snapshot` returns it.
        device: index of the device.
    """
    live: dict[int, dict[str, Any]] = {}
    at_peak: list[dict[str, Any]] = []
    level = peak = 0
    entries = snapshot["device_traces"][device]
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            level += entry["size"]
            if level > peak:
                peak, at_peak = level, list(live.values())
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            level -= live.pop(entry["addr"])["size"]
    by_line: dict[str, int] = defaultdict(int)
    for entry in at_peak:
        by_line[_line_of(entry.get("frames", ()))] += entry["size"]
    ordered = dict(sorted(by_line.items(), key=lambda item: -item[1]))
    segments = sum(
        segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device
    )
    return SnapshotPeak(peak, ordered, segments, len(entries) >= _MAX_ENTRIES)


def _line_of(frames: Any) -> str:
    """The innermost frame outside torch and the instruments; the innermost at all without one."""
    for frame in frames:
        name = frame["filename"]
        if name.endswith(".py") and not any(part in name for part in _LIBRARIES):
            return f"{name}:{frame['line']} in {frame['name']}"
    if frames:
        return f"{frames[0]['filename']}:{frames[0]['line']} in {frames[0]['name']}"
    return "no stack"
