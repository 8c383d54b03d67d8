"""OpenMP's threads sleep while they wait, where nobody chose otherwise and in no child process."""

import os
import subprocess
import sys

import pytest

from taut_deploy.idle_threads import load_torch

LOADED = "from taut_deploy.commands import {0}; {0}.load_torch(); import os, torch"
TOLD = "print(os.environ.get('OMP_WAIT_POLICY'))"


def test_torch_is_loaded_with_threads_that_sleep_and_children_are_not_told() -> None:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
    environment |= {"OMP_DISPLAY_ENV": "true", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"{LOADED.format('validate')}; {TOLD}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr, done.stderr
    assert done.stdout.split() == ["None"]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_a_user_has_chosen_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(other, raising=False)
    seen = []
    load_torch(lambda: seen.append(os.environ.get("OMP_WAIT_POLICY")))
    monkeypatch.setenv(name, "7")
    load_torch(lambda: seen.append(os.environ.get("OMP_WAIT_POLICY")))
    assert seen == ["passive", "7" if name == "OMP_WAIT_POLICY" else None]
    assert os.environ[name] == "7"
