"""Forms that helpers compile are found in Triton's cache; without a helper the thread compiles."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager

from taut_kernels.launch import compile_processes
from taut_kernels.launch.compile_processes import Compilers, Helpers
from taut_kernels.rowwise import chunk_jit

TARGET, ENV = GPUTarget("cuda", 90, 32), {"A": "1"}


def options_of() -> Any:
    return make_backend(TARGET).parse_options({"num_warps": 2})


def triton_asks(src: Any) -> Callable[[], Any]:
    """Return what Triton hands an executor: a closure over what is to be compiled."""
    target, env_vars, options = TARGET, ENV, options_of()

    def compile_() -> Any:
        return "compiled" if (src, target, options, env_vars) else None

    return compile_


def source_of(kernel: Any, number: int = 64) -> ASTSource:
    return ASTSource(kernel, {"x": "*bf16"}, {(1,): number}, {})


def some_kernel() -> Any:
    return next(each for each in vars(chunk_jit).values() if isinstance(each, triton.JITFunction))


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    found = Helpers(2)
    connections = [found._idle.get(timeout=120) for _ in range(2)]
    assert None not in connections
    for one in connections:
        found._idle.put(one)
    yield found
    while not found._idle.empty():
        if (one := found._idle.get()) is not None:
            one.close()
    connections.clear()
    assert found.process.wait(60) == 0, "helpers end with those who ask"


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No helpers, and a cache that is empty."""
    monkeypatch.setattr(compile_processes, "_helpers", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_every_form_that_helpers_compile_is_found_in_the_cache(tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(here / "compiled_by_helpers.py"), "4"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["compiled"] == 0
    assert found["found"] > 10
    assert sum(1 for _ in tmp_path.glob("*/*.cubin")) == found["found"]


def test_without_a_helper_the_thread_says_that_it_must_compile(
    helpers: Helpers, caplog: pytest.LogCaptureFixture
) -> None:
    children = Path(f"/proc/{helpers.process.pid}/task/{helpers.process.pid}/children")
    for helper in children.read_text().split():
        os.kill(int(helper), signal.SIGKILL)
    assert not any(helpers.compile(b"form") for _ in range(4))
    lost = "a process that compiles kernels is lost, this one does: "
    assert [record.getMessage().startswith(lost) for record in caplog.records] == [True, True]


def test_a_form_that_a_helper_cannot_compile_is_named_and_leaves_it_free(
    helpers: Helpers, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert not helpers.compile(b"no form")
    said = "a kernel is compiled here, since a process could not: UnpicklingError("
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True] * 3


def test_helpers_that_do_not_start_are_said_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = Helpers(2)
    assert [found.compile(b"form") for _ in range(3)] == [False] * 3
    found.process.wait(60)
    deadline = time.monotonic() + 60
    while len(caplog.records) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert {r.getMessage() for r in caplog.records} == {
        "a process to compile kernels did not start: EOFError()"
    }


@pytest.mark.parametrize(("count", "cached", "started"), [(8, 0, 1), (8, 2, 0), (2, 0, 0)])
def test_the_first_form_that_the_cache_has_not_starts_helpers(
    count: int, cached: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    asked: list[bytes] = []

    def start(count: int) -> SimpleNamespace:
        counts.append(count)
        return SimpleNamespace(compile=asked.append)

    monkeypatch.setattr(compile_processes, "Helpers", start)
    sources = [source_of(some_kernel(), number) for number in (64, 128)]
    for source in sources[:cached]:
        key = get_cache_key(source, make_backend(TARGET), options_of(), ENV)
        found = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        found.put_group(f"{source.name}.json", {})
    with Compilers(count) as pool:
        for source in sources:
            assert pool.submit(triton_asks(source)).result() == "compiled"
    assert counts == [count] * started
    assert len(asked) == 2 * started


def test_where_no_process_can_be_started_the_thread_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(count: int) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(compile_processes, "Helpers", refuse)
    assert compile_processes._compiled(triton_asks(source_of(some_kernel())), 8) == "compiled"


def test_what_a_helper_does_not_find_it_leaves() -> None:
    @triton.jit
    def local(x_ptr):
        pass

    assert compile_processes._request(lambda: None) is None
    request = compile_processes._request(triton_asks(source_of(local)))
    assert request is not None
    with pytest.raises(AttributeError):  # which ends a helper's try
        pickle.loads(request)


def test_a_kernel_is_told_so_that_its_key_is_the_same_there(tmp_path: Path) -> None:
    source = source_of(some_kernel())
    request = compile_processes._request(triton_asks(source))
    assert request is not None
    form, text, key, target, options, env_vars, cache = pickle.loads(request)
    kind, kernel, *kept = form
    assert (kind, kernel) == (ASTSource, some_kernel())
    assert (text, key, cache) == (kernel.src, kernel.cache_key, str(tmp_path))
    backend = make_backend(target)
    told = get_cache_key(kind(kernel, *kept), backend, backend.parse_options(options), env_vars)
    assert told == get_cache_key(source, backend, options_of(), ENV)


def test_a_kernel_whose_file_has_changed_is_left_to_the_thread(tmp_path: Path) -> None:
    request = compile_processes._request(triton_asks(source_of(some_kernel())))
    assert request is not None
    form, text, *rest = pickle.loads(request)
    with pytest.raises(ValueError, match="its file has changed"):
        compile_processes._compile(form, text + "\n", *rest)
    assert not list(tmp_path.glob("*/*.cubin"))
