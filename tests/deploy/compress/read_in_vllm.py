"""Run by test_vllm_reads.py: what stock vLLM makes of a checkpoint's configuration, as JSON.

Usage: ``python read_in_vllm.py schemes CONFIGS`` or ``python read_in_vllm.py cache DIRECTORY``.
"""

import json
import sys


def schemes(configs: dict[str, dict]) -> dict[str, str]:
    """The class that serves ``Linear`` layers of each configuration on a Hopper GPU."""
    import torch
    from vllm.model_executor.layers.quantization.compressed_tensors import (
        compressed_tensors,
        schemes,
    )

    class Linear(torch.nn.Module):
        """What vLLM's targets are matched with."""

    for name in schemes.__all__:  # they would look for kernels of this machine
        getattr(schemes, name).__init__ = lambda self, *rest, **options: None
    config_class = compressed_tensors.CompressedTensorsConfig
    config_class._check_scheme_supported = staticmethod(lambda *rest, **options: True)
    found = {}
    for name, config in configs.items():
        read = config_class.from_config(config)
        found[name] = type(read.get_scheme(Linear(), "model.layers.0.mlp.down_proj")).__name__
    return found


def caches(model) -> dict[str, dict]:
    """Type and scales of every layer's cache."""
    return {
        name: {
            "dtype": module.kv_cache_dtype,
            **{what: getattr(module, f"_{what}_scale").flatten().tolist() for what in "kv"},
        }
        for name, module in model.named_modules()
        if hasattr(module, "kv_cache_dtype")
    }


def cache(directory: str) -> dict:
    """What :func:`caches` sees in an engine that has loaded a checkpoint."""
    import read_in_vllm  # by this name, not as __main__, a worker finds the function, too
    from vllm import LLM

    llm = LLM(directory, enforce_eager=True, max_model_len=64, max_num_seqs=1)
    return llm.apply_model(read_in_vllm.caches)[0]


if __name__ == "__main__":
    result = schemes(json.loads(sys.argv[2])) if sys.argv[1] == "schemes" else cache(sys.argv[2])
    sys.stdout.write("\nREAD " + json.dumps(result) + "\n")
