"""Makes the modules beside the tests importable (pytest's importlib mode adds no folder to the
path), and keeps the tiny models of these tests on one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from check_server import CheckServer

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """On tensors this small a second thread only waits, and for long on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run_with_transformers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run code in a process that has torch and transformers imported: see with_transformers.py."""
    yield from _running("with_transformers", tmp_path_factory)


@pytest.fixture(scope="session")
def run_with_compressor(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run code in a process that has the compressor imported: see with_compressor.py."""
    yield from _running("with_compressor", tmp_path_factory)


def _running(
    name: str, folders: pytest.TempPathFactory
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run code in forks of one process; ``env`` comes on top of this environment."""
    script = Path(__file__).parents[1] / "forks" / f"{name}.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    server = CheckServer(script, environment, folders.mktemp(name))

    def run(
        code: str, *arguments: object, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return server.run([code, *map(str, arguments)], 580, env)

    yield run
    server.close()


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

    return call
