"""Python files that come with a model: run only where the user says so, after they are named.

A configuration may name classes in ``.py`` files beside it (``auto_map``). transformers asks on
standard input whether to run them, so every load says yes or no by itself; no unless the command
line has ``--trust-remote-code``.
"""

from collections.abc import Iterator
from pathlib import Path

from taut_deploy.documents import read_json
from taut_deploy.errors import ModelError
from taut_deploy.files import sha256_file

FLAG = "--trust-remote-code"
_CONFIGURATIONS = ("config.json", "tokenizer_config.json")


def describe_code(directory: Path) -> list[str]:
    """One line for each Python file of a model that may run, with its sha256.

    Any of them may: those that a configuration names import others.

    Raises:
        ModelError: a configuration names code of another repository, or a file that is not there,
            or a file is a link.
    """
    for file, reference in _references(directory):
        if "--" in reference:
            raise ModelError(
                f"{directory / file}: auto_map: {reference[:80]!r} is code of another repository, "
                "which is never run; put its files into the directory and name them"
            )
        module = _module(reference)
        if not (directory / module).is_file():
            raise ModelError(
                f"{directory / file}: auto_map names {reference[:80]!r}, but the directory "
                f"has no file {module} there; download the model again"
            )
    return [
        f"{FLAG}: may run {path.relative_to(directory).as_posix()} sha256:{sha256_file(path)}"
        for path in code_files(directory)
    ]


def code_files(directory: Path) -> list[Path]:
    """The Python files below a model's directory, in a stable order.

    Raises:
        ModelError: one is a link out of it.
    """
    files = sorted(path for path in directory.rglob("*.py") if path.is_file())
    for path in files:
        if path.is_symlink() and not path.resolve().is_relative_to(directory.resolve()):
            raise ModelError(f"{path}: a link out of the directory; put the file itself there")
    return files


def why_code_is_needed(directory: Path) -> str | None:
    """The line that says which code a model needs and how to let it run; None if it names none."""
    for file in _CONFIGURATIONS:
        named = sorted({_module(name) for origin, name in _references(directory) if origin == file})
        if named:
            return (
                f"{directory / file}: auto_map names Python code of the model's own "
                f"({', '.join(named)[:200]}), which is not run; read it, then add {FLAG}"
            )
    return None


def _module(reference: str) -> str:
    """``package/module.py`` for ``package.module.Class``."""
    return reference.rpartition(".")[0].replace(".", "/") + ".py"


def _references(directory: Path) -> Iterator[tuple[str, str]]:
    """Each class that a configuration names, behind the name of the configuration."""
    for file in _CONFIGURATIONS:
        path = directory / file
        found = read_json(path, ModelError) if path.is_file() else {}
        named = found.get("auto_map") if isinstance(found, dict) else None
        values = named.values() if isinstance(named, dict) else [named]
        for value in values:
            for reference in value if isinstance(value, list) else [value]:
                if reference is not None:
                    yield file, str(reference)
