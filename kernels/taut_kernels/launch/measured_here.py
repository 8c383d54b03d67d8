"""Tables that were measured on this machine's own card: one file, named by ``TAUT_VERDICTS``.

The file is JSON::

    {"format": 3, "gpu": "<torch.cuda.get_device_name>", "driver": "…",
     "versions": {"torch": "…", …}, "source": "<command, date>",
     "tables": {"<name of a table>": [rows as in tiles/<card>.json], …}}

Its rows come before those that are shipped. It is written whole before a worker starts, and every
process of the worker reads it: the ranks of a tensor-parallel worker decide alike. `taut tune`
writes it, `taut worker` names it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from taut_kernels.launch.atomic_write import write_whole

VARIABLE = "TAUT_VERDICTS"
FORMAT = 3
_KEYS = {"format", "gpu", "driver", "versions", "source", "tables"}
_PACKAGES = ("taut", "torch", "triton", "vllm", "humming-kernels")
AGAIN = "measure again with 'taut tune'"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a time depends on apart from the product.

    Attributes:
        gpu: `torch.cuda.get_device_name`.
        driver: version of the card's driver.
        versions: of the packages that bring or compile kernels, by their names.
    """

    gpu: str
    driver: str
    versions: dict[str, str]

    def key(self, wanted: object) -> str:
        """Return a file name's part that is another for another machine or other products.

        Args:
            wanted: what is to be measured; as JSON takes it.
        """
        parts = [FORMAT, self.gpu, self.driver, sorted(self.versions.items()), wanted]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        card = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return f"{card}-{digest[:16]}"


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content.

    Attributes:
        machine: where it was measured.
        source: command and date.
        tables: name → rows.
    """

    machine: Machine
    source: str
    tables: dict[str, list[dict[str, Any]]]


def this_machine() -> Machine:
    """Return what times depend on here; the first card's.

    Raises:
        ValueError: there is no CUDA device, or the driver does not say its version.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError("no CUDA device to measure on")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"nvidia-smi does not tell the driver's version: {error}") from error
    drivers = done.stdout.split()
    if not drivers:
        raise ValueError("nvidia-smi does not tell the driver's version: it lists no card")
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(torch.cuda.get_device_name(), drivers[0], versions)


def read(path: Path) -> Document:
    """Read a file.

    Args:
        path: of the file.

    Raises:
        ValueError: it cannot be read or is no such file; names it, and the way out.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; {AGAIN}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); delete it and {AGAIN}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or set(data) != _KEYS:
        raise ValueError(f"{path}: no verdicts of format {FORMAT}; delete it and {AGAIN}")
    tables, versions = data["tables"], data["versions"]
    kinds = (isinstance(data[key], str) for key in ("gpu", "driver", "source"))
    if not (all(kinds) and isinstance(versions, dict) and isinstance(tables, dict)):
        raise ValueError(f"{path}: a field is of the wrong type; delete it and {AGAIN}")
    if not all(isinstance(table, list) for table in tables.values()):
        raise ValueError(f"{path}: a table is no list; delete it and {AGAIN}")
    rows = [row for table in tables.values() for row in table]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: a row is no object; delete it and {AGAIN}")
    return Document(Machine(data["gpu"], data["driver"], versions), data["source"], tables)


def write(path: Path, document: Document) -> None:
    """Write a file whole, by rename.

    Args:
        path: of the file; its directory is made if missing.
        document: what to write.

    Raises:
        OSError: it cannot be written.
    """
    machine = document.machine
    data = {
        "format": FORMAT,
        "gpu": machine.gpu,
        "driver": machine.driver,
        "versions": machine.versions,
        "source": document.source,
        "tables": document.tables,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, indent=1) + "\n")


def why_foreign(document: Document, machine: Machine) -> str | None:
    """Say what another machine a file is of; None where it is of this one.

    Args:
        document: of the file.
        machine: this one.
    """
    was, here = document.machine, machine
    pairs = {"card": (was.gpu, here.gpu), "driver": (was.driver, here.driver)}
    for name in sorted({*was.versions, *here.versions}):
        pairs[name] = (was.versions.get(name, "none"), here.versions.get(name, "none"))
    for what, (there, own) in pairs.items():
        if there != own:
            return f"measured with {what} {there}, here it is {own}"
    return None


def named() -> Path | None:
    """Return the file that ``TAUT_VERDICTS`` names; None where it is unset or empty."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


@cache
def _document(path: Path) -> Document:
    return read(path)


def rows(table: str) -> tuple[str, list[dict[str, Any]], str] | None:
    """Return a table of the named file.

    Args:
        table: its name.

    Returns:
        The card's name, the rows, and the file's name for errors; None where there is none.

    Raises:
        ValueError: the file is damaged; names it.
    """
    path = named()
    if path is None:
        return None
    document = _document(path)
    found = document.tables.get(table)
    return None if found is None else (document.machine.gpu, found, str(path))
