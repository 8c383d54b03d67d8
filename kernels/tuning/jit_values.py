"""Values of a jit function's names as far as they are known before a launch."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from triton.language import constexpr


class Unknown:
    """A value that no constant determines."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()
RUNTIME = Unknown()
"""An argument of a launch: not known, and never None."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}  # fmt: skip


def known(*values: Any) -> bool:
    """Say whether values and what tuples hold are known."""
    return all(
        known(*value) if isinstance(value, tuple) else not isinstance(value, Unknown)
        for value in values
    )


def plain(value: Any) -> Any:
    """Return what Triton wraps as a constant."""
    return value.value if isinstance(value, constexpr) else value


def same(one: Any, other: Any) -> bool:
    """Say whether two values are known to be equal."""
    return one is other or (known(one, other) and type(one) is type(other) and one == other)


def apply(op: ast.AST, *values: Any) -> Any:
    """Return what an operator makes of values; unknown where one of them is."""
    joined = isinstance(op, ast.Add) and all(isinstance(value, tuple) for value in values)
    if not joined and not known(*values):
        return UNKNOWN
    return _OPERATORS[type(op)](*values)
