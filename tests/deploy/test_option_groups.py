"""Dataclasses that stand for several options of a command."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from taut_deploy.commands.option_groups import with_groups


@dataclass(frozen=True, kw_only=True)
class Load:
    model: Annotated[str, typer.Argument()]
    requests: Annotated[int, typer.Option(min=1)] = 8
    header: Annotated[list[str] | None, typer.Option()] = None


def test_fields_are_options_and_arrive_as_one_value():
    seen = []
    app = typer.Typer()

    @app.command()
    @with_groups
    def measure(load: Load, quiet: Annotated[bool, typer.Option("--quiet")] = False) -> None:
        """Say something."""
        seen.append((load, quiet))

    run = CliRunner().invoke
    assert run(app, ["m", "--requests", "3", "--header", "a", "--quiet"]).exit_code == 0
    assert run(app, ["m"]).exit_code == 0
    assert seen == [(Load(model="m", requests=3, header=["a"]), True), (Load(model="m"), False)]
    assert run(app, ["m", "--requests", "0"]).exit_code == 2
    assert run(app, []).exit_code == 2
    assert "Say something." in run(app, ["--help"]).output


def test_a_name_that_two_groups_have_is_refused():
    def measure(load: Load, requests: int = 1) -> None:
        pass

    with pytest.raises(TypeError, match=r"^measure: requests given twice$"):
        with_groups(measure)
