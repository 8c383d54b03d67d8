"""The graph pass that puts a quantisation into what is in front of it, or replaces it alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("fuse_graph.py")


@pytest.mark.parametrize(
    ("check", "count"),
    [
        ("fuses_norms", 4),
        ("fuses_a_static_scale", 1),
        ("fuses_activations", 2),
        ("keeps_the_callers_residual", 1),
        ("replaces_quantisations_with_nothing_to_fuse", 12),
        ("replaces_for_every_number_of_tokens", 1),
        ("leaves_quantisations_that_ours_cannot_do", 6),
        ("leaves_a_norm_that_is_read_twice", 1),
        ("leaves_a_partial_variance", 1),
        ("leaves_an_asymmetric_quantisation", 1),
    ],
)
def test_pass(check: str, count: int, run_checks: Any) -> None:
    process = run_checks(SCRIPT, check)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == [check, str(count)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on CPU needs g++")
def test_inductor_compiles_the_fused_graph(run_checks: Any) -> None:
    process = run_checks(SCRIPT, "inductor_compiles_the_fused_graph")
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == ["inductor_compiles_the_fused_graph", "1"]


def test_vllm_finds_the_pass_by_name() -> None:
    """vLLM resolves ``a.b`` as attribute ``b`` of ``__import__("a")``."""
    from taut_kernels.vllm_plugin.fused_ops import PASS

    module, _, name = PASS.rpartition(".")
    assert callable(__import__(module).__dict__[name])
