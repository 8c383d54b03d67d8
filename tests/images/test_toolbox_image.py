"""The toolbox's image: fetches, compresses, and its exit codes are the command's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from built_images import MODEL, image, pip_options, quick_recipe
from container_engine import engine

pytestmark = pytest.mark.timeout(1800)
HARDENED = (
    *("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/scratch", "--memory", "6g"),
    *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--pids-limit", "512"),
)


@pytest.fixture(scope="module")
def volume() -> Iterator[str]:
    """A new volume, as compose makes one: it takes its owner from the image."""
    name = engine().podman("volume", "create").stdout.strip()
    yield name
    engine().podman("volume", "rm", "--force", name)


def taut(volume: str, *arguments: str, options: tuple[str, ...] = ()):
    mounts = ("-v", f"{volume}:/models", *options)
    return engine().podman(
        "run", "--rm", *HARDENED, *mounts, image("toolbox"), *arguments, timeout_s=900, check=False
    )


def test_toolbox_fetches_a_model_into_a_new_volume(volume: str, tmp_path: Path):
    fetched = taut(volume, "model", "fetch", MODEL, "--json", options=tuple(pip_options()))
    assert fetched.returncode == 0, fetched.stderr
    assert json.loads(fetched.stdout)["path"] == f"/models/models/{MODEL}"
    output = f"--output=/models/checkpoints/{MODEL}"
    # A plan compresses one block: it fetches the calibration's text as the run would.
    mounted = ("-v", f"{quick_recipe(tmp_path)}:/recipe.yaml:ro", *pip_options())
    recipe = ("--recipe", "/recipe.yaml", output, "--plan")
    planned = taut(volume, "compress", MODEL, *recipe, options=mounted)
    assert planned.returncode == 0, planned.stderr


def test_toolbox_names_a_mistake_and_keeps_the_exit_code(volume: str):
    wrong = taut(volume, "compress", "no-such-model", "--recipe", "w8a8", "--output", "/models/x")
    lines = [line for line in wrong.stderr.splitlines() if line.startswith("taut: ")]
    assert (wrong.returncode, len(lines)) == (2, 1)
    assert "no-such-model" in lines[0]
    could_not = taut(volume, "validate", "--baseline", "/models/a", "--candidate", "/models/b")
    assert could_not.returncode == 3


def test_toolbox_has_no_vllm_and_no_compiler(volume: str):
    look = "import importlib.util as u, shutil as s; print(u.find_spec('vllm'), s.which('g++'))"
    done = engine().podman("run", "--rm", "--entrypoint", "python3", image("toolbox"), "-c", look)
    assert done.stdout.strip() == "None None"
