"""docker/install_locked.sh compiled: with a Python that only writes down what it is asked."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from container_engine import REPOSITORY

SCRIPT = REPOSITORY / "docker" / "install_locked.sh"
# "compile.py" makes what COMPILES names, or fails as mypy's refusal does.
PYTHON = r"""#!/bin/bash
case "$*" in
  "-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python"; cp "$0" "${@: -1}/bin/pip" ;;
  *service/compile.py)
    echo "compile: said why" >&2
    [ -n "${COMPILES-}" ] || exit 1
    for file in $COMPILES; do echo binary > "$file"; done ;;
  *" install "*) printf '%s\n' "$*" >> "$ASKED" ;;
esac
"""
MADE = (
    "service/taut_service_native__mypyc.so",
    "service/taut_service/http/sse.so",
    "service/taut_service/compiled_from.json",
)


@dataclass(frozen=True)
class Step:
    root: Path

    def run(self, **environment: str) -> str:
        """Run the step; returns what it said."""
        done = subprocess.run(
            ["bash", "docker/install_locked.sh", "compiled", "out", "a.txt", "b.txt"],
            cwd=self.root,
            env={
                "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
                "ASKED": str(self.root / "asked"),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def made(self) -> set[str]:
        out = self.root / "out"
        return {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}


@pytest.fixture
def step(tmp_path: Path) -> Step:
    for folder in ("bin", "docker", "service/taut_service/http"):
        (tmp_path / folder).mkdir(parents=True)
    text = SCRIPT.read_text()
    for place in ("/tmp/tools", "/opt/taut"):
        assert f"={place}" in text
        text = text.replace(place, str(tmp_path / Path(place).name))
    (tmp_path / "docker" / SCRIPT.name).write_text(text)
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    (tmp_path / "service/taut_service/http/sse.py").write_text("")
    return Step(tmp_path)


def test_what_was_compiled_and_nothing_else_is_handed_on(step: Step):
    said = step.run(TAUT_COMPILE="1", COMPILES=" ".join(MADE))
    assert "the gateway's hot path is compiled" in said
    assert step.made() == set(MADE)
    asked = (step.root / "asked").read_text().splitlines()
    assert [line.split()[-3:] for line in asked] == [
        ["--require-hashes", "-r", "a.txt"],
        ["--require-hashes", "-r", "b.txt"],
    ]


def test_what_cannot_be_compiled_stays_python_and_that_is_loud(step: Step):
    said = step.run(TAUT_COMPILE="1")
    assert "compile: said why\nimage: THE GATEWAY STAYS PYTHON, for the reason above" in said
    assert "TAUT_COMPILE=0 leaves compiling out" in said
    assert step.made() == set()


@pytest.mark.parametrize("given", ["0", ""])
def test_left_out_it_costs_nothing(step: Step, given: str):
    said = step.run(TAUT_COMPILE=given)
    assert said == f"image: the gateway stays Python, as TAUT_COMPILE={given} says\n"
    assert step.made() == set()
    assert not (step.root / "asked").exists()
