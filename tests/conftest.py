"""What every suite starts with."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from check_server import CheckServer

OF_ENGINES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1"}
"""What tiny models are served with: a small cache, no warm-up, no question to a hub."""
OF_MODELS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""What tiny models are loaded with."""
OF_COMMANDS = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""What ``taut`` sets before it imports transformers, which reads them then."""


def pytest_configure() -> None:
    """Take SIGINT again where the shell that started the suite has it ignored.

    A shell without job control starts background commands that way (POSIX: asynchronous lists),
    `execve` hands an ignored signal on, and Python then leaves it ignored: a command under test
    would not hear the Ctrl-C a test sends, and the test would wait for it in vain.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _refuse_stale_code()


def _refuse_stale_code() -> None:
    """End the run if the gateway's compiled modules are not those of its sources."""
    file = Path(__file__).parents[1] / "service" / "compile.py"
    spec = importlib.util.spec_from_file_location("taut_compile", file)
    assert spec is not None and spec.loader is not None
    compiling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiling)
    if compiling.outputs() and not compiling.is_current():
        pytest.exit("the gateway's sources changed: run python service/compile.py", returncode=4)


@pytest.fixture(scope="session")
def run_with_vllm(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run a script (or ``-c CODE``) in a process that has vLLM imported: see with_vllm.py.

    ``env`` comes on top of this environment without what asks vLLM or our kernels for something.
    """
    asking = ("TAUT_", "VLLM_", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(asking)}
    yield from _running("with_vllm", tmp_path_factory, {**kept, **OF_ENGINES})


@pytest.fixture(scope="session")
def run_with_transformers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run code in a process that has torch and transformers imported: see with_transformers.py."""
    yield from _running("with_transformers", tmp_path_factory, {**os.environ, **OF_MODELS})


@pytest.fixture(scope="session")
def run_with_compressor(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run code in a process that has the compressor imported: see with_compressor.py."""
    known = {**os.environ, **OF_MODELS, **OF_COMMANDS}
    yield from _running("with_compressor", tmp_path_factory, known)


@pytest.fixture(scope="session")
def fork_taut(run_with_compressor) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``taut ARGUMENTS`` as a process of its own, but for its start: a fork with its imports.

    Settings that libraries read as they are imported are the compressor's; ``first`` is code that
    precedes the command.
    """

    def run(
        folder: Path, *arguments: object, first: str = "", **more: Any
    ) -> subprocess.CompletedProcess[str]:
        return run_with_compressor(_TAUT, folder, first, *arguments, **more)

    return run


_TAUT = """
import os, sys
from taut_deploy import cli
_, folder, first, *arguments = sys.argv
os.chdir(folder)
sys.argv = ["taut", *arguments]
exec(compile(first, "<first>", "exec"))
sys.exit(cli.main())
"""


def _running(
    name: str, folders: pytest.TempPathFactory, environment: dict[str, str]
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run arguments in forks of one process, which the first starts; ``env`` comes on top."""
    servers: list[CheckServer] = []

    def run(
        *arguments: object,
        env: dict[str, str] | None = None,
        timeout: int = 580,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        if not servers:
            script = Path(__file__).parent / "forks" / f"{name}.py"
            of_server = {**environment, "PYTHONSAFEPATH": "1"}
            servers.append(CheckServer(script, of_server, folders.mktemp(name)))
        return servers[0].run([*map(str, arguments)], timeout, env, stdin)

    yield run
    for server in servers:
        server.close()
