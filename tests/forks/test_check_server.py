"""A fork is a process as any: it has what it is given to read, and ends as Python would."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from check_server import CheckServer

SCRIPT = """
import os, signal, sys

def main(names):
    (what,) = names
    if what == "read":
        print(repr(sys.stdin.read()), os.environ.get("TOLD"))
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raises":
        raise ValueError("of the check")
    else:
        sys.exit({"nothing": None, "two": 2, "words": "one line"}[what])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckServer]:
    folder = tmp_path_factory.mktemp("server")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    server = CheckServer(script, {**os.environ, "PYTHONSAFEPATH": "1"}, folder)
    yield server
    server.close()


def test_a_check_reads_what_it_is_given_and_none_of_the_next_requests(server: CheckServer) -> None:
    first = server.run(["read"], 60, stdin="y\nno\n")
    assert first.stdout == "'y\\nno\\n' None\n"
    assert server.run(["read"], 60, {"TOLD": "so"}).stdout == "'' so\n"


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("nothing", 0, ""),
        ("two", 2, ""),
        ("words", 1, "one line\n"),
        ("killed", -9, ""),
        ("raises", 1, "ValueError: of the check\n"),
    ],
)
def test_a_check_ends_as_a_python_of_its_own(
    what: str, status: int, said: str, server: CheckServer
) -> None:
    done = server.run([what], 60)
    assert done.returncode == status
    assert done.stderr.endswith(said) and bool(done.stderr) == bool(said)
