"""The file in which a worker process leaves what its model runs on, and who else reads it.

The process that loads the model writes it; the API server of the same worker, which is another
process, reads it for the gauges on ``/metrics`` (:mod:`.gauges`).
``TAUT_KERNELS_REPORT`` names the file. Where nobody set the variable, the first process of a worker
does: its children inherit it. `taut doctor` does not read it: it asks beforehand, of a checkpoint,
what :mod:`.selection` decides.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from taut_kernels.launch.atomic_write import write_whole

REPORT_VARIABLE = "TAUT_KERNELS_REPORT"
FORMAT = 1
_logger = logging.getLogger(__name__)


def make_place() -> None:
    """Name a private file in the environment unless there is one; it goes when this process does.

    Called before vLLM starts its engine process, which inherits the name. A worker that is killed
    leaves its few kilobytes behind.
    """
    if os.environ.get(REPORT_VARIABLE):
        return
    # A directory of our own: the file's name could be guessed by other users of the machine.
    directory = tempfile.mkdtemp(prefix="taut-kernels-")
    os.environ[REPORT_VARIABLE] = str(Path(directory) / "record.json")
    atexit.register(_remove, directory, os.getpid())


def _remove(directory: str, owner: int) -> None:
    # A forked child inherits the exit handler, and must not take its parent's file away.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def place() -> Path | None:
    """Return the file's path, None where nobody named one."""
    named = os.environ.get(REPORT_VARIABLE)
    return Path(named) if named else None


def write(
    layers: list[dict[str, Any]],
    mode: str,
    path: Path,
    ops: dict[str, Any] | None = None,
    known_answers: list[dict[str, Any]] | None = None,
) -> None:
    """Write the record as JSON, atomically.

    Args:
        layers: one object a quantised layer, fields of `selection.LayerChoice`.
        mode: what the worker asked for.
        path: target file; its directory must exist.
        ops: record of :mod:`.fused_ops`, or None.
        known_answers: of :func:`.known_answer.results`, or None.

    Raises:
        OSError: the file cannot be written.
    """
    document: dict[str, Any] = {"format": FORMAT, "mode": mode, "layers": layers}
    if known_answers is not None:
        document["known_answers"] = known_answers
    if ops is not None:
        document["ops"] = ops
    _replace(path, document)


def amend(path: Path, ops: dict[str, Any]) -> None:
    """Replace parts of a record's ``ops``, for what turns out after loading.

    Args:
        path: of the record.
        ops: the parts, whole: tensor-parallel workers write the same ones over each other's.

    Raises:
        OSError: it cannot be read or written.
        ValueError: as :func:`read`.
    """
    document = read(path)
    document["ops"] = document.get("ops", {}) | ops
    _replace(path, document)


def correct(ops: dict[str, Any]) -> None:
    """Amend this worker's record, if there is one; log why where it cannot be, and go on.

    Args:
        ops: as for :func:`amend`.
    """
    try:
        path = place()
        # A record without ops is of a worker whose norms and attention nobody asked about.
        if path is not None and path.exists() and "ops" in read(path):
            amend(path, ops)
    except (OSError, TypeError, ValueError) as error:
        parts = ", ".join(ops)
        _logger.warning("the record says of %s what it did at loading: %s", parts, error)


def _replace(path: Path, document: dict[str, Any]) -> None:
    # Tensor-parallel workers write the same record at the same time.
    write_whole(path, json.dumps(document, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a record.

    Args:
        path: of the file.

    Returns:
        ``mode``, ``layers`` and, if the worker had any, ``ops``.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is no record of this format; names the file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path}: not a kernel record of format {FORMAT}")
    return document
