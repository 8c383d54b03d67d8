"""Which torch `make setup` takes: requirements/install.sh with a Python that only writes down."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "requirements" / "install.sh"
# No torch is there; of what pip is asked for, it has what HAS matches.
PYTHON = r"""#!/bin/bash
words="$*"
case "$words" in
  "-m venv "*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-c import torch"*) exit 1 ;;
  *" install "*torch*)
    printf '%s\n' "${words#*install }" >> asked; echo "${SAYS-}" >&2; [[ $words =~ $HAS ]] ;;
  *" install "*) printf '%s\n' "${words#*install }" >> rest ;;
esac
"""
LOCKED = "--no-deps --require-hashes -r requirements/"
CPU = f"{LOCKED}torch-cpu.txt"
FROM_INDEX = f"{CPU} --index-url https://index.test"
ANY = f"{LOCKED}torch.txt"
LIBRARIES = "torch==2.13.0"


@dataclass(frozen=True)
class Setup:
    root: Path
    python: Path

    def run(self, has: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the script where pip has what the regular expression ``has`` matches."""
        inherited = {k: v for k, v in os.environ.items() if k != "TAUT_TORCH_INDEX"}
        return subprocess.run(
            ["bash", str(self.root / "requirements" / SCRIPT.name)],
            env=inherited | environment | {"PYTHON": str(self.python), "HAS": has},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def asked(self) -> list[str]:
        return (self.root / "asked").read_text().splitlines()


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    (tmp_path / "requirements").mkdir()
    shutil.copy(SCRIPT, tmp_path / "requirements")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return Setup(tmp_path, python)


def test_the_cpu_build_pips_settings_lead_to_comes_first(setup: Setup) -> None:
    done = setup.run("cpu", TAUT_TORCH_INDEX="https://index.test")
    assert done.returncode == 0, done.stderr
    assert setup.asked == [CPU]


def test_then_the_one_at_the_given_index(setup: Setup) -> None:
    done = setup.run("index-url", TAUT_TORCH_INDEX="https://index.test")
    assert done.returncode == 0, done.stderr
    assert setup.asked == [CPU, FROM_INDEX]


def test_an_index_without_it_is_an_error_not_gigabytes(setup: Setup) -> None:
    done = setup.run("torch.txt$", TAUT_TORCH_INDEX="https://index.test")
    assert done.returncode == 1
    assert "no CPU build of torch 2.13.0 at TAUT_TORCH_INDEX" in done.stderr
    assert setup.asked == [CPU, FROM_INDEX]


def test_without_one_the_index_s_torch_is_taken_and_its_size_said(setup: Setup) -> None:
    done = setup.run("torch.txt$|torch==")
    assert done.returncode == 0, done.stderr
    assert setup.asked == [CPU, ANY, LIBRARIES]
    assert "not checked against a hash: the CUDA libraries" in done.stderr
    assert "several GB" in done.stderr
    assert "TAUT_TORCH_INDEX" in done.stderr


def test_no_torch_at_all_is_said(setup: Setup) -> None:
    done = setup.run("^$")
    assert done.returncode == 1
    assert "pip finds no torch 2.13.0 at all" in done.stderr


@pytest.mark.parametrize("index", ["", "https://index.test"])
def test_a_torch_that_is_not_the_locked_one_ends_it(setup: Setup, index: str) -> None:
    said = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
    done = setup.run("torch.txt$|torch==", TAUT_TORCH_INDEX=index, SAYS=said)
    assert done.returncode == 1
    assert setup.asked == [CPU]
    assert "not the one of requirements/torch-cpu.txt" in done.stderr


def test_the_locked_set_is_installed_by_its_hashes(setup: Setup) -> None:
    done = setup.run("cpu")
    assert done.returncode == 0, done.stderr
    locked, ours = (setup.root / "rest").read_text().splitlines()
    assert locked == f"{LOCKED}cpu.txt -r requirements/dev.txt"
    assert ours.endswith("--editable .")


def test_torch_s_locks_hold_the_version_that_is_asked_for() -> None:
    version = re.search(r"^torch=(.+)$", SCRIPT.read_text(), re.MULTILINE)
    assert version is not None
    for name, pin in (("torch-cpu", f"torch=={version[1]}+cpu"), ("torch", f"torch=={version[1]}")):
        lines = (SCRIPT.parent / f"{name}.txt").read_text().splitlines()
        assert f"{pin} \\" in lines
        assert sum("--hash=sha256:" in line for line in lines) == 2  # x86-64 and aarch64
