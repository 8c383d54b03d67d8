"""The page of a rollout, made from its audit log alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, ValidationError

from taut_deploy.documents import MAX_BYTES, parse_json, read_bounded
from taut_deploy.errors import MeasureError
from taut_deploy.validate.page import charts

_UNITS = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From how many seconds on, seconds in one, name."""


class _State(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    id: str
    model: str
    baseline: str
    candidate: str
    phase: Literal["running", "held", "complete", "rolled_back", "manual"]
    percent: float
    since: float
    why: str


class Line(BaseModel):
    """A line of the log, as far as the page shows it."""

    model_config = ConfigDict(strict=True)

    seq: int
    time: str
    event: str
    actor: str
    state: _State
    facts: dict[str, Any]


def read_log(path: Path) -> list[Line]:
    """Read a log.

    Raises:
        MeasureError: a line is none of a rollout's log.
    """
    try:
        content = read_bounded(path, MAX_BYTES, MeasureError)
    except OSError as error:
        raise MeasureError(f"{path}: {error.strerror or error}") from error
    lines = []
    for number, text in enumerate(content.splitlines(), start=1):
        place = f"{path}: line {number}"
        try:
            lines.append(Line.model_validate(parse_json(text, place, MeasureError)))
        except ValidationError as error:
            raise MeasureError(f"{place}: is no line of a rollout's log") from error
    if not lines:
        raise MeasureError(f"{path}: the log is empty: no rollout has begun")
    return lines


def render_rollout(lines: Sequence[Line], log: str, checked: str) -> str:
    """Fill the template.

    Args:
        lines: of the log, at least one.
        log: its path, to be shown.
        checked: what is known of its hashes.
    """
    loaders = [
        PackageLoader("taut_deploy.pages", "."),
        PackageLoader("taut_deploy.validate.page", "."),
    ]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("rollout.html.j2").render(
        rollouts=[_rollout(own) for own in _by_rollout(lines)],
        lines=len(lines),
        log=log,
        checked=checked,
    )


def _by_rollout(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines of each rollout, the newest rollout first."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.state.id, []).append(line)
    return sorted(found.values(), key=lambda own: own[0].seq, reverse=True)


def _rollout(lines: Sequence[Line]) -> Mapping[str, Any]:
    start, end = lines[0].state.since, lines[-1].state.since
    unit, name = next((unit, name) for least, unit, name in _UNITS if end - start >= least)
    points = [((line.state.since - start) / unit, line.state.percent) for line in lines]
    return {
        "last": lines[-1].state,
        "lines": [
            {"line": line, "after": f"{after:.3g} {name}", "means": _means(line.facts)}
            for line, (after, _) in zip(lines, points, strict=True)
        ],
        "chart": charts.shares(points, name) if len(points) > 1 else None,
    }


def _means(facts: Mapping[str, Any]) -> str:
    """What the guard had seen: answers and tokens, and means by measure."""
    means = facts.get("means")
    told = [f"{facts[name]} {name}" for name in ("answers", "tokens") if name in facts]
    if isinstance(means, Mapping):
        numbers = {name: value for name, value in means.items() if isinstance(value, float)}
        told += [f"{name} {value:g}" for name, value in numbers.items() if value]
    return ", ".join(told)
