"""YAML a user writes: shipped by name or read from a file, parsed strictly, errors in one line."""

import difflib
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from taut_deploy.documents import first_error, first_problem, parse_yaml, read_yaml_text
from taut_deploy.errors import TautError

Model = TypeVar("Model", bound=BaseModel)


def shipped_names(package: str, folder: str) -> list[str]:
    """Names of the YAML files that ship in ``package``'s ``folder``."""
    entries = (resources.files(package) / folder).iterdir()
    names = [entry.name for entry in entries if entry.name.endswith(".yaml")]
    return sorted(name.removesuffix(".yaml") for name in names)


def read_shipped_or_file(
    reference: str, package: str, folder: str, what: str, error_type: type[TautError]
) -> str:
    """The text behind a shipped name or a path.

    Args:
        reference: name or path.
        package: package the shipped files are in.
        folder: folder inside it.
        what: the thing's name, for errors (``recipe``).
        error_type: what to raise.

    Raises:
        TautError: of ``error_type``; no such name or file, or not readable as text.
    """
    known = shipped_names(package, folder)
    if reference in known:
        shipped = resources.files(package) / folder / f"{reference}.yaml"
        return shipped.read_text(encoding="utf-8")
    try:
        return read_yaml_text(Path(reference), error_type)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError) as error:
        # ValueError: a NUL in the name.
        close = difflib.get_close_matches(reference, known, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        choice = f"give a YAML file or one of {', '.join(known)}"
        message = f"{reference!r}: no such {what}; {choice}{meant}"
        raise error_type(message) from error
    except OSError as error:
        raise error_type(f"{reference[:80]}: {error.strerror}") from error


def parse_mapping(
    text: str, origin: str, error_type: type[TautError], keys: str = ""
) -> dict[str, Any]:
    """Parse YAML that must be a mapping.

    Args:
        text: the document.
        origin: named in errors.
        error_type: what to raise.
        keys: what the mapping must at least hold, in words; where nothing is required an empty
            document is an empty mapping.

    Raises:
        TautError: of ``error_type``, naming ``origin``.
    """
    data = parse_yaml(text, origin, error_type)
    if data is None and not keys:
        return {}
    if not isinstance(data, dict):
        raise error_type(f"{origin}: expected a mapping{' with ' if keys else ''}{keys}")
    return data


def validate_mapping(
    model: type[Model], data: dict[str, Any], origin: str, error_type: type[TautError]
) -> Model:
    """Build ``model`` from ``data``, unknown keys refused by the model.

    Raises:
        TautError: of ``error_type``, naming the first wrong key and what is wrong with it.
    """
    try:
        # A key that is no text cannot be looked up by name, and would be reported as a bug.
        if odd := [key for key in data if not isinstance(key, str)]:
            raise error_type(f"{origin}: {odd[0]!r}: expected a key that is text")
        return model.model_validate(data)
    except ValidationError as error:
        problem = first_problem(error, model.__name__.lower())
        raise error_type(f"{origin}: {problem}{_meant(model, error)}") from error


def _meant(model: type[BaseModel], error: ValidationError) -> str:
    """What an unknown key or word may have been meant to be, ready to follow the message."""
    first = first_error(error)
    if first["type"] == "extra_forbidden":
        *path, key = first["loc"]
        known = _keys_at(model, path)
        return _closest(str(key), known) or (f"; there are {', '.join(known)}" if known else "")
    choices = first.get("ctx", {}).get("expected_tags" if "tag" in first["type"] else "expected")
    word = first["ctx"]["tag"] if first["type"] == "union_tag_invalid" else first["input"]
    if isinstance(choices, str) and isinstance(word, str):
        return _closest(word, re.findall("'([^']*)'", choices))
    return ""


def _closest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _keys_at(model: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """The keys that are known at a place of a document; none where it may be of several models."""
    holder: Any = model
    for part in path:
        models = _models_in(holder)
        # Of a union's models the one whose discriminator has this value.
        tagged = [one for one in models if _is_tag(one, part)] if len(models) > 1 else []
        field = next((one.model_fields[part] for one in models if part in one.model_fields), None)
        if tagged:
            holder = tagged[0]
        elif field is not None:
            holder = field.annotation
    models = _models_in(holder)
    return list(models[0].model_fields) if len(models) == 1 else []


def _is_tag(model: type[BaseModel], part: Any) -> bool:
    fields = model.model_fields.values()
    return isinstance(part, str) and any(field.default == part for field in fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models among a type's arguments, or the type itself."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
