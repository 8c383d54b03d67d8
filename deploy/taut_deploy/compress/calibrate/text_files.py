"""Texts of the user's: a plain file, or ``.jsonl`` with a document a line."""

from pathlib import Path

from taut_deploy.documents import parse_json
from taut_deploy.errors import RecipeError, TautError


class UnreadableTextError(TautError):
    """A file is no text; whoever asked for it says for what."""


def read_documents(path: Path) -> list[str]:
    """The documents of a file: all of it, or of ``.jsonl`` the ``text`` of each line.

    Args:
        path: UTF-8 text.

    Raises:
        UnreadableTextError: it is something else; names the line.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableTextError(f"cannot read {path} as UTF-8 text") from error
    if path.suffix != ".jsonl":
        return [text]
    # Not splitlines, which also parts text at characters that JSON leaves as they are.
    lines = enumerate(text.split("\n"), start=1)
    return [_document(line, f"{path}: line {number}") for number, line in lines if line.strip()]


def _document(line: str, origin: str) -> str:
    found = parse_json(line.encode(), origin, UnreadableTextError)
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise UnreadableTextError(f"{origin}: give a JSON object with a 'text' that is a string")
    return text


def read_calibration_file(path: Path) -> str:
    """The text of a calibration file.

    Args:
        path: as :func:`read_documents` takes it.

    Raises:
        RecipeError: it is not readable text, or holds none.
    """
    try:
        text = "\n".join(read_documents(path))
    except UnreadableTextError as error:
        raise RecipeError(f"calibration.path: {error}") from error
    if not text.strip():
        raise RecipeError(f"calibration.path: {path} is empty, or holds nothing but white space")
    return text
