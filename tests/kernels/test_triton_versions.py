"""Kernels are written in what the oldest Triton that serves compiles, 3.6, too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels" / "taut_kernels"


def constexprs_in_loops(source: str) -> list[str]:
    """Return what declares a constexpr in a loop: Triton 3.6 takes the next turn's for a second."""
    return [
        f"{statement.lineno}: {ast.unparse(statement)}"
        for loop in ast.walk(ast.parse(source))
        if isinstance(loop, ast.For | ast.While)
        for statement in ast.walk(loop)
        if isinstance(statement, ast.AnnAssign) and "constexpr" in ast.unparse(statement.annotation)
    ]


def test_finds_a_constexpr_of_a_loop() -> None:
    source = "a: tl.constexpr = 1\nfor r in tl.static_range(2):\n    b: tl.constexpr = r\n"
    assert constexprs_in_loops(source) == ["3: b: tl.constexpr = r"]


@pytest.mark.parametrize(
    "file", sorted(KERNELS.rglob("*.py")), ids=lambda file: str(file.relative_to(KERNELS))
)
def test_no_loop_declares_a_constexpr(file: Path) -> None:
    assert not constexprs_in_loops(file.read_text())
