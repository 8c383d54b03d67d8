"""From a YAML file to :class:`Settings`, or to one line a mistake."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from taut_service.config.settings.root import Settings


class SettingsError(Exception):
    """The configuration file cannot be used; ``str()`` is one line a mistake."""


_MAX_BYTES = 16 * 1024 * 1024
_MAX_DEPTH = 64
_MAX_DIGITS = 64
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, and leaves dates as text.

    Depth, the length of numbers and aliases inside their own anchor are looked at while nodes are
    made: what recurses into them comes later.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._finished: set[int] = set()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if self._depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"nested deeper than {_MAX_DEPTH} levels", mark
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent) and id(node) not in self._finished:
            raise yaml.composer.ComposerError(
                None, None, "an alias stands inside its own anchor", mark
            )
        self._finished.add(id(node))
        long = isinstance(node, yaml.ScalarNode) and len(node.value) > _MAX_DIGITS
        if node is not None and long and node.tag in _NUMBERS:
            raise yaml.composer.ComposerError(
                None, None, f"a number of {len(node.value)} characters", mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_settings(path: Path) -> Settings:
    """Read and check the configuration.

    Args:
        path: the YAML file.

    Returns:
        The frozen settings.

    Raises:
        SettingsError: the file cannot be read, is not YAML, or breaks a rule; one line a mistake.
    """
    document = parse_yaml(path, read_text(path))
    if not isinstance(document, dict):
        raise SettingsError(f"{path}: expected a mapping with at least the key 'models'")
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise SettingsError("\n".join(reasons(path, error))) from error


def read_text(path: Path) -> str:
    """Read a file as UTF-8.

    Args:
        path: the file.

    Returns:
        Its text.

    Raises:
        SettingsError: it cannot be read, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise SettingsError(f"{path}: larger than {_MAX_BYTES} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text") from error


def parse_yaml(path: Path, text: str) -> Any:
    """Parse YAML, strictly: a key given twice is an error.

    Args:
        path: for the error.
        text: the document.

    Returns:
        Mappings, lists and scalars; dates stay text.

    Raises:
        SettingsError: it is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}{_yaml_reason(error)}") from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        # A tag that is written out (!!int) on what it does not fit.
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
    return f"{where}: {problem}"


def reasons(path: Path, error: ValidationError) -> list[str]:
    """Return one line a mistake.

    Args:
        path: of the file.
        error: what pydantic found.
    """
    return [
        f"{path}: {_place(item['loc'])}{item['msg'].removeprefix('Value error, ')}"
        for item in error.errors(include_url=False)
    ]


def _place(location: tuple[int | str, ...]) -> str:
    """Return ``models[0].workers[1].url: `` for a pydantic location."""
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part}]"
        else:
            place += f".{part}" if place else str(part)
    return f"{place}: " if place else ""
