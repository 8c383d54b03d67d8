"""A process that has its imports behind it and forks for each check; see forked_checks.py."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

RUN_SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Code that runs the script in its first argument, for servers whose ``main`` takes code."""


class CheckServer:
    """Runs checks of one script, each in a fork of the process that imported it.

    Args:
        script: its ``main`` takes names of checks.
        env: the whole environment that the script is imported in.
        folder: takes what the checks print.
    """

    def __init__(self, script: Path, env: Mapping[str, str], folder: Path) -> None:
        self._folder = folder
        self._errors = (folder / "import_errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_checks.py")), str(script)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(
        self,
        names: Sequence[str],
        timeout: int,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run checks in a fork; ``env`` comes on top of the server's environment."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        streams = {name: self._folder / name for name in ("stdin", "stdout", "stderr")}
        for name, path in streams.items():
            path.write_text(stdin if name == "stdin" else "")
        request = {"names": names, "timeout": timeout, "env": dict(env or {})}
        request |= {name: str(path) for name, path in streams.items()}
        with contextlib.suppress(BrokenPipeError):  # it ended in its imports: said below
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            self._errors.seek(0)
            return subprocess.CompletedProcess(names, 1, "", self._errors.read())
        out, errors = (streams[name].read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(names, int(answer), out, errors)

    def close(self) -> None:
        """End the process; what it forks has ended with its answer."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()
