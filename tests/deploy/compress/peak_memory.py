"""Compress a model and print the most memory the process held, before and in all, bytes.

Usage: ``python peak_memory.py MODEL RECIPE OUTPUT``. A process of its own: a peak is its process's.
"""

import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def peak() -> int:
    # Linux counts KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    import torch
    import transformers
    import yaml
    from tiny_models import job_for

    from taut_deploy.compress import driver

    torch.set_num_threads(1)
    transformers.LlamaForCausalLM.__name__  # noqa: B018 - imports the family
    before = peak()
    model, recipe, output = map(Path, sys.argv[1:])
    driver.compress(job_for(model, yaml.safe_load(recipe.read_text()), output))
    sys.stdout.write(json.dumps({"before": before, "peak": peak()}))
