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


TYPES = """
import forked_checks

before = said()
forked_checks.remember_types()
for _ in range(2):
    assert said() == before, (before, said())
print(len(before))
"""
SAID = """
import numpy as np
import triton.language.core as core
from triton.runtime import interpreter

def refused(element, shape):
    try:
        core.block_type(element, shape)
    except (AssertionError, TypeError, ValueError) as error:
        return repr(error)

def said():
    kinds = [core.float16, core.int32, core.pointer_type(core.float32)]
    blocks = [core.block_type(kind, shape) for kind in kinds for shape in ([4], [2, 8])]
    blocks += [core.block_type(core.int8, [core.constexpr(4), 2]), core.block_type(core.int1, [2])]
    blocks += [core.block_type(core.int1, blocks[1].shape)]
    tensors = [core.tensor(None, kind) for kind in (*kinds, *blocks)]
    values = [3, core.constexpr(3), [core.constexpr(1), 2], (core.constexpr(4),), None, "a"]
    return [
        *[(str(b), list(b.shape.values), b.numel, str(b.element_ty)) for b in blocks],
        *[([s.value for s in t.shape], t.numel.value, str(t.dtype), str(t.type)) for t in tensors],
        *[refused(core.int32, shape) for shape in ([3], [], [2**40], [1.5], (4,))],
        *[core._unwrap_if_constexpr(value) for value in values],
        *[interpreter._get_np_dtype(kind) for kind in (*kinds, *blocks)],
    ]
"""


def test_the_interpreters_types_are_the_same_when_they_are_remembered(
    tmp_path: Path,
) -> None:
    script = tmp_path / "compared.py"
    script.write_text(f"{SAID}\ndef main(names):\n" + TYPES.replace("\n", "\n    "))
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    server = CheckServer(script, environment, tmp_path)
    done = server.run(["types"], 120)
    server.close()
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 9 + 12 + 5 + 6 + 12
