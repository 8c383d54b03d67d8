"""``config.json`` of a model that is a directory."""

from pathlib import Path
from typing import Any

from taut_deploy.documents import read_json_object
from taut_deploy.validate.errors import CouldNotValidateError


def read_config(path: Path, role: str) -> dict[str, Any]:
    """Read ``config.json`` of a model directory.

    Raises:
        CouldNotValidateError: no such directory, no configuration in it, or not JSON.
    """
    if not path.is_dir():
        raise CouldNotValidateError(
            f"--{role} {path}: no such directory (a server is given as http://host:port)"
        )
    file = path / "config.json"
    if not file.exists():
        raise CouldNotValidateError(f"--{role} {path}: no config.json, so not a model directory")
    return read_json_object(file, CouldNotValidateError)
