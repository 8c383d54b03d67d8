"""OpenMP's threads sleep while they wait, where nobody chose otherwise; not in what serves."""

import os
import subprocess
import sys

import pytest

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Like a command: what is imported on the way may ask whether torch is there, before it is loaded.
COMMAND = """
import importlib.util, inspect, os
from taut_deploy import cli

def load():
    assert importlib.util.find_spec("torch") is not None
    import torch
    print(repr(os.environ.get("OMP_WAIT_POLICY")), torch.ones(2).sum().item())
    assert inspect.getsource(torch.Tensor.backward) and torch.__spec__.loader is torch.__loader__

cli.app.command(name="load")(load)
cli.main(["load"])
"""

PROCESSES = """
from taut_deploy.compress.child_process import context_for

with context_for(["cpu", "cpu"]).Pool(1) as pool:
    print(pool.apply(eval, ("__import__('torch').ones(2).sum().item()",)))
"""


def settings_of(program: str = COMMAND, **chosen: str) -> tuple[str, str]:
    """What libgomp says it goes by where a program loads torch, and the program's first word."""
    environment = {name: text for name, text in os.environ.items() if name not in CHOICES}
    environment |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONSAFEPATH": "1", **chosen}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("2.0\n"), done.stdout
    return done.stderr, done.stdout.split()[0]


def test_every_command_loads_torch_with_threads_that_sleep_and_children_are_not_told() -> None:
    said, seen = settings_of()
    assert "GOMP_SPINCOUNT = '0'" in said, said  # it calls itself passive without a choice, too
    assert seen == "None"


@pytest.mark.parametrize("name", CHOICES)
def test_what_a_user_has_chosen_stays(name: str) -> None:
    chosen = "active" if name == "OMP_WAIT_POLICY" else "7"
    said, seen = settings_of(**{name: chosen})
    assert "GOMP_SPINCOUNT = '" in said, said
    assert "GOMP_SPINCOUNT = '0'" not in said, said
    assert seen == (repr(chosen) if name == "OMP_WAIT_POLICY" else "None")


def test_processes_of_a_run_have_threads_that_sleep_too() -> None:
    """Each of a training's processes on a CPU has several of them on a large machine."""
    said, _ = settings_of(PROCESSES)
    assert "GOMP_SPINCOUNT = '0'" in said, said
    assert said.count("GOMP_SPINCOUNT = '") == 1, "one process loads torch for all"
    said, _ = settings_of(PROCESSES, GOMP_SPINCOUNT="7")
    assert "GOMP_SPINCOUNT = '7'" in said, said
