"""One block compressed as the run would, its save included: what time and memory the run takes."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from taut_deploy.compress.source.decoder import DecoderBlock

Arguments = TypeVar("Arguments")

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Trial:
    """What was measured on the first of the largest blocks.

    Args:
        seconds: predicted of the whole run.
        peak_memory_bytes: most of the machine's memory the process held; the run's blocks repeat
            what this one took.
        device_memory_bytes: likewise of the card that held most, None without one.
    """

    seconds: float
    peak_memory_bytes: int
    device_memory_bytes: int | None


def try_block(
    blocks: Sequence[DecoderBlock],
    enter: Callable[[], Arguments],
    compress: Callable[[DecoderBlock, Arguments], object],
    finish: Callable[[], object],
) -> Trial:
    """Go through a run's steps with one block.

    Args:
        blocks: of the model, not loaded.
        enter: everything before the blocks; returns what ``compress`` needs.
        compress: loads, compresses and saves a block.
        finish: writes everything after the blocks.
    """
    _forget_peak()
    sizes = {block.index: _weights(block) for block in blocks}
    block = max(blocks, key=lambda one: sizes[one.index])
    started = time.monotonic()
    arguments = enter()
    entered = time.monotonic()
    compress(block, arguments)
    compressed = time.monotonic()
    finish()
    around = entered - started + time.monotonic() - compressed
    times = sum(sizes.values()) / max(1, sizes[block.index])
    return Trial(
        round(around + (compressed - entered) * times, 1),
        peak_memory_bytes(),
        _card_peak() if _uses_card() else None,
    )


def _weights(block: DecoderBlock) -> int:
    return sum(parameter.numel() for parameter in block.module.parameters())


def _uses_card() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _forget_peak() -> None:
    """Let the peak begin at what is held now, where Linux allows."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if _uses_card():
        for card in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(card)


def _card_peak() -> int:
    """The most memory held on a card, of the one that held most."""
    return max(torch.cuda.max_memory_allocated(card) for card in range(torch.cuda.device_count()))


def peak_memory_bytes() -> int:
    """The most memory this process held at a time."""
    if _STATUS.is_file():
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        if found:
            return int(found[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
