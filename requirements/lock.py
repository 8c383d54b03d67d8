"""Write the hashes of the locked set: ``lock.py`` rewrites, ``lock.py --check`` only compares.

For each ``name==version`` of ``requirements/*.txt`` the package index is asked for the files of
that version. Kept are the hashes of wheels that CPython 3.11 takes on Linux (glibc), x86-64 and
aarch64; the source archive's as well where a machine has no wheel. What images are made of must
have a wheel for both machines, or a marker that leaves one of them out: images are built for both,
and nothing is compiled in them but the gateway. To move a version, write it into the file and run
this with the interpreter of ``.venv``.

The index is the ``index-url`` of pip's settings; ``extra-index-url`` and ``find-links`` are left
out: what lies there may be another build of the same version. A build that is not of that index (a
version with ``+``, see ``torch-cpu.txt``) keeps the hashes it has.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pip._internal.models.index import PyPI

FOLDER = Path(__file__).resolve().parent
_JSON = "application/vnd.pypi.simple.v1+json"
_MACHINES = ("x86_64", "aarch64")
_IN_IMAGES = frozenset({"build", "compile", "cpu", "deploy", "otel", "service", "toolbox"})
"""Locks that docker/build.py installs."""
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s\\;]+)")
Files = list[dict[str, object]]
Index = Callable[[str], Files]


class LockError(Exception):
    """A lock cannot be written; one line for the user."""


def machines(tags: Iterable[Tag]) -> set[str]:
    """Which of our machines take a wheel with these tags, on CPython 3.11.

    Args:
        tags: as the wheel's file name has them.

    Returns:
        Of ``x86_64`` and ``aarch64``.
    """
    found: set[str] = set()
    for tag in tags:
        if not _for_this_python(tag.interpreter, tag.abi):
            continue
        if tag.platform == "any":
            found.update(_MACHINES)
        for machine in _MACHINES:
            if re.fullmatch(rf"(?:many)?linux(?:\d|_\d+_\d+)?\w*_{machine}", tag.platform):
                found.add(machine)
    return found


def _for_this_python(interpreter: str, abi: str) -> bool:
    known = re.fullmatch(r"(cp|py)3(\d*)", interpreter)
    if known is None:
        return False
    minor = int(known[2] or 0)
    if abi == "cp311":
        return interpreter == "cp311"
    if abi == "abi3":
        return known[1] == "cp" and minor <= 11
    return abi == "none" and (minor <= 11 if known[1] == "py" else minor in (0, 11))


def hashes_of(name: str, version: str, files: Files, *, every_machine: bool = False) -> list[str]:
    """Choose the sha256 of what may be installed for a pin.

    Args:
        name: of the package.
        version: exactly this one.
        files: the index's list, ``filename`` and ``hashes`` of each.
        every_machine: whether each of our machines must have a wheel.

    Returns:
        Hex digests, sorted.

    Raises:
        LockError: nothing of that version fits, or a file that fits has no sha256, or a machine
            has no wheel that must have one.
    """
    chosen: list[dict[str, object]] = []
    sources: list[dict[str, object]] = []
    covered: set[str] = set()
    for file in files:
        filename = str(file["filename"])
        try:
            if filename.endswith(".whl"):
                _, found, _, tags = parse_wheel_filename(filename)
                fits = machines(tags)
                if found == Version(version) and fits:
                    covered |= fits
                    chosen.append(file)
            elif parse_sdist_filename(filename)[1] == Version(version):
                sources.append(file)
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
            continue  # an old kind of file, which pip does not take either
    without = [machine for machine in _MACHINES if machine not in covered]
    if without and every_machine:
        raise LockError(
            f"{name}=={version}: no wheel for {without[0]}, for which images are built as well;"
            ' take another version, or a marker such as ; platform_machine == "x86_64"'
        )
    if without:
        chosen += sources
    digests = [_sha256(file) for file in chosen]
    if not digests:
        raise LockError(f"{name}=={version}: the index has no file of it that CPython 3.11 takes")
    return sorted(digests)


def _sha256(file: Mapping[str, object]) -> str:
    hashes = file.get("hashes")
    if not isinstance(hashes, dict) or "sha256" not in hashes:
        raise LockError(f"{file['filename']}: the index gives no sha256 for it")
    return str(hashes["sha256"])


def locked_text(text: str, index: Index, *, every_machine: bool = False) -> str:
    """Rewrite a lock file with the hashes of an index.

    Args:
        text: the file; comments and ``-r`` lines stay.
        index: package name → its files.
        every_machine: see :func:`hashes_of`; of pins without a marker.

    Raises:
        LockError: a line is no exact pin, or its hashes cannot be had.
    """
    lines = re.sub(r"\\\n", " ", text).splitlines()
    with ThreadPoolExecutor(8) as pool:
        return "".join(pool.map(lambda line: _locked_line(line, index, every_machine), lines))


def _locked_line(line: str, index: Index, every_machine: bool) -> str:
    if not line.strip() or line.startswith(("#", "-r ")):
        return f"{line}\n"
    pin = _PIN.match(line)
    if pin is None:
        raise LockError(f"{line!r}: not an exact pin NAME==VERSION")
    name, version = pin["name"], pin["version"]
    # Of one machine only: the marker that says so stays.
    marker = line.partition("--hash")[0].partition(";")[2].strip()
    if "+" in version:
        hashes = re.findall(r"--hash=sha256:(\w+)", line)
    else:
        wanted = every_machine and not marker
        hashes = hashes_of(name, version, index(name), every_machine=wanted)
    if not hashes:
        raise LockError(f"{name}=={version}: of another index; write its --hash= by hand")
    pinned = f"{name}=={version} ; {marker}" if marker else f"{name}=={version}"
    return " \\\n".join([pinned, *(f"    --hash=sha256:{one}" for one in hashes)]) + "\n"


def pip_setting(name: str) -> str | None:
    """What pip's settings say; None where they say nothing.

    Args:
        name: such as ``index-url``.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    said = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"^(?:\S+\.)(\S+)='(.*)'$", said, re.MULTILINE))
    value = found.get(name)
    return str(value) if value else None


def index_of_pip() -> Index:
    """The package index that pip asks first, through its JSON form."""
    address = urllib.parse.urlsplit(pip_setting("index-url") or PyPI.simple_url)
    context = ssl.create_default_context(cafile=pip_setting("cert"))
    headers = {"Accept": _JSON}
    if address.username:
        both = urllib.parse.unquote(f"{address.username}:{address.password or ''}")
        headers["Authorization"] = f"Basic {base64.b64encode(both.encode()).decode()}"
    host = address.netloc.rpartition("@")[2]
    root = urllib.parse.urlunsplit((address.scheme, host, address.path.rstrip("/"), "", ""))

    def files_of(name: str) -> Files:
        project = re.sub(r"[-_.]+", "-", name).lower()
        # The address is pip's own; a scheme other than https is the user's choice there.
        request = urllib.request.Request(f"{root}/{project}/", headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:  # noqa: S310
                if not answer.headers.get("Content-Type", "").startswith(_JSON):
                    raise LockError(f"{name}: the index has no JSON form (PEP 691)")
                files: Files = json.load(answer)["files"]
        except (urllib.error.URLError, TimeoutError, ValueError) as error:
            raise LockError(f"{name}: the index does not answer ({error})") from error
        return files

    return files_of


def main(arguments: list[str], index: Index | None = None, folder: Path = FOLDER) -> int:
    """Rewrite or check the locks.

    Args:
        arguments: of the command line.
        index: instead of pip's.
        folder: with the ``*.txt``.

    Returns:
        Exit code: 1 where ``--check`` finds a difference or a hash cannot be had.
    """
    parser = argparse.ArgumentParser(description="Write the hashes into requirements/*.txt.")
    parser.add_argument("--check", action="store_true", help="change nothing, say what differs")
    check = parser.parse_args(arguments).check
    index = index or index_of_pip()
    differs = False
    for file in sorted(folder.glob("*.txt")):
        before = file.read_text()
        try:
            after = locked_text(before, index, every_machine=file.stem in _IN_IMAGES)
        except LockError as error:
            print(f"lock: {file.name}: {error}", file=sys.stderr)  # noqa: T201
            return 1
        if before == after:
            continue
        differs = True
        if not check:
            file.write_text(after)
        known = set(before.splitlines())
        changed = [line for line in after.splitlines() if line not in known]
        gone = len(known - set(after.splitlines()))
        print(f"lock: {file.name}: {len(changed)} lines to add, {gone} to drop")  # noqa: T201
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
