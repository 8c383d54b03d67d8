"""Pages that are made from code are current, and code that pages show runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATOR = ROOT / "docs" / "generate_settings.py"


def blocks(name: str, language: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", text)


def test_the_page_of_settings_is_current() -> None:
    command = [sys.executable, str(GENERATOR), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_setting_without_a_meaning_and_a_meaning_without_a_setting_are_named(
    tmp_path: Path,
) -> None:
    for name in ("generate_settings.py", "gateway-settings.yaml", "gateway-settings.md"):
        (tmp_path / name).write_bytes((ROOT / "docs" / name).read_bytes())
    command = [sys.executable, str(tmp_path / GENERATOR.name), "--check"]
    meanings = tmp_path / "gateway-settings.yaml"
    whole = meanings.read_text(encoding="utf-8")

    meanings.write_text(whole + "admission.imagined: nothing\n", encoding="utf-8")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "admission.imagined" in done.stderr) == (1, True)

    meanings.write_text(re.sub(r"(?m)^drain_timeout_s:.*\n", "", whole), encoding="utf-8")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "drain_timeout_s" in done.stderr) == (1, True)


def test_the_kernels_code_block_runs() -> None:
    (block,) = blocks("kernels/README.md", "python")
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shape, error = re.fullmatch(r"(\(\d+, \d+\)) ([\d.]+)\n", done.stdout).groups()  # type: ignore[union-attr]
    assert shape == "(4, 256)"
    assert 0 < float(error) < 4e-3  # one rounding to bf16 is 2⁻⁹ at most


def test_the_gateways_example_file_is_accepted(tmp_path: Path) -> None:
    (block,) = blocks("service/README.md", "yaml")
    file = tmp_path / "gateway.yaml"
    file.write_text(block, encoding="utf-8")
    command = [sys.executable, "-m", "taut_service", "--config", str(file), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 worker(s)" in done.stdout


@pytest.mark.parametrize("place", ["docs/architecture.md"])
def test_files_that_are_named_exist(place: str) -> None:
    text = (ROOT / place).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/-]+\.(?:py|yaml|json|md))`", text)) - {
        "taut.json",
        "config.json",
    }
    assert len(named) > 30
    known = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert {
        name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in known)
    } == set()
