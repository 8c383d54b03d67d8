"""What commands print: text for people, or one JSON document with ``--json``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from taut_deploy.errors import OutputError
from taut_deploy.files import place_not_finite
from taut_deploy.models.remote_code import describe_code

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

TrustRemoteCodeFlag = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the model's own Python code; prints its hashes."),
]

DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]

TextOption = Annotated[
    list[str] | None,
    typer.Option(help="corpus, a text file, .jsonl or .npy of token ids; repeat for more."),
]


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout.

    Raises:
        OutputError: it holds NaN or infinity, which JSON cannot.
    """
    if (place := place_not_finite(value)) is not None:
        raise OutputError(f"--json: {place} is not a finite number; leave --json out")
    typer.echo(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print ``name: value`` lines, mappings indented below their name."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            typer.echo(f"{name}:")
            for inner, inside in value.items():
                typer.echo(printable(f"  {inner}: {inside}"))
        else:
            typer.echo(printable(f"{name}: {value}"))


def printable(text: str) -> str:
    """``text`` with control characters written out: a name must not move the cursor."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def say(text: str) -> None:
    """One line for the user, at once."""
    typer.echo("\n".join(map(printable, f"taut: {text}".split("\n"))), err=True)


def announce_code(directory: Path, trust_remote_code: bool) -> None:
    """Name each file of code that may run now, with its sha256; nothing where none may.

    Raises:
        ModelError: the code is not in the directory.
    """
    for line in describe_code(directory) if trust_remote_code else ():
        say(line)


def make_folder(output: Path) -> None:
    """Make the folder of ``--output``: before anything is measured, or the minutes are lost.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--output {output}: {error.strerror}") from error


def megabytes(count: int) -> str:
    """Bytes in MB (10**6) for people."""
    return f"{count / 1e6:.1f} MB"
