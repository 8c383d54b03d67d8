"""Runs scripts that use vLLM's offline engine, in forks of a process that has imported vLLM.

The script of ``conftest.run_with_vllm``: an import of vLLM takes 8 seconds of a core, an engine of
a tiny model one. A start of its own makes three processes, each with its import. Here the engine
runs in the fork itself; that plugins are found in an engine's own processes is asserted where real
workers start (test_gauges.py, test_cache_warm.py, the end-to-end tests).
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Sequence

import torch

for name in (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "taut_kernels.vllm_plugin.registration",  # it registers nothing by itself
):
    importlib.import_module(name)


def main(arguments: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` would; ``-c CODE`` runs that.

    Nothing is compiled but where ``compiled`` is among the arguments.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if "compiled" not in arguments:
        # Engines are eager, but for a function of log-probabilities: 13 CPU-seconds of g++.
        torch.compiler.set_stance("force_eager")
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    script, *rest = arguments
    sys.argv = [script, *rest]
    if script == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<check>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(script, run_name="__main__")
