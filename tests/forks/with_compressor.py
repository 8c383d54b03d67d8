"""Runs code that compresses models, in forks of a process that has the compressor imported.

The script of ``conftest.run_with_compressor``: that import takes six seconds of a core.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import transformers
from optimum.utils import NormalizedConfigManager
from transformers import conversion_mapping
from transformers.models.llama import modeling_llama

from taut_deploy import cli
from taut_deploy.compress import driver, pipeline

PRELOADED = (
    transformers.AutoModelForCausalLM,
    transformers.AutoTokenizer,
    NormalizedConfigManager,
    cli,
    driver,
    pipeline,
    modeling_llama,
    conversion_mapping.get_checkpoint_conversion_mapping("llama"),  # hundreds of expressions
)
"""What every run would import or compile anew."""


def main(arguments: Sequence[str]) -> None:
    """Run code as ``python -c CODE ARGUMENTS`` would, on one thread."""
    torch.set_num_threads(1)
    code, *rest = arguments
    sys.argv = ["-c", *rest]
    exec(compile(code, "<check>", "exec"), {"__name__": "__main__"})
