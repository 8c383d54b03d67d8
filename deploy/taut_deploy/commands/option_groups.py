"""Options that several commands share, as a dataclass that stands for them in a signature."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


def with_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Let typer see the fields of dataclass parameters as options of the command.

    A field is written as a parameter would be: ``Annotated[type, typer.Option(...)] = default``.
    Fields stand in ``--help`` where the parameter stands.

    Args:
        command: parameters whose type is a dataclass are built from their fields' values.

    Raises:
        TypeError: two parameters or fields have one name.
    """
    hints = get_type_hints(command, include_extras=True)
    seen: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and is_dataclass(kind):
            named = get_type_hints(kind, include_extras=True)
            groups[parameter.name] = (kind, [field.name for field in fields(kind)])
            seen += [_option(field, named[field.name]) for field in fields(kind)]
        else:
            seen.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
    names = [parameter.name for parameter in seen]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"{command.__name__}: {', '.join(sorted(twice))} given twice")

    @functools.wraps(command)
    def flat(**values: Any) -> R:
        for name, (kind, members) in groups.items():
            values[name] = kind(**{member: values.pop(member) for member in members})
        return command(**values)

    flat.__signature__ = inspect.Signature(seen)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    # What ``inspect`` would look through for the signature of the command itself.
    del flat.__wrapped__
    return flat


def _option(field: "Field[Any]", annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
