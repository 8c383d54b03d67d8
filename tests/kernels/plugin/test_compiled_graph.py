"""A second start on a CPU loads the graph that the first one compiled."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from taut_kernels.vllm_plugin import compiled_graph

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SCRIPT = Path(__file__).with_name("serve_tiny_llama.py")
PROMPTS = [[2, 3, 5, 7, 11, 13], [90]]


def test_what_was_compiled_is_loaded_and_answers_the_same(
    make_tiny_llama: Any, run_with_vllm: Any, tmp_path: Path
) -> None:
    model = make_tiny_llama(32, layers=1)  # Inductor and g++ take most of the time
    of_ours = {"VLLM_CACHE_ROOT": str(tmp_path), "VLLM_CPU_CI_ENV": "0", "TAUT_KERNELS": "require"}

    def serve(**environment: str) -> Any:
        words = (str(SCRIPT), str(model), json.dumps(PROMPTS), "compiled")
        return run_with_vllm(*words, env={**of_ours, **environment})

    first, second = (serve(**{compiled_graph.VARIABLE: "1"}) for _ in range(2))
    logs = [done.stdout + done.stderr for done in (first, second)]
    assert [done.returncode for done in (first, second)] == [0, 0], logs[-1][-3000:]
    assert "saved AOT compiled function" in logs[0]
    assert "Directly load AOT compilation" in logs[1]
    assert "Compiling model again" not in logs[1]
    answers = [line for log in logs for line in log.splitlines() if line.startswith("ANSWERS ")]
    assert len(answers) == 2
    assert answers[0] == answers[1], "the same code: not a bit may differ"
    # A directory that holds other machines' graphs, too: vLLM goes on as it would without us.
    stock = serve(VLLM_FORCE_AOT_LOAD="1")
    assert stock.returncode != 0
    assert "no attribute 'finalize_loading'" in stock.stdout + stock.stderr, "is our part needed?"
