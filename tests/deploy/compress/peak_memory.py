"""Compress a model and print the most memory the process held: before, in all, and block by block.

Usage: ``python peak_memory.py MODEL RECIPE OUTPUT``. A process of its own: a peak is its process's.
Bytes. ``held`` is the anonymous memory when a block begins, ``peaks`` the most until the next.
"""

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
            (PROCESS / "clear_refs").write_text("5")  # the peak begins anew


if __name__ == "__main__":
    import torch
    import transformers
    import yaml
    from tiny_models import job_for

    from taut_deploy.compress import driver

    torch.set_num_threads(1)
    transformers.LlamaForCausalLM.__name__  # noqa: B018 - imports the family
    before = memory("VmHWM")
    model, recipe, output = map(Path, sys.argv[1:])
    blocks = Blocks()
    driver.compress(job_for(model, yaml.safe_load(recipe.read_text()), output), blocks.told)
    said = {"before": before, "peak": max(*blocks.peaks, memory("VmHWM"))}
    said |= {"held": blocks.held, "peaks": blocks.peaks[1:]}
    sys.stdout.write(json.dumps(said))
