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


def _typed(node: ast.AST) -> list[ast.expr]:
    """Return the parts of an expression whose type Triton 3.6 asks for."""
    if isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load):
        return [element for element in node.elts if not isinstance(element, ast.Call)]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("static_range"):
        return node.args
    return []


def untyped_fields(source: str) -> list[str]:
    """Return fields of constexpr arguments in tuples and turns: to Triton 3.6 they have no type.

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
            for element in _typed(node)
            for part in ast.walk(element)
            if isinstance(part, ast.Attribute)
            and isinstance(part.value, ast.Name)
            and part.value.id in constant
        ]
    return found


def test_finds_fields_without_a_type() -> None:
    source = """
def f(x, A: tl.constexpr):
    for i in tl.static_range(A.b):
        x += i
    return g((A.c * 2, x.d, h(A.e)), A.f)
"""
    assert untyped_fields(source) == ["3: A.b", "5: A.c"]


def test_finds_a_constexpr_of_a_loop() -> None:
    source = "a: tl.constexpr = 1\nfor r in tl.static_range(2):\n    b: tl.constexpr = r\n"
    assert constexprs_in_loops(source) == ["3: b: tl.constexpr = r"]


@pytest.mark.parametrize(
    "file", sorted(KERNELS.rglob("*.py")), ids=lambda file: str(file.relative_to(KERNELS))
)
def test_triton_3_6_compiles_what_is_written(file: Path) -> None:
    assert not constexprs_in_loops(file.read_text())
    assert not untyped_fields(file.read_text())
