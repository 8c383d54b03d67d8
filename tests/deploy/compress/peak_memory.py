"""Compress a model and print the most memory the process held, bytes.

Usage: ``python peak_memory.py MODEL TEXT OUTPUT``. A process of its own: a peak is its process's.
"""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    import torch
    from tiny_models import job_for, recipe_data

    from taut_deploy.compress import driver

    torch.set_num_threads(1)
    model, text, output = map(Path, sys.argv[1:])
    recipe = recipe_data(text, scheme="FP8", group_size=None, algorithm="rtn")
    driver.compress(job_for(model, recipe, output))
    # Linux counts KiB.
    sys.stdout.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
