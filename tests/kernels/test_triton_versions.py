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


def fields_in_tuples(source: str) -> list[str]:
    """Return fields of constexpr arguments that stand in a tuple: to Triton 3.6 they have no type.

    A constexpr of the field's value is one that has.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        constant = {
            argument.arg
            for argument in function.args.args
            if argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
        }
        found += [
            f"{part.lineno}: {ast.unparse(part)}"
            for node in ast.walk(function)
            if isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load)
            for element in node.elts
            if not isinstance(element, ast.Call)
            for part in ast.walk(element)
            if isinstance(part, ast.Attribute)
            and isinstance(part.value, ast.Name)
            and part.value.id in constant
        ]
    return found


def test_finds_a_field_in_a_tuple() -> None:
    source = "def f(x, A: tl.constexpr):\n    return g((A.b * 2, x.c, h(A.d)), A.e)\n"
    assert fields_in_tuples(source) == ["2: A.b"]


def test_finds_a_constexpr_of_a_loop() -> None:
    source = "a: tl.constexpr = 1\nfor r in tl.static_range(2):\n    b: tl.constexpr = r\n"
    assert constexprs_in_loops(source) == ["3: b: tl.constexpr = r"]


@pytest.mark.parametrize(
    "file", sorted(KERNELS.rglob("*.py")), ids=lambda file: str(file.relative_to(KERNELS))
)
def test_triton_3_6_compiles_what_is_written(file: Path) -> None:
    assert not constexprs_in_loops(file.read_text())
    assert not fields_in_tuples(file.read_text())
