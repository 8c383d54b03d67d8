"""What the user says of lm-evaluation-harness, checked before anything is loaded."""

import importlib.util
from pathlib import Path

from taut_deploy.validate.errors import CouldNotValidateError

FLAG = "--lm-eval"


def require_harness() -> None:
    """Check that the harness is installed.

    Raises:
        CouldNotValidateError: it is not.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise CouldNotValidateError(
            f"{FLAG}: lm-evaluation-harness is not installed; pip install 'taut[eval]'"
        )


def check_harness_path(path: Path | None) -> None:
    """Refuse a directory of task definitions that is not there.

    Raises:
        CouldNotValidateError: no such directory.
    """
    if path is not None and not path.is_dir():
        raise CouldNotValidateError(f"--lm-eval-path {path}: no such directory")
