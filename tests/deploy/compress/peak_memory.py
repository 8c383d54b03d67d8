"""Compress a model and print the most memory the process held, before and in all, bytes.

Usage: ``python peak_memory.py MODEL RECIPE OUTPUT``. A process of its own: a peak is its process's.
``anonymous`` memory is what no file backs: pages of a mapped shard go whenever others are needed.
"""

import json
import re
import resource
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def peak() -> int:
    # Linux counts KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def anonymous() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


class Watch:
    """Looks at anonymous memory every few milliseconds, since the kernel keeps no peak of it."""

    def __init__(self) -> None:
        self.most = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.004):
            self.most = max(self.most, anonymous())

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most


if __name__ == "__main__":
    import torch
    import transformers
    import yaml
    from tiny_models import job_for

    from taut_deploy.compress import driver

    torch.set_num_threads(1)
    transformers.LlamaForCausalLM.__name__  # noqa: B018 - imports the family
    before, unused = peak(), anonymous()
    watch = Watch()
    model, recipe, output = map(Path, sys.argv[1:])
    try:
        driver.compress(job_for(model, yaml.safe_load(recipe.read_text()), output))
    finally:
        watch.end()
    found = {"before": before, "peak": peak(), "unused": unused, "anonymous": watch.end()}
    sys.stdout.write(json.dumps(found))
