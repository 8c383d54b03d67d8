"""On a CPU a model's class is inspected without another process that imports vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

CODE = """
import subprocess
from vllm.plugins import load_general_plugins

def refuse(*_, **__):
    raise AssertionError("another process")

load_general_plugins()
subprocess.run = refuse
from vllm.model_executor.models import registry
for name in ("LlamaForCausalLM", "BertModel"):
    found = registry.ModelRegistry.models[name].inspect_model_cls()
    print(name, found.architecture, found.is_text_generation_model, found.is_pooling_model)
"""


def test_classes_are_inspected_here(run_with_vllm: Any, tmp_path: Path) -> None:
    done = run_with_vllm("-c", CODE, env={"VLLM_CACHE_ROOT": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("Llama", "Bert"))]
    assert lines == [
        "LlamaForCausalLM LlamaForCausalLM True False",
        "BertModel BertEmbeddingModel False True",
    ]
    assert len(list(tmp_path.glob("modelinfos/*.json"))) == 2, "kept for later starts"


def test_a_package_that_only_this_model_wants_is_named_in_one_line() -> None:
    """As LLaVA's class wants torchvision, which is left out where text is served."""
    from taut_kernels.vllm_plugin.model_inspection import inspect_here

    registry = ModuleType("registry")
    registry._run_in_subprocess = None  # type: ignore[attr-defined]
    inspect_here(registry)

    def inspect() -> None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    with pytest.raises(SystemExit, match="imports torchvision, which is not installed") as caught:
        registry._run_in_subprocess(inspect)
    assert "\n" not in str(caught.value)
