"""YAML a user writes: shipped by name or read from a file, parsed strictly, errors in one line."""

import difflib
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
    """What an unknown key may have been meant to be, ready to follow the message."""
    first = first_error(error)
    if first["type"] != "extra_forbidden":
        return ""
    *path, key = first["loc"]
    holder: Any = model
    for part in path:
        field = getattr(holder, "model_fields", {}).get(part)
        # A mapping's keys are names of the user's; what they name is the last type it takes.
        holder = _model_in(holder if field is None else field.annotation)
    known = list(getattr(holder, "model_fields", {}))
    close = difflib.get_close_matches(str(key), known, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known are {', '.join(known)}" if known else ""


def _model_in(annotation: Any) -> Any:
    """The model among a type's arguments, or the type itself where it has none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inside = [_model_in(part) for part in get_args(annotation)]
    models = [part for part in inside if hasattr(part, "model_fields")]
    return models[-1] if len(models) == 1 else annotation
