"""The face that the command line sees: every name is there, and asking for none imports nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import taut_deploy
from taut_kernels import for_deploy


def _asked_for() -> set[str]:
    """Return what the command line imports from the face."""
    names = set()
    for path in Path(taut_deploy.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "taut_kernels.for_deploy":
                names |= {alias.name for alias in node.names}
    return names


def test_the_face_has_what_the_command_line_asks_for_and_no_more() -> None:
    assert _asked_for() == set(dir(for_deploy))


@pytest.mark.parametrize("name", dir(for_deploy))
def test_every_name_is_there(name: str) -> None:
    assert getattr(for_deploy, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        for_deploy.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_face_imports_no_tensor_library(run_python: Any) -> None:
    code = (
        "import sys, taut_kernels.for_deploy; print({'torch', 'triton', 'vllm'} & {*sys.modules})"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr
