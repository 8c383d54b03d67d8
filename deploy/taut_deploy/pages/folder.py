"""Which page stands for a folder: a validation's, or that of a rollout's log.

A validation's is beside its ``report.json``, and drawn anew where somebody took it away. A rollout
has a log and no page: that is drawn each time, from a log whose chain of hashes was checked.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from taut_deploy.documents import read_json_object
from taut_deploy.errors import MeasureError
from taut_deploy.files import place_not_finite, write_text_atomically
from taut_deploy.pages.rollout import read_log, render_rollout
from taut_deploy.validate.output import JSON_NAME, PARTIAL_NAME, REPORT_SCHEMA
from taut_deploy.validate.page.render import render_page
from taut_deploy.validate.report import PAGE_NAME, SCHEMA_VERSION

LOG_NAME = "audit.jsonl"
_LOGS = (LOG_NAME, f"rollout/{LOG_NAME}")
ROLLOUT_PAGE = "rollout.html"
_GATEWAY = "taut_service"
_VERIFY_S = 60


class Page(NamedTuple):
    """A page on disk.

    Args:
        kind: ``validation`` or ``rollout``.
        path: of the page.
        checked: what is said of a log's hashes; "" for a validation.
    """

    kind: str
    path: Path
    checked: str = ""


def page_of(folder: Path, output: Path | None) -> Page:
    """Find the page of a folder, or draw it.

    Args:
        folder: ``--output`` of ``taut validate`` or ``taut bench rollout``, or a gateway's
            ``rollout.directory``.
        output: where to draw it; None for its place in the folder.

    Raises:
        MeasureError: the folder is no such, its report is of another version, or its log was
            changed; the line is named.
        OutputError: the page cannot be written.
    """
    if not folder.is_dir():
        raise MeasureError(f"{folder}: no such directory")
    for name in _LOGS:
        if (folder / name).is_file():
            return _rollout(folder / name, output or folder / ROLLOUT_PAGE)
    if (folder / JSON_NAME).is_file():
        return _validation(folder, output)
    if (folder / PARTIAL_NAME).is_file():
        raise MeasureError(
            f"{folder}: this validation broke off and has no report; run its command again to go on"
        )
    raise MeasureError(
        f"{folder}: has neither {JSON_NAME} of taut validate nor {LOG_NAME} of a rollout"
    )


def _validation(folder: Path, output: Path | None) -> Page:
    file, drawn = folder / JSON_NAME, folder / PAGE_NAME
    report = read_json_object(file, MeasureError)
    if report.get("schema") != REPORT_SCHEMA:
        raise MeasureError(f"{file}: is no report of taut validate")
    if report.get("schema_version") == SCHEMA_VERSION and (problem := _damage(report)):
        raise MeasureError(f"{file}: {problem}; it was changed or is damaged, validate again")
    if output is None and drawn.is_file():
        return Page("validation", drawn)
    if report.get("schema_version") != SCHEMA_VERSION:
        raise MeasureError(
            f"{file}: schema_version is {report.get('schema_version')!r}, and this version draws "
            f"{SCHEMA_VERSION}; validate again"
        )
    drawn = output or drawn
    write_text_atomically(drawn, render_page(report))
    return Page("validation", drawn)


def _damage(report: Mapping[str, Any]) -> str:
    """What a report has that no validation writes; ``""`` if nothing."""
    if (place := place_not_finite(report)) is not None:
        return f"{place} is not a finite number"
    schema = resources.files("taut_deploy.validate") / "report.schema.json"
    validator = Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    error = best_match(validator.iter_errors(report))
    if error is None:
        return ""
    place = ".".join(map(str, error.absolute_path)) or "the report"
    return f"{place}: {' '.join(error.message.split())[:120]}"


def _rollout(log: Path, target: Path) -> Page:
    checked = _verified(log)
    write_text_atomically(target, render_rollout(read_log(log), str(log), checked))
    return Page("rollout", target, checked)


def _verified(log: Path) -> str:
    """What the gateway's own check says of a log.

    Raises:
        MeasureError: a line is not what was written.
    """
    if importlib.util.find_spec(_GATEWAY) is None:
        return "hashes not checked: taut[service] is not installed"
    done = subprocess.run(
        [sys.executable, "-P", "-m", _GATEWAY, "verify-audit", str(log)],
        capture_output=True,
        text=True,
        timeout=_VERIFY_S,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"verify-audit ended with {done.returncode}"]
        raise MeasureError(said[-1].removeprefix("taut-gateway verify-audit: "))
    return done.stdout.strip().removeprefix(f"{log}: ")
