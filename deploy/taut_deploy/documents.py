"""YAML and JSON from somebody else: read in one place, within bounds, wrong ones in one line.

Parsers of nested text recurse, Python refuses to print integers of more than 4,300 digits, and a
name with a NUL byte is no path: each would end in a traceback far from its cause. So size, depth,
length of numbers and characters are looked at here, before a value goes anywhere.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from taut_deploy.errors import TautError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_BYTES = 64 << 20
"""Of a JSON file; the index of the largest models has a tenth of that."""
MAX_YAML_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_DIGITS = 64
MAX_NODES = 100_000
"""Of a YAML document, its aliases written out."""

# No text has them: a NUL ends a path or an argument, half a surrogate pair cannot be printed.
_BROKEN_TEXT = re.compile("[\x00\ud800-\udfff]")
_UNKNOWN_KEY = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
_OURS = "Value error, "
"""What pydantic puts before a message of a validator's own."""
# What pydantic puts into a place where a value may be of several types: which of them it tried.
_CHOICE = re.compile(r"(literal|dict|list|tuple|function-\w+)\[")
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_YAML_ERRORS = (
    *(yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)


def read_json(path: Path, error_type: type[TautError]) -> Any:
    """The value of a JSON file.

    Args:
        path: the file.
        error_type: what to raise.

    Raises:
        FileNotFoundError: there is no such file; the caller knows what that means.
        TautError: of ``error_type``: not a plain file, too large, not JSON, or beyond a bound.
    """
    try:
        if path.exists() and not path.is_file():
            raise error_type(f"{path}: not a plain file")
        content = read_bounded(path, MAX_BYTES, error_type)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise error_type(f"{path}: {error.strerror or error}") from error
    return parse_json(content, str(path), error_type)


def read_json_object(path: Path, error_type: type[TautError]) -> dict[str, Any]:
    """The object of a JSON file; see :func:`read_json`.

    Raises:
        TautError: of ``error_type``, likewise if it holds something else.
    """
    found = read_json(path, error_type)
    if not isinstance(found, dict):
        raise error_type(f"{path}: expected a JSON object")
    return found


def parse_json(content: bytes, origin: str, error_type: type[TautError]) -> Any:
    """Parse JSON within the bounds; NaN and infinity are read, as Python writes them.

    Raises:
        TautError: of ``error_type``, naming ``origin``.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_int=_parse_int)
    except RecursionError as error:
        raise error_type(f"{origin}: nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise error_type(f"{origin}: not valid JSON ({_shown(error)})") from error
    if (reason := why_refused(value)) is not None:
        raise error_type(f"{origin}: {reason}")
    return value


def read_bounded(path: Path, limit: int, error_type: type[TautError]) -> bytes:
    """The bytes of a file, which may be a pipe, unless they are more than ``limit``.

    Raises:
        OSError: it cannot be read.
        TautError: of ``error_type``: it is larger.
    """
    with path.open("rb") as handle:
        content = handle.read(limit + 1)
    if len(content) > limit:
        raise error_type(f"{path}: larger than {limit >> 20} MiB")
    return content


def read_yaml_text(path: Path, error_type: type[TautError]) -> str:
    """The text of a YAML file, which may be a pipe.

    Raises:
        OSError: it cannot be read.
        TautError: of ``error_type``: larger than the bound, or not text.
    """
    try:
        return read_bounded(path, MAX_YAML_BYTES, error_type).decode("utf-8")
    except UnicodeDecodeError as error:
        raise error_type(f"{path}: not a text file") from error


def parse_yaml(text: str, origin: str, error_type: type[TautError]) -> Any:
    """Parse YAML within the bounds, strictly.

    A key given twice is an error; dates and ``2:4`` stay text.

    Raises:
        TautError: of ``error_type``, naming ``origin``.
    """
    if len(text) > MAX_YAML_BYTES:
        raise error_type(f"{origin}: larger than {MAX_YAML_BYTES >> 20} MiB")
    try:
        _require_bounded_events(text)
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except _YAML_ERRORS as error:
        raise error_type(f"{origin}: not valid YAML: {_shown(error)}") from error
    if (reason := why_refused(value)) is not None:
        raise error_type(f"{origin}: {reason}")
    return value


def first_problem(error: ValidationError, whole: str = "document") -> str:
    """``key: what is wrong with it`` of one wrong key that pydantic found.

    Args:
        error: of pydantic.
        whole: what to say in place of a key where the whole is wrong.
    """
    first = first_error(error)
    parts = [str(part)[:80] for part in first["loc"] if not _CHOICE.match(str(part))]
    wrong = first["msg"].removeprefix(_OURS)[:300]
    if first["type"] in _UNKNOWN_KEY:
        wrong = "unknown key"
    elif first["type"] == "union_tag_not_found":
        wrong = f"give {first['ctx']['discriminator']}"
    elif first["type"] == "union_tag_invalid":
        parts.append(first["ctx"]["discriminator"].strip("'"))
        wrong = f"Input should be one of {first['ctx']['expected_tags'][:300]}"
    problem = f"{'.'.join(parts) or whole}: {wrong}"
    # It may quote somebody else's text: a line break in that is shown, not made.
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in problem)


def first_error(error: ValidationError) -> "ErrorDetails":
    """The error to tell of: an unknown key first, as a mistyped one leaves another missing.

    Args:
        error: of pydantic.
    """
    errors = error.errors(include_url=False)
    return next((one for one in errors if one["type"] in _UNKNOWN_KEY), errors[0])


def why_refused(value: Any) -> str | None:
    """Why plain data goes no further: too deep, or text that is no text; None if it is sound."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return None
        following: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if _BROKEN_TEXT.search(item):
                    return f"{item[:40]!r} holds a NUL or half a character"
            elif isinstance(item, dict):
                following += item.keys()
                following += item.values()
            elif isinstance(item, list | tuple | set):
                following += item
        level = following
    return f"nested deeper than {MAX_DEPTH} levels"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and leaves dates and ``2:4`` as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _bounded_number(
    construct: Callable[[yaml.SafeLoader, yaml.ScalarNode], Any],
) -> Callable[[yaml.SafeLoader, yaml.ScalarNode], Any]:
    def constructed(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        if len(node.value) > MAX_DIGITS:
            raise ValueError(f"a number of {len(node.value)} characters")
        if ":" in node.value:
            return node.value  # YAML 1.1 reads 2:4 in base 60, as 124
        return construct(loader, node)

    return constructed


for _tag in _NUMBER_TAGS:
    _Loader.add_constructor(_tag, _bounded_number(yaml.SafeLoader.yaml_constructors[_tag]))


def _require_bounded_events(text: str) -> None:
    """Count what a document holds, aliases written out, before anything recurses into it."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes |= {anchor: total - before} if anchor is not None else {}
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias *{event.anchor} names nothing that is finished")
            total += sizes[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
            total += 1
        _require_bounds(len(open_nodes), total)


def _require_bounds(depth: int, total: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if total > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} values, aliases counted")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _shown(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
