"""What commands print: text for people, or one JSON document with ``--json``."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from taut_deploy.checkpoint import Manifest
from taut_deploy.errors import OutputError
from taut_deploy.files import place_not_finite
from taut_deploy.progress import Say


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


def print_results(document: Any, text: str, files: Iterable[object], *, as_json: bool) -> None:
    """Print results that are on disk.

    Args:
        document: for programs.
        text: for people.
        files: where the results are.
        as_json: print the document instead of the text and the files' names.

    Raises:
        OutputError: the document holds NaN or infinity.
    """
    if as_json:
        print_json(document)
        return
    typer.echo(text)
    for file in files:
        say(f"wrote {file}")


def line_reporter(*, quiet: bool) -> Say:
    """:func:`say`, or what says nothing."""
    return (lambda _: None) if quiet else say


def made_checkpoint(output: Path, manifest: Manifest) -> dict[str, Any]:
    """What ``--json`` says of a directory that a command made: ``path``, ``digest``, ``bytes``."""
    return {"path": str(output.resolve()), "digest": manifest.digest, "bytes": manifest.bytes}


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
