"""Runs code that loads models, in forks of a process that has torch and transformers imported.

The script of ``conftest.run_with_transformers``: that import takes some five seconds of a
core. Nothing of ours is imported, so that code can judge what its own imports do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import transformers
from transformers.models.llama import modeling_llama

IMPORTED = (
    transformers.AutoModelForCausalLM,
    transformers.AutoTokenizer,
    modeling_llama.LlamaForCausalLM,
)


def main(arguments: Sequence[str]) -> None:
    """Run code as ``python -c CODE ARGUMENTS`` would, on one thread."""
    torch.set_num_threads(1)
    code, *rest = arguments
    sys.argv = ["-c", *rest]
    exec(compile(code, "<check>", "exec"), {"__name__": "__main__"})
