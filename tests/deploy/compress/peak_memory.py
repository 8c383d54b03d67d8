"""Compress a model and print the most memory the process held: before, in all, and block by block.

Usage: ``python peak_memory.py MODEL RECIPE OUTPUT [FIRST]``. A process of its own: a peak is its
process's. Bytes. ``held`` is the anonymous memory when a block begins, ``peaks`` the most until the
next. ``FIRST`` is a recipe that is run before, so that what a first compression leaves behind for
good, modules and buffers, is of what the process held before; the heap's holes do not count then.
"""

import ctypes
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROCESS = Path("/proc/self")


def memory(name: str) -> int:
    """An entry of the process's status: ``VmHWM``, the peak since it was reset, or ``RssAnon``."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", (PROCESS / "status").read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * 1024


def map_what_is_large() -> None:
    """Have glibc map each megabyte apart from its heap, whose holes would count although freed.

    So bounded processes are told by their environment (``taut_deploy.bench.large_checkpoint``).
    """
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20) == 1


def begin_anew() -> None:
    """Let the peak be what is held now."""
    (PROCESS / "clear_refs").write_text("5")


class Blocks:
    """What was held as each block began, and the peak of each.

    Attributes:
        held: anonymous memory.
        peaks: the first is of what precedes the blocks.
    """

    def __init__(self) -> None:
        self.held: list[int] = []
        self.peaks: list[int] = []

    def told(self, done: int, total: int, what: str) -> None:
        """Take the progress of a compression."""
        if what.startswith("compressing"):
            self.held.append(memory("RssAnon"))
        if what.startswith(("compressing", "writing")):
            self.peaks.append(memory("VmHWM"))
            begin_anew()


if __name__ == "__main__":
    import torch
    import transformers
    import yaml
    from tiny_models import job_for

    from taut_deploy.compress import driver
    from taut_deploy.compress.free_memory import return_freed_memory

    torch.set_num_threads(1)
    transformers.LlamaForCausalLM.__name__  # noqa: B018 - imports the family
    model, recipe, output, *first = map(Path, sys.argv[1:])
    for one in first:
        map_what_is_large()
        data = yaml.safe_load(one.read_text())
        driver.compress(job_for(model, data, output.with_name(f"{output.name}-first")))
        return_freed_memory()
        begin_anew()
    before = memory("VmHWM")
    blocks = Blocks()
    driver.compress(job_for(model, yaml.safe_load(recipe.read_text()), output), blocks.told)
    said = {"before": before, "peak": max(*blocks.peaks, memory("VmHWM"))}
    said |= {"held": blocks.held, "peaks": blocks.peaks[1:]}
    sys.stdout.write(json.dumps(said))
