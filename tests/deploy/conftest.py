"""Makes the modules beside the tests importable (pytest's importlib mode adds no folder to the
path), and keeps the tiny models of these tests on one thread."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """On tensors this small a second thread only waits, and for long on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fixed_kernels(monkeypatch):
    """Hashing our sources is another test's; the mode, set for the whole process, is put back."""
    monkeypatch.setenv("TAUT_KERNELS", "prefer")
    monkeypatch.setattr(
        "taut_kernels.vllm_plugin.cache_key",
        lambda verdicts=None: f"{os.environ['TAUT_KERNELS']}-0",
    )


@pytest.fixture
def call_taut(monkeypatch, capfd):
    """The command inside this process: its exit code, standard output and standard error."""
    from taut_deploy import cli

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["taut", *arguments])
        code = cli.main()
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    # A process that becomes a worker sets variables that it would not come back from.
    with mock.patch.dict(os.environ), as_quiet_as_a_command():
        yield call


@contextlib.contextmanager
def as_quiet_as_a_command():
    """Let transformers report what it does where a command imports it: it may have been before."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.fixture
def charts_undrawn(monkeypatch):
    """Pages without their charts, half a second a validation; validate_page/ has them drawn."""
    monkeypatch.setattr("taut_deploy.validate.page.charts._drawn", lambda *_: "<svg></svg>")
