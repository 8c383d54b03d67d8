"""Prompts of a slice: shipped with taut or the user's, a JSON object a line."""

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from taut_deploy.documents import first_problem, parse_json
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.limits import Strict
from taut_deploy.validate.slices.structured import why_no_schema
from taut_deploy.validate.tasks.items import read_lines, refuse_repeated

_Text = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[int, Field(ge=1, le=4096)]
_Messages = Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
_NAMED = "has 'function' with a 'name'"


class Prompt(Strict):
    """What every prompt may have."""

    id: str | None = None


class Conversation(Prompt):
    """A conversation the model continues: ``role`` and ``content`` a message."""

    messages: _Messages
    max_tokens: _Tokens = 160


class Structured(Conversation):
    """An answer in JSON; ``schema`` says of which form."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    @field_validator("schema_")
    @classmethod
    def _is_schema(cls, value: dict[str, Any]) -> dict[str, Any]:
        if (reason := why_no_schema(value)) is not None:
            raise ValueError(f"no JSON schema: {reason}")
        return value


class WithTools(Conversation):
    """A request that one of ``tools`` answers."""

    tools: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]

    @field_validator("tools")
    @classmethod
    def _are_functions(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for tool in value:
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"every tool {_NAMED}")
            if (reason := why_no_schema(function.get("parameters", {}))) is not None:
                raise ValueError(f"parameters of {function['name']}: no JSON schema: {reason}")
        return value


class Code(Prompt):
    """Python up to a block, and the block."""

    prompt: _Text
    solution: _Text
    max_tokens: _Tokens = 96


class Language(Prompt):
    """A text in one language."""

    language: _Text
    text: _Text


class Needle(Prompt):
    """A sentence, what is asked of it, and what follows the question."""

    needle: _Text
    question: _Text
    answer: _Text


KINDS: dict[str, type[Prompt]] = {
    "structured": Structured,
    "tools": WithTools,
    "long_context": Needle,
    "code": Code,
    "languages": Language,
    "chat": Conversation,
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a slice.

    Args:
        source: file, or ``shipped with taut``.
        sha256: hex digest of their bytes.
        items: two or more.
    """

    source: str
    sha256: str
    items: tuple[Any, ...]


def read_prompts(name: str, path: Path | None, flag: str) -> Prompts:
    """Read a slice's prompts.

    Args:
        name: of the slice.
        path: the user's file; None for the shipped prompts.
        flag: named in errors.

    Raises:
        CouldNotValidateError: unreadable, fewer than two prompts, or a wrong line.
    """
    if path is None:
        file = resources.files(__package__) / "prompts" / f"{name}.jsonl"
        raw = file.read_bytes()
        lines = raw.splitlines()
        rows = [
            (at, parse_json(line, name, CouldNotValidateError)) for at, line in enumerate(lines, 1)
        ]
        source, digest = "shipped with taut", hashlib.sha256(raw).hexdigest()
    else:
        rows, digest = read_lines(path, flag)
        source = str(path)
    items = []
    for number, row in rows:
        try:
            items.append(KINDS[name].model_validate(row))
        except ValidationError as error:
            problem = first_problem(error, "prompt")
            raise CouldNotValidateError(f"{flag} {path}, line {number}: {problem}") from error
    refuse_repeated(
        [(number, item) for (number, _), item in zip(rows, items, strict=True)], f"{flag} {path}"
    )
    if len(items) < 2:
        raise CouldNotValidateError(f"{flag} {path}: one prompt says nothing; give two or more")
    return Prompts(source, digest, tuple(items))
