"""Dataclasses that stand for several options of a command."""

from dataclasses import dataclass
from inspect import signature
from typing import Annotated, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from taut_deploy.cli import app
from taut_deploy.commands.option_groups import with_groups


@dataclass(frozen=True, kw_only=True)
class Load:
    model: Annotated[str, typer.Argument()]
    requests: Annotated[int, typer.Option(min=1)] = 8
    header: Annotated[list[str] | None, typer.Option()] = None


def test_fields_are_options_and_arrive_as_one_value():
    seen = []
    small = typer.Typer()

    @small.command()
    @with_groups
    def measure(load: Load, quiet: Annotated[bool, typer.Option("--quiet")] = False) -> None:
        """Say something."""
        seen.append((load, quiet))

    run = CliRunner().invoke
    assert run(small, ["m", "--requests", "3", "--header", "a", "--quiet"]).exit_code == 0
    assert run(small, ["m"]).exit_code == 0
    assert seen == [(Load(model="m", requests=3, header=["a"]), True), (Load(model="m"), False)]
    assert run(small, ["m", "--requests", "0"]).exit_code == 2
    assert run(small, []).exit_code == 2
    assert "Say something." in run(small, ["--help"]).output


def test_a_name_that_two_groups_have_is_refused():
    def measure(load: Load, requests: int = 1) -> None:
        pass

    with pytest.raises(TypeError, match=r"^measure: requests given twice$"):
        with_groups(measure)


@dataclass(frozen=True, kw_only=True)
class Sending(Load):
    """A load with an end.

    Args:
        requests: Asked in all; a second
            line goes on.
        seconds: Longest run.  [default: none]
        header: Not this.
    """

    seconds: float | None = None
    header: Annotated[list[str] | None, typer.Option(help="This.")] = None


def test_the_docstring_is_the_help_of_fields_that_have_none():
    def measure(sending: Sending) -> None:
        pass

    shown = {
        one.name: one.annotation for one in signature(with_groups(measure)).parameters.values()
    }
    helps = {name: kind.__metadata__[0].help for name, kind in shown.items()}
    assert helps == {
        "model": None,
        "requests": "Asked in all; a second line goes on.",
        "header": "This.",
        "seconds": r"Longest run.  \[default: none]",
    }
    assert shown["requests"].__metadata__[0].min == 1
    assert get_type_hints(Load, include_extras=True)["requests"].__metadata__[0].help is None


def test_brackets_of_a_docstring_are_printed():
    small = typer.Typer()

    @small.command()
    @with_groups
    def measure(sending: Sending) -> None:
        """Say something."""

    assert "none]" in CliRunner().invoke(small, ["--help"]).output


def test_a_docstring_that_describes_no_field_is_refused():
    @dataclass
    class Typo:
        """One.

        Args:
            lenght: In tokens.
        """

        length: int = 1

    def measure(typo: Typo) -> None:
        pass

    measure.__annotations__["typo"] = Typo
    with pytest.raises(TypeError, match=r"^Typo: the docstring has lenght$"):
        with_groups(measure)


def test_every_option_of_every_command_has_a_help():
    def lacking(command, path):
        for name, inner in getattr(command, "commands", {}).items():
            yield from lacking(inner, [*path, name])
        for one in command.params:
            is_option = str(one.opts[0]).startswith("-")
            if is_option and not one.hidden and not one.help:
                yield " ".join([*path, one.opts[0]])

    assert list(lacking(typer.main.get_command(app), ["taut"])) == []
