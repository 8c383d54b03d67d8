"""Keys of gateways and servers: out of a file, as a mounted secret is; never on a command line."""

import re
from collections.abc import Mapping
from pathlib import Path

from taut_deploy.errors import TautError

FLAG = "--api-key-file"
KEY_VARIABLE = "TAUT_API_KEY"
_KEY = re.compile(r"[\x21-\x7e]+")


def read_api_key(
    file: Path | None, environment: Mapping[str, str], error_type: type[TautError]
) -> str | None:
    """The bearer key for servers, from a file or the environment; None where there is none.

    Args:
        file: of ``--api-key-file``.
        environment: may hold ``TAUT_API_KEY``.
        error_type: raised if both are given, the file cannot be read, or it holds no key.
    """
    variable = environment.get(KEY_VARIABLE) or None
    if file is None:
        return None if variable is None else checked_key(variable, KEY_VARIABLE, error_type)
    if variable is not None:
        raise error_type(f"{FLAG}: {KEY_VARIABLE} is set too; give one of them")
    return read_key_file(file, error_type)


def read_key_file(file: Path, error_type: type[TautError]) -> str:
    """Return the key that a file holds, and nothing else in it.

    Args:
        file: of ``--api-key-file``.
        error_type: raised if it cannot be read, or does not hold one key; the file's text is not
            shown.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise error_type(f"{FLAG} {file}: not a text file") from error
    except OSError as error:
        raise error_type(f"{FLAG} {file}: {error.strerror}") from error
    return checked_key(text, f"{FLAG} {file}", error_type)


def checked_key(text: str, origin: str, error_type: type[TautError]) -> str:
    """Return a key without the white space around it.

    Args:
        text: what should be one.
        origin: where it comes from, for the error.
        error_type: raised if it is no line of printable ASCII without spaces.
    """
    key = text.strip()
    if not _KEY.fullmatch(key):
        raise error_type(f"{origin}: expected one key, a line of printable ASCII")
    return key
