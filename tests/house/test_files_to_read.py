"""A kernel is read in few files: the one of W4A16 that wins most rows, in five."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "kernels"
W4A16 = "taut_kernels.gemm.w4a16"
LAUNCHER, TILE = (f"{W4A16}.tma", "product"), (f"{W4A16}.ring_tile", "WgmmaRingTile")
"""Of the kernel of most rows; the launcher names the kernel."""
LEFT_OUT = ("taut_kernels.launch",)
"""What all launchers share."""
MOST = 5

Name = tuple[str, str]
"""A module, and what it defines."""


class _Unannotated(ast.NodeTransformer):
    """Takes annotations away: to read what runs, nobody looks those types up."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node


class Module:
    """What one module defines, and what its names stand for.

    Args:
        root: folder of the packages.
        name: dotted.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.definitions = name, dict[str, ast.stmt]()
        self.imported = dict[str, tuple[str, str | None]]()
        source = (root / name.replace(".", "/")).with_suffix(".py").read_text("utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for part in ast.walk(node):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        self.definitions[part.id] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                self._import(root, node)

    def _import(self, root: Path, node: ast.ImportFrom) -> None:
        assert node.module is not None
        if not (root / node.module.split(".")[0]).is_dir():
            return  # another library
        for one in node.names:
            whole = f"{node.module}.{one.name}"
            is_module = (root / whole.replace(".", "/")).with_suffix(".py").is_file()
            found = (whole, None) if is_module else (node.module, one.name)
            self.imported[one.asname or one.name] = found

    def uses(self, name: str) -> Iterator[Name]:
        """Yield what a definition names, annotations left out."""
        for part in ast.walk(_Unannotated().visit(self.definitions[name])):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                module, found = self.imported.get(part.value.id, ("", ""))
                if found is None:
                    yield module, part.attr
            elif isinstance(part, ast.Name) and part.id in self.definitions:
                yield self.name, part.id
            elif isinstance(part, ast.Name):
                module, found = self.imported.get(part.id, ("", None))
                if found is not None:
                    yield module, found


def files_reached(root: Path, *roots: Name) -> set[str]:
    """Return the modules whose functions, classes and constants what is named leads to.

    Args:
        root: folder of the packages.
        roots: where reading begins.
    """
    modules = cache(lambda name: Module(root, name))
    seen, left = set[Name](), list(roots)
    while left:
        one = left.pop()
        if one not in seen and not one[0].startswith(LEFT_OUT):
            seen.add(one)
            left += modules(one[0]).uses(one[1])
    return {module for module, _ in seen}


def test_definitions_lead_to_files(tmp_path: Path) -> None:
    sources = {
        "kernel": """
            from torch import nn
            from taut_kernels import sizes
            from taut_kernels.launch import run
            from taut_kernels.steps import step as first, other
            from taut_kernels.types import Shape
            def kernel(shape: Shape) -> Shape:
                return run(first(shape), sizes.WIDTH, nn)
            def unread():
                return other()
        """,
        "steps": """
            from taut_kernels.deep import DEPTH
            from taut_kernels.aside import aside
            def step(shape):
                return DEPTH
            def other():
                return aside
        """,
        "sizes": "WIDTH = 4",
        "deep": "DEPTH = 2",
        "aside": "def aside(): ...",
        "types": "Shape = int",
        "launch": "def run(): ...",
    }
    package = tmp_path / "taut_kernels"
    package.mkdir()
    for name, source in sources.items():
        lines = [line.removeprefix(" " * 12) for line in source.splitlines()]
        (package / f"{name}.py").write_text("\n".join(lines))
    found = files_reached(tmp_path, ("taut_kernels.kernel", "kernel"))
    assert found == {f"taut_kernels.{name}" for name in ("kernel", "steps", "sizes", "deep")}


def test_the_main_kernel_of_w4a16_is_read_in_five_files() -> None:
    tables = [json.loads(file.read_text()) for file in (ROOT / "taut_kernels/tiles").glob("*.json")]
    rows = [row for one in tables for row in one["tables"].get("w4a16_wgmma", {"rows": []})["rows"]]
    (kernel, count), *_ = Counter(row["kernel"] for row in rows).most_common()
    assert kernel == "tma" and count > len(rows) / 2
    found = files_reached(ROOT, LAUNCHER, TILE)
    assert f"{W4A16}.tma_kernel" in found
    assert len(found) <= MOST, sorted(found)
