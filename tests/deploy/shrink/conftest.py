"""A tiny model, recipes and policies for the tests of ``taut shrink``; no real LLM, no worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from taut_deploy import cli

sys.path.insert(0, str(Path(__file__).parent))

from shrink_room import Room, write_room


@pytest.fixture(scope="session")
def room(tmp_path_factory) -> Room:
    """``model/``, ``text.txt``, recipes and policies; see :func:`shrink_room.write_room`."""
    path = tmp_path_factory.mktemp("shrink")
    write_room(path)
    return Room(path)


@pytest.fixture
def run(room, monkeypatch, capfd, charts_undrawn):
    """Calls ``taut`` in the room; returns exit code, standard output and standard error."""
    monkeypatch.chdir(room.path)
    monkeypatch.setenv("TAUT_HOME", str(room.path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    torch.set_num_threads(1)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["taut", *arguments])
        code = cli.main()
        out, err = capfd.readouterr()
        return code, out, err

    return call
