"""The compiled hot path and the Python it was compiled from: the same bytes, and both tested."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from taut_service.built import how_built

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "service"
PYTHON_TOO = ["test_sse.py", "test_splice.py", "test_framing.py", "test_bad_input.py"]
"""Run on Python as well: events, what is changed in them, bounds, refusals."""
PATCHED = [
    "guard/test_guard.py::test_a_drawn_request_goes_the_way_of_all_others",
    "test_client_exchange.py::test_the_shortcuts_are_taken",
    "test_flow.py::test_streams_take_the_short_way",
]
"""Replace methods, which compiled classes do not allow."""
_STREAMS = """
import random
from taut_service.built import how_built
from taut_service.http.framing import Framing
from taut_service.http.rewrite import Rewrite
from taut_service.http.sse import SseReframer, read_usage
from taut_service.http.splice import find_models, model_edits, with_edits

chance = random.Random(20261128)
pieces = [
    b'data: {"model":"w8a8","choices":[{"delta":{"content":"a\\\\u00e9\\\\"b"}}]}', b"data: [DONE]",
    b'data: {"model" : "w8a8","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}',
    b'event: x\\ndata: {"response":{"model":"w8a8","usage":{"input_tokens":3}}}', b": ping",
    b"data: {", b'{"usage"', b"\\r", b"", b'data: {"model":"w8a8","model":"other"}', b"\\xff\\x00",
]
for number in range(600):
    mixed = [b"\\n\\n", b"\\r\\r", b"\\n", b"\\r\\n\\n"]
    ends = chance.choice([[b"\\n\\n"], [b"\\r\\n\\r\\n"], mixed])
    stream = b"".join(
        chance.choice(pieces) + chance.choice(ends) for _ in range(chance.randrange(1, 12))
    )
    within = chance.choice(["", "response"])
    rewrite = chance.choice([None, Rewrite(b'"m"', chance.random() < 0.5, within)])
    reframer = SseReframer(count_text=chance.random() < 0.5, rewrite=rewrite)
    given, at = [], 0
    while at < len(stream):
        size = chance.choice([1, 2, 7, 40, 1000])
        given.append(reframer.feed(stream[at : at + size]))
        at += size
    print(given, reframer.flush(), reframer.events, reframer.text_bytes, end=" ")
    print(reframer.usage, reframer.whole)
    print(read_usage(stream))
    name = chance.choice([b'"w"', b'"\\\\u0077"', b"null"])
    body = b'{"a":{"model":"x"},"model":%b,"n":1e999}' % name
    print(with_edits(body, model_edits(body, find_models(body), "m")))
"""


@pytest.fixture(scope="module")
def python_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package without what was compiled."""
    folder = tmp_path_factory.mktemp("python")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(SERVICE / "taut_service", folder / "taut_service", ignore=ignored)
    return folder


def _run(arguments: list[str], path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def _compiling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("taut_compile", SERVICE / "compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_suite_runs_what_was_compiled() -> None:
    compiling = _compiling()
    assert how_built() == ("compiled" if compiling.outputs() else "python")
    if not compiling.outputs():
        pytest.skip("the gateway is not compiled here")
    assert compiling.is_current(), "make compiled"


def test_every_split_gives_the_same_bytes_compiled_and_not(python_only: Path) -> None:
    if how_built() == "python":
        pytest.skip("the gateway is not compiled here")
    says = "from taut_service.built import how_built; print(how_built())"
    assert _run(["-c", says], python_only) == "python\n"
    assert _run(["-c", says], SERVICE) == "compiled\n"
    plain, compiled = _run(["-c", _STREAMS], python_only), _run(["-c", _STREAMS], SERVICE)
    assert plain.count("\n") == 1800
    assert compiled == plain


def test_python_alone_passes_too(python_only: Path) -> None:
    if how_built() == "python":
        pytest.skip("the gateway is not compiled here: the suite itself runs Python")
    files = [f"tests/service/{name}" for name in [*PYTHON_TOO, *PATCHED]]
    said = _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files], python_only)
    assert " passed" in said and "skipped" not in said, said[-2000:]


def test_a_stale_module_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = _compiling()
    package = tmp_path / "taut_service"
    package.mkdir()
    monkeypatch.setattr(compiling, "ROOM", tmp_path)
    monkeypatch.setattr(compiling, "SOURCES", package / "compiled_from.json")
    monkeypatch.setattr(compiling, "MODULES", ("call.py",))
    source = package / "call.py"
    source.write_text("A = 1\n")
    assert not compiling.is_current()
    for name in (package / "call.cpython-311.so", tmp_path / "taut_service_native__mypyc.a.so"):
        name.write_bytes(b"")
    compiling.SOURCES.write_text(compiling.json.dumps(compiling.digests()))
    assert compiling.is_current()
    source.write_text("A = 2\n")
    assert not compiling.is_current()
    compiling.remove()
    assert compiling.outputs() == [] and source.is_file()
