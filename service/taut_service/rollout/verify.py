"""``taut-gateway verify-audit FILE``: checks the chain of a rollout's log, wherever it lies."""

from __future__ import annotations

import sys
from pathlib import Path

from taut_service.rollout.audit import TamperedError, verify_file


def verify_audit(arguments: list[str]) -> int:
    """Check a log; print how many lines it has and the newest hash.

    Args:
        arguments: the file.

    Returns:
        0, 1 if a line is not what was written, 2 if the file cannot be read.
    """
    if len(arguments) != 1:
        return _complain("give one file: taut-gateway verify-audit FILE", 2)
    path = Path(arguments[0])
    try:
        entries = verify_file(path)
    except OSError as error:
        return _complain(f"{path}: {error.strerror or error}", 2)
    except UnicodeDecodeError:
        return _complain(f"{path}: not UTF-8 text", 1)
    except TamperedError as error:
        return _complain(str(error), 1)
    head = entries[-1].hash if entries else "no lines"
    print(f"{path}: ok, {len(entries)} line(s), newest hash {head}")  # noqa: T201
    return 0


def _complain(text: str, code: int) -> int:
    print(f"taut-gateway verify-audit: {text}", file=sys.stderr)  # noqa: T201
    return code
