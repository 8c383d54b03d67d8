"""Which lines of jit functions a form compiles: their branches walked with its constants.

A statement counts as reached where its constants lead to it or may: what is not known before a
launch takes both branches. So a line that no form reaches is compiled for none of them.
"""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction, JITFunction

from tuning.jit_values import RUNTIME, UNKNOWN, apply, known, plain, same

_MOST_TURNS = 64
"""Of an unrolled loop that are walked."""
_BUILTINS: tuple[Any, ...] = (len, min, max, abs, int, float, bool, range, str, tuple)


@cache
def tree_of(function: JITFunction[Any]) -> ast.FunctionDef:
    """Parse a jit function; lines are those of its file."""
    tree = ast.parse(textwrap.dedent("".join(function.raw_src)))
    ast.increment_lineno(tree, function.starting_line_number - 1)
    found = tree.body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def statements(function: JITFunction[Any]) -> dict[int, int]:
    """Return the first line of every statement of a jit function, and how many lines it has.

    A branch or loop has those of its head alone; docstrings are left out.
    """
    found = {}
    for node in ast.walk(tree_of(function)):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        found[node.lineno] = max(1, last - node.lineno + 1)
    return found


@dataclass(slots=True)
class Paths:
    """What the forms walked so far reach.

    Attributes:
        reached: jit function → first lines of its statements.
    """

    reached: dict[JITFunction[Any], set[int]] = field(default_factory=lambda: defaultdict(set))
    _results: dict[Any, Any] = field(default_factory=dict)

    def walk(self, kernel: JITFunction[Any], constants: Mapping[str, Any]) -> None:
        """Add what one form of a kernel reaches; the other arguments count as given.

        Args:
            kernel: the jit function.
            constants: argument name → value fixed at compile time, None for an absent tensor.
        """
        named = {name: constants.get(name, RUNTIME) for name in kernel.arg_names}
        self._call(kernel, named)

    def _call(self, function: JITFunction[Any], named: dict[str, Any]) -> Any:
        key: Any = (function, tuple((name, repr(value)) for name, value in named.items()))
        if key not in self._results:
            self._results[key] = UNKNOWN  # of a function that calls itself
            walker = _Walker(self, function, named)
            self._results[key] = walker.result()
        return self._results[key]

    def bound(self, function: JITFunction[Any], given: tuple[Any, ...], named: Any) -> Any:
        """Call a jit function from another one; return its value as far as it is known."""
        values = {
            name: plain(parameter.default)
            for name, parameter in function.signature.parameters.items()
        }
        values |= dict(zip(function.arg_names, given, strict=False)) | named
        return self._call(function, values)


class _Walker:
    """Walks the body of one jit function with what is known of its arguments."""

    def __init__(self, paths: Paths, function: JITFunction[Any], named: dict[str, Any]) -> None:
        self._paths, self._function = paths, function
        self._names = dict(named)
        self._scope = function.get_capture_scope()
        self._reached = paths.reached[function]
        self._returned: list[Any] = []

    def result(self) -> Any:
        self._block(tree_of(self._function).body)
        if not self._returned:
            return None
        first = self._returned[0]
        return first if len(self._returned) == 1 else UNKNOWN

    def _block(self, body: list[ast.stmt]) -> bool:
        """Walk statements; say whether what follows them is reached."""
        for node in body:
            self._reached.add(node.lineno)
            if isinstance(node, ast.Return):
                self._returned.append(None if node.value is None else self.value(node.value))
                return False
            if isinstance(node, ast.If):
                if not self._branch(node):
                    return False
            elif isinstance(node, ast.For | ast.While):
                self._loop(node)
            else:
                self._simple(node)
        return True

    def _simple(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self._assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            old = self.value(ast.copy_location(_read(node.target), node))
            self._assign(node.target, apply(node.op, old, self.value(node.value)))
        elif isinstance(node, ast.Expr):
            self.value(node.value)

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, ast.Tuple):
            fits = isinstance(value, tuple) and len(value) == len(target.elts)
            parts = value if fits else (UNKNOWN,) * len(target.elts)
            for one, part in zip(target.elts, parts, strict=True):
                self._assign(one, part)

    def _branch(self, node: ast.If) -> bool:
        # What a module's own name decides is the version of Triton's, not a form's.
        of_module = isinstance(node.test, ast.Name) and node.test.id not in self._names
        test = UNKNOWN if of_module else self.value(node.test)
        if known(test):
            return self._block(node.body if test else node.orelse)
        before = dict(self._names)
        first = self._block(node.body)
        after, self._names = self._names, before
        second = self._block(node.orelse)
        if first and second:
            self._names = {
                name: value
                for name, value in self._names.items()
                if name in after and same(value, after[name])
            } | {
                name: UNKNOWN
                for name in self._names.keys() | after.keys()
                if not same(self._names.get(name), after.get(name))
            }
        elif first:
            self._names = after
        return first or second

    def _loop(self, node: ast.For | ast.While) -> None:
        turns = self._turns(node)
        if turns is not None:
            assert isinstance(node, ast.For)
            for turn in turns:
                self._assign(node.target, turn)
                if not self._block(node.body):
                    return
            return
        self._forget(node)
        self._block(node.body)
        self._forget(node)

    def _turns(self, node: ast.For | ast.While) -> range | None:
        """Return the turns of an unrolled loop, None of any other."""
        if isinstance(node, ast.While):
            self.value(node.test)
            return None
        call = node.iter
        unrolled = isinstance(call, ast.Call) and "static_range" in ast.unparse(call.func)
        given = [self.value(one) for one in call.args] if isinstance(call, ast.Call) else []
        if not unrolled or not known(*given):
            return None
        return range(*given)[:_MOST_TURNS]

    def _forget(self, node: ast.For | ast.While) -> None:
        """Take what a loop assigns for unknown."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                self._names[inner.id] = UNKNOWN

    def value(self, node: ast.expr) -> Any:
        """Return what an expression is, walking the jit functions it calls."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._named(node.id)
            case ast.Attribute():
                base = self.value(node.value)
                found = getattr(base, node.attr, UNKNOWN) if known(base) else UNKNOWN
                return plain(found)
            case ast.Tuple() | ast.List():
                return self._elements(node.elts)
            case ast.Subscript():
                return self._item(node)
            case _:
                return self._computed(node)

    def _computed(self, node: ast.expr) -> Any:
        match node:
            case ast.BinOp():
                return apply(node.op, self.value(node.left), self.value(node.right))
            case ast.UnaryOp():
                return apply(node.op, self.value(node.operand))
            case ast.BoolOp():
                return self._any_or_all(node)
            case ast.Compare():
                return self._compared(node)
            case ast.IfExp():
                test = self.value(node.test)
                if known(test):
                    return self.value(node.body if test else node.orelse)
                self.value(node.body), self.value(node.orelse)
                return UNKNOWN
            case ast.Call():
                return self._called(node)
        return UNKNOWN

    def _handed_on(self, given: Any) -> None:
        """Walk jit functions that a call takes: alone, or each in a pair with its arguments."""
        if isinstance(given, JITFunction):
            self._paths.bound(given, (UNKNOWN,) * len(given.arg_names), {})
        elif isinstance(given, tuple):
            match given:
                case (JITFunction() as function, tuple() as arguments):
                    self._paths.bound(function, arguments, {})
                case _:
                    for one in given:
                        self._handed_on(one)

    def _named(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        return plain(self._scope.get(name, getattr(builtins, name, UNKNOWN)))

    def _elements(self, nodes: list[ast.expr]) -> Any:
        found: tuple[Any, ...] = ()
        for node in nodes:
            inner = node.value if isinstance(node, ast.Starred) else node
            value = self.value(inner)
            if inner is node:
                found += (value,)
            elif isinstance(value, tuple):
                found += value
            else:
                return UNKNOWN
        return found

    def _item(self, node: ast.Subscript) -> Any:
        base: Any = self.value(node.value)
        index: Any = UNKNOWN
        if isinstance(node.slice, ast.Slice):
            ends = (node.slice.lower, node.slice.upper, node.slice.step)
            cuts = [None if end is None else self.value(end) for end in ends]
            index = slice(*cuts) if known(*cuts) else UNKNOWN
        else:
            index = self.value(node.slice)
        held = isinstance(base, tuple | list | dict) and known(index)
        try:
            return base[index] if held else UNKNOWN
        except LookupError:  # in a branch that may not be taken
            return UNKNOWN

    def _any_or_all(self, node: ast.BoolOp) -> Any:
        ends = isinstance(node.op, ast.Or)
        value: Any = not ends
        every_known = True
        for part in node.values:
            value = self.value(part)
            if known(value) and bool(value) == ends:
                return value
            every_known = every_known and known(value)
        return value if every_known else UNKNOWN

    def _compared(self, node: ast.Compare) -> Any:
        left, result = self.value(node.left), True
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node)
            step = apply(op, left, right)
            if isinstance(op, ast.Is | ast.IsNot) and RUNTIME in (left, right):
                step = isinstance(op, ast.IsNot)
            if not known(step):
                return UNKNOWN
            result, left = result and bool(step), right
        return result

    def _called(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        given = self._elements(node.args)
        named = {one.arg: self.value(one.value) for one in node.keywords if one.arg is not None}
        if isinstance(function, JITFunction):
            return self._paths.bound(function, given if isinstance(given, tuple) else (), named)
        self._handed_on((given, *named.values()))
        if function is len and isinstance(given, tuple) and isinstance(given[0], tuple):
            return len(given[0])
        if not known(given, *named.values()):
            return UNKNOWN
        if function is constexpr:
            return plain(given[0])
        if isinstance(function, ConstexprFunction):
            return plain(function.fn(*given, **named))
        return function(*given) if function in _BUILTINS else UNKNOWN


def _read(target: ast.expr) -> ast.expr:
    return ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else target
