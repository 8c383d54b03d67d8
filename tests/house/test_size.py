"""Functions, parameter lists and modules stay as short as a reader can hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "deploy/taut_deploy",
    "service/taut_service",
    "kernels/taut_kernels",
    "kernels/taut_bench",
    "kernels/tuning",
)
OPS = ("activation", "attention", "gemm", "loss", "norm", "primitives", "rope", "softmax")
"""Folders of ops. The dispatcher takes flat arguments: an op's functions have those of its schema,
and its public function offers them by name."""

W4A16 = ("gemm", "w4a16")

LINES, LINES_OF_A_KERNEL = 60, 120
PARAMETERS, PARAMETERS_OF_AN_OP, PARAMETERS_OF_A_KERNEL = 12, 16, 30
PARAMETERS_OF_W4A16 = 20
"""Of the kernels that are read most often."""
MODULE, MODULE_WITH_KERNELS = 350, 400

Function = ast.FunctionDef | ast.AsyncFunctionDef
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def is_kernel(function: Function) -> bool:
    """Say whether Triton compiles a function."""
    return any(
        ast.unparse(decorator).split("(")[0].endswith(".jit")
        for decorator in function.decorator_list
    )


def parameters(function: Function) -> int:
    """Count parameters, without ``self``; the strides of one tensor (``stride_qt``) are one."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    if is_kernel(function):
        names = list({name[:-1] if name.startswith("stride_") else name for name in names})
    return len(names) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def too_large(
    source: str, in_an_op: bool, most_of_a_kernel: int = PARAMETERS_OF_A_KERNEL
) -> Iterator[str]:
    """Name what is above its bar in a module's source."""
    kernels = False
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Function):
            continue
        kernel = is_kernel(node)
        kernels |= kernel
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        most_lines, most = LINES, PARAMETERS_OF_AN_OP if in_an_op else PARAMETERS
        if kernel:
            most_lines, most = LINES_OF_A_KERNEL, most_of_a_kernel
        if lines > most_lines:
            yield f"{node.name}: {lines} lines, at most {most_lines}"
        if parameters(node) > most:
            yield f"{node.name}: {parameters(node)} parameters, at most {most}"
    lines, most_lines = len(source.splitlines()), MODULE_WITH_KERNELS if kernels else MODULE
    if lines > most_lines:
        yield f"{lines} lines, at most {most_lines}"


def test_no_module_is_larger_than_a_reader_can_hold() -> None:
    found = []
    for file in FILES:
        path = file.relative_to(ROOT)
        in_an_op = path.parts[1] == "taut_kernels" and path.parts[2] in OPS
        most = PARAMETERS_OF_W4A16 if path.parts[2:4] == W4A16 else PARAMETERS_OF_A_KERNEL
        source = file.read_text("utf-8")
        found += [f"{path}: {what}" for what in too_large(source, in_an_op, most)]
    assert not found, "\n".join(found)


def _function(lines: int, arguments: str, decorator: str = "") -> str:
    body = "    pass\n" * (lines - 1)
    return f"{decorator}def f({arguments}):\n{body}"


def _names(count: int) -> str:
    return ", ".join(f"a{i}" for i in range(count))


@pytest.mark.parametrize(
    ("source", "in_an_op", "expected"),
    [
        (_function(60, _names(12)), False, []),
        (_function(61, ""), False, ["f: 61 lines, at most 60"]),
        (_function(2, _names(13)), False, ["f: 13 parameters, at most 12"]),
        (_function(2, _names(12) + ", **rest"), False, ["f: 13 parameters, at most 12"]),
        (_function(2, _names(16)), True, []),
        (_function(2, _names(17)), True, ["f: 17 parameters, at most 16"]),
        (_function(120, _names(30), "@triton.jit\n"), False, []),
        (_function(121, "", "@gluon.jit(x=1)\n"), False, ["f: 121 lines, at most 120"]),
        (
            _function(2, _names(29) + ", stride_xm, stride_xn", "@triton.jit\n"),
            False,
            [],
        ),
        (
            _function(2, _names(30) + ", stride_xm", "@triton.jit\n"),
            False,
            ["f: 31 parameters, at most 30"],
        ),
        ("x = 1\n" * 351, False, ["351 lines, at most 350"]),
        (_function(2, "", "@triton.jit\n") + "x = 1\n" * 398, False, ["401 lines, at most 400"]),
    ],
)
def test_bars(source: str, in_an_op: bool, expected: list[str]) -> None:
    assert list(too_large(source, in_an_op)) == expected
