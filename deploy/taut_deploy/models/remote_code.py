"""Python files that come with a model: run only where the user says so, after they are shown.

A configuration may name classes in ``.py`` files beside it (``auto_map``). transformers asks on
standard input whether to run them, so every load says yes or no itself; the answer is yes only for
directories that :func:`trust` was called for, which the command line does for
``--trust-remote-code``.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taut_deploy.documents import read_json
from taut_deploy.errors import ModelError
from taut_deploy.files import sha256_file

_CONFIGURATIONS = ("config.json", "tokenizer_config.json")
# Keys whose value may name a repository of compiled kernels on the hub, which is code as well.
_KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")
_trusted: set[str] = set()


def trust(directory: Path) -> dict[str, str]:
    """Let the code of one model directory run in this process.

    Args:
        directory: of the model.

    Returns:
        The sha256 of each ``.py`` file below it, by relative path.

    Raises:
        ModelError: the code named lies in another repository, is not there, or is a link.
    """
    files = code_files(directory)
    for path in files:
        if path.is_symlink():
            raise ModelError(f"{path}: a link; code that is to run lies in the directory itself")
    for file, reference in _references(directory):
        if "--" in reference:
            raise ModelError(
                f"{directory / file}: auto_map: {reference[:80]!r} is code of another repository, "
                "which is never run; put its files into the directory"
            )
        module = directory / (reference.rpartition(".")[0].replace(".", "/") + ".py")
        if module not in files:
            raise ModelError(
                f"{module}: {file} names it in auto_map, and it is not here (the model store keeps "
                "no code); download the repository yourself and give its directory"
            )
    _trusted.add(_key(directory))
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in files}


def is_trusted(directory: Path) -> bool:
    """Whether the user lets this directory's code run."""
    return _key(directory) in _trusted


def distrust_all() -> None:
    """Forget every :func:`trust`."""
    _trusted.clear()


def code_files(directory: Path) -> list[Path]:
    """The ``.py`` files below a model directory, in a stable order."""
    return sorted(path for path in directory.rglob("*.py") if path.is_file())


def require_no_code(directory: Path) -> None:
    """Check that a model can be loaded without running code of its own, or that it may.

    Raises:
        ModelError: naming file and field, and the flag.
    """
    config = _read(directory / "config.json")
    for key in _KERNEL_KEYS:
        value = config.get(key)
        if value is not None and "/" in str(value):
            raise ModelError(
                f"{directory / 'config.json'}: {key} is {str(value)[:80]!r}, kernels from the hub, "
                "which are never run; remove the key"
            )
    if is_trusted(directory):
        return
    for file, needed in (
        ("config.json", _needs_model_code(config)),
        ("tokenizer_config.json", _needs_tokenizer_code(_read(directory / _CONFIGURATIONS[1]))),
    ):
        if needed is not None:
            raise ModelError(
                f"{directory / file}: auto_map: {needed[:80]!r} is code that comes with the model "
                "and is not run; read it, then add --trust-remote-code to 'taut compress', "
                "'taut model inspect' or 'taut validate'"
            )


def _needs_model_code(config: dict[str, Any]) -> str | None:
    """The reference that transformers could not do without; None if it has classes of its own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(config.get("model_type"))
    named = config.get("auto_map")
    if not isinstance(named, dict):
        return None
    for auto_class, known in (
        ("AutoConfig", CONFIG_MAPPING_NAMES),
        ("AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ):
        if auto_class in named and model_type not in known:
            return str(named[auto_class])
    return None


def _needs_tokenizer_code(config: dict[str, Any]) -> str | None:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    named = config.get("auto_map")
    if isinstance(named, dict):
        named = named.get("AutoTokenizer")
    if not named:
        return None
    name = str(config.get("tokenizer_class"))
    known = tokenizer_class_from_name(name) or tokenizer_class_from_name(name + "Fast")
    return None if known is not None else str(named)


def _references(directory: Path) -> Iterator[tuple[str, str]]:
    """Every class that the configurations name, with the file that names it."""
    for file in _CONFIGURATIONS:
        named = _read(directory / file).get("auto_map")
        values = list(named.values()) if isinstance(named, dict) else [named]
        for value in values:
            for reference in value if isinstance(value, list | tuple) else [value]:
                if reference is not None:
                    yield file, str(reference)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = read_json(path, ModelError)
    return found if isinstance(found, dict) else {}


def _key(directory: Path) -> str:
    return os.path.realpath(directory)
