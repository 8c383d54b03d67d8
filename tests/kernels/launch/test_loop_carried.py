"""No name that follows another through a kernel's loop starts as that one: it would not change.

Triton finds what a loop carries by comparing values before and after its body. After ``before =
slot`` a loop that ends ``before, slot = slot, following`` leaves `before` as it found it, so Triton
carries it not and every iteration sees the first value (Triton 3.6 and 3.9, Gluon or not;
kernels/README.md, "Measured facts"). On NumPy the same body is right.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import taut_kernels

FILES = sorted(
    path
    for pattern in ("*_jit.py", "*kernel.py")
    for path in Path(taut_kernels.__file__).parent.rglob(pattern)
)


def _assigned(nodes: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each name that statements assign, with what it is given if that is one expression."""
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    yield from _pairs(target, inner.value)
            elif isinstance(inner, ast.AugAssign) and isinstance(inner.target, ast.Name):
                yield inner.target.id, None


def _is_read_before(name: str, given: ast.expr, nodes: list[ast.stmt]) -> bool:
    """Say whether statements read a name above the line on which it is given this."""
    return any(
        inner.id == name and isinstance(inner.ctx, ast.Load) and inner.lineno < given.lineno
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name)
    )


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
        for name, given in zip(target.elts, values, strict=True):
            if isinstance(name, ast.Name):
                yield name.id, given


def _blocks(source: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield each run of statements of a function, a loop or a branch, with the function's name."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                for part in ("body", "orelse"):
                    statements = getattr(node, part, [])
                    if isinstance(statements, list):
                        yield function.name, statements


def not_carried(source: str) -> list[str]:
    """Return the names a loop gives another's value and that begin as it: ``function: name``."""
    found = []
    for function, statements in _blocks(source):
        before: dict[str, ast.expr | None] = {}
        for statement in statements:
            if isinstance(statement, ast.For | ast.While):
                for name, given in _assigned(statement.body):
                    start = before.get(name)
                    if not isinstance(start, ast.Name) or not isinstance(given, ast.Name):
                        continue
                    if start.id == given.id and _is_read_before(name, given, statement.body):
                        found.append(f"{function}: {name}")
            before.update(_assigned([statement]))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_name_is_carried(path: Path) -> None:
    assert not_carried(path.read_text(encoding="utf-8")) == []


def test_the_pattern_is_found() -> None:
    loop = "    for k in range(n):\n        use(before)\n        before, slot = slot, slot + 1\n"
    assert not_carried("def f(slot, n):\n    before = slot\n" + loop) == ["f: before"]
    inside = "".join("    " + line + "\n" for line in ("    before = slot\n" + loop).splitlines())
    assert not_carried("def f(slot, n):\n    for _ in x:\n" + inside) == ["f: before"]
    assert not_carried("def f(slot, n):\n    other, before = 0, slot\n" + loop) == ["f: before"]
    assert not_carried("def f(slot, n):\n    before = slot - 1\n" + loop) == []
    late = (
        "    for k in range(n):\n        now = ahead\n        ahead = load(k)\n        use(now)\n"
    )
    assert not_carried("def f(ahead, n):\n    now = ahead\n" + late) == []
    even_odd = "    for k in range(n):\n        even += k\n        odd = odd + k\n"
    assert not_carried("def f(even, n):\n    odd = even\n" + even_odd) == []
    assert not_carried("def f(first, n):\n    before, slot = first, first + 1\n" + loop) == []
