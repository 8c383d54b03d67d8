"""What goes with every request to a server: extra headers, and the key, which is never on argv."""

import re
from collections.abc import Sequence

from taut_deploy.api_key import FLAG, KEY_VARIABLE
from taut_deploy.validate.errors import CouldNotValidateError

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x20-\x7e]+")
_OURS = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection"})


def parse_headers(given: Sequence[str], flag: str) -> tuple[tuple[str, str], ...]:
    """Read ``Name: value`` of ``--baseline-header`` and ``--candidate-header``.

    Args:
        given: as on the command line.
        flag: named in errors.

    Raises:
        CouldNotValidateError: no such form, a name given twice, or a header that is not the user's
            to set.
    """
    found: dict[str, tuple[str, str]] = {}
    for line in given:
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            # A line without a colon may be a secret: it is not repeated.
            raise CouldNotValidateError(f"{flag}: expected 'Name: value' in printable ASCII")
        if name.lower() == "authorization":
            raise CouldNotValidateError(
                f"{flag}: keys do not belong on a command line, which others can read; set "
                f"{KEY_VARIABLE} or give {FLAG}"
            )
        if name.lower() in _OURS or name.lower() in found:
            what = "is given twice" if name.lower() in found else "cannot be set"
            raise CouldNotValidateError(f"{flag}: {name} {what}")
        found[name.lower()] = (name, value)
    return tuple(found.values())


def request_headers(api_key: str | None, extra: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The headers of every request to one server."""
    key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return key | dict(extra)


def described(extra: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Headers for the report: taut's own in full, of others, which may be secrets, the name."""
    return {
        name: value if name.lower().startswith("x-taut-") else "(not shown)"
        for name, value in extra
    }
