"""The wheels that each image's locks name, downloaded by this machine's pip."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from platforms import MACHINES, BuildError, is_foreign

_REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
LOCKS = {
    "gateway": ("otel",),
    "worker-cpu": ("deploy", "cpu"),
    "toolbox": ("deploy", "toolbox"),
    "worker-cuda": (),  # what it needs is in vLLM's image
}
WITH_TORCH = frozenset({"worker-cpu", "toolbox"})
COMPILED = frozenset({"gateway"})
_GLIBC = range(17, 37)
"""Minor versions of glibc whose wheels Debian 12 takes: pip asks for each by name."""


def download_wheels(
    images: Sequence[str], folder: Path, python: str = sys.executable, platform: str | None = None
) -> None:
    """Fill ``folder`` with the wheels of the locks, by this machine's pip; skipped if it is full.

    Args:
        images: whose locks.
        folder: gets the wheels of one platform; those of another are removed.
        python: whose pip downloads.
        platform: as Docker spells it; None for this machine's.

    Raises:
        BuildError: pip does not find one, or one with another hash.
    """
    locks = ["build", *(lock for image in images for lock in LOCKS[image])]
    if not WITH_TORCH.isdisjoint(images):
        locks.append("torch-cpu")
    if not COMPILED.isdisjoint(images):
        locks.append("compile")
    files = with_included([_REQUIREMENTS / f"{lock}.txt" for lock in dict.fromkeys(locks)])
    text = "".join(file.read_text() for file in files)
    options: list[str] = []
    if platform is not None and is_foreign(platform):
        text = pins_of(text, MACHINES[platform])
        options = target_options(MACHINES[platform])
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("-r "))
    wanted = hashlib.sha256((text + " ".join(options)).encode()).hexdigest()
    mark = folder / ".locks"
    if mark.is_file() and mark.read_text() == wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    pip += ["--no-deps", "--require-hashes", "--only-binary=:all:", *options]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write(text)
        pins.flush()
        command = [*pip, "--dest", str(folder), "--requirement", pins.name]
        if subprocess.run(command, check=False).returncode:
            raise BuildError(f"failed: {' '.join(command)}")
    mark.write_text(wanted)


def target_options(machine: str) -> list[str]:
    """What tells pip to choose for CPython 3.11 on a machine that is not its own."""
    tags = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in _GLIBC), "linux"]
    options = ["--implementation", "cp", "--python-version", "3.11"]
    return options + [part for tag in tags for part in ("--platform", f"{tag}_{machine}")]


def pins_of(text: str, machine: str) -> str:
    """Lock text without pins of other machines: pip asks a marker of where it runs itself.

    Raises:
        BuildError: a pin has a marker that is not ``platform_machine == "…"``.
    """
    kept = []
    for pin in re.split(r"\n(?=\S)", text):
        line = pin.partition("--hash")[0]
        _, _, marker = line.partition(";")
        if marker and not line.startswith("#"):
            found = re.fullmatch(r'\s*platform_machine == "(\w+)"\s*\\?\s*', marker)
            if found is None:
                raise BuildError(f"requirements: {line.strip()}: a marker that is not understood")
            if found[1] != machine:
                continue
            pin = pin.replace(f";{marker}", "\\\n    ")  # noqa: PLW2901
        kept.append(pin)
    return "\n".join(kept)


def with_included(files: Iterable[Path]) -> list[Path]:
    """These lock files and those they include, each once."""
    found: dict[Path, None] = {}
    todo = list(files)
    while todo:
        file = todo.pop()
        if file not in found:
            found[file] = None
            names = re.findall(r"^-r (.+)$", file.read_text(), re.MULTILINE)
            todo += [file.parent / name for name in names]
    return sorted(found)
