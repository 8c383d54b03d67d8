"""Options that several commands share, as a dataclass that stands for them in a signature."""

import copy
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.markup import escape
from typer.models import ParameterInfo

R = TypeVar("R")

# ``name: text`` below "Args:", its further lines indented deeper.
_DESCRIBED = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def with_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Let typer see the fields of dataclass parameters as options of the command.

    A field is a parameter, and what the dataclass's docstring says of it below "Args:" is its help.
    What a type does not say, such as bounds, is written ``Annotated[type, typer.Option(...)]``; a
    help in there goes first. Fields stand in ``--help`` where the parameter stands.

    Args:
        command: parameters whose type is a dataclass are built from their fields' values.

    Raises:
        TypeError: two parameters or fields have one name, or a docstring says something of a field
            that is not there.
    """
    hints = get_type_hints(command, include_extras=True)
    seen: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = (kind, [field.name for field in fields(kind)])
            seen += _options(kind)
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


def _options(kind: type[Any]) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command."""
    named = get_type_hints(kind, include_extras=True)
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        texts |= _described_fields(vars(one).get("__doc__") or "")
    if unknown := texts.keys() - named.keys():
        raise TypeError(f"{kind.__name__}: the docstring has {', '.join(sorted(unknown))}")
    return [_option(field, named[field.name], texts.get(field.name)) for field in fields(kind)]


def _described_fields(docstring: str) -> dict[str, str]:
    """What a docstring says below "Args:", by name; a text over several lines as one."""
    _, _, section = inspect.cleandoc(docstring).partition("\nArgs:\n")
    found: list[tuple[str, str]] = _DESCRIBED.findall(section)
    return {name: re.sub(r"\n +", " ", text) for name, text in found}


def _option(field: "Field[Any]", annotation: Any, text: str | None) -> inspect.Parameter:
    metadata = getattr(annotation, "__metadata__", ())
    kind = annotation.__origin__ if metadata else annotation
    told = next((copy.copy(one) for one in metadata if isinstance(one, ParameterInfo)), None)
    info = typer.Option() if told is None else told
    # Typer prints help as rich text, in which [brackets] are marks and vanish.
    info.help = info.help or (text and escape(text))
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )
