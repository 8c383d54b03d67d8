"""The directory of a validation's report: what marks it as ours, and whether it may be used."""

import json
from pathlib import Path

from taut_deploy.documents import read_json
from taut_deploy.errors import OutputError
from taut_deploy.files import checked_output
from taut_deploy.validate.errors import CouldNotValidateError

JSON_NAME, REPORT_SCHEMA = "report.json", "taut-validation-report"
PARTIAL_NAME, PARTIAL_SCHEMA = "partial.json", "taut-validation-partial"
JOURNAL_NAME, JOURNAL_SCHEMA = "answers.jsonl", "taut-validation-answers"


def check_output(output: Path) -> None:
    """Refuse an output directory that is not ours.

    Raises:
        CouldNotValidateError: not a directory, or not empty and without an earlier report.
    """
    try:
        checked_output(output)
    except OutputError as error:
        raise CouldNotValidateError(str(error)) from error
    if not output.exists():
        return
    if not output.is_dir():
        raise CouldNotValidateError(f"--output {output}: exists and is not a directory")
    ours = ((JSON_NAME, REPORT_SCHEMA), (PARTIAL_NAME, PARTIAL_SCHEMA))
    ours_begun = is_journal(output / JOURNAL_NAME)
    if (
        any(output.iterdir())
        and not ours_begun
        and not any(_is_ours(output / name, what) for name, what in ours)
    ):
        raise CouldNotValidateError(
            f"--output {output}: not empty and holds no earlier validation report; choose another "
            "directory"
        )


def _is_ours(file: Path, schema: str) -> bool:
    try:
        content = read_json(file, CouldNotValidateError)
    except (OSError, CouldNotValidateError):
        return False
    return isinstance(content, dict) and content.get("schema") == schema


def is_journal(file: Path) -> bool:
    """Whether a file is the journal of a validation, to go on with or to replace."""
    try:
        with file.open(encoding="utf-8") as lines:
            head = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(head, dict) and head.get("schema") == JOURNAL_SCHEMA
