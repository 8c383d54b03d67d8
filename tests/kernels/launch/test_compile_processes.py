"""Forms that helpers compile are found in Triton's cache; without a helper the thread compiles."""

from __future__ import annotations

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
from triton.runtime.cache import get_cache_key

from taut_kernels.launch import compile_processes
from taut_kernels.launch.compile_processes import Compilers, Helpers
from taut_kernels.rowwise import chunk_jit

TARGET = GPUTarget("cuda", 90, 32)


def triton_asks(src: Any, result: Any = "compiled") -> Callable[[], Any]:
    """Return what Triton hands an executor: a closure over what is to be compiled."""
    target, env_vars = TARGET, {"A": "1"}
    options = make_backend(target).parse_options({"num_warps": 2})

    def compile_() -> Any:
        return result if (src, target, options, env_vars) else None

    return compile_


def source_of(kernel: Any) -> SimpleNamespace:
    return SimpleNamespace(fn=kernel, signature={"x": "*bf16"}, constants={(1,): 64}, attrs={})


def some_kernel() -> Any:
    return next(each for each in vars(chunk_jit).values() if isinstance(each, triton.JITFunction))


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    found = Helpers(2)
    deadline = time.monotonic() + 120
    while not all(one.poll(0) for one in found.starting):
        assert found.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield found
    for one in (*found.starting, *found.idle):
        one.close()
    assert found.process.wait(60) == 0, "helpers end with those who ask"


@pytest.fixture(autouse=True)
def no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "_helpers", None)


def test_every_form_that_helpers_compile_is_found_in_the_cache(tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(here / "compiled_by_helpers.py"), "2"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["compiled"] == 0
    assert found["found"] > 10
    assert sum(1 for _ in tmp_path.glob("*/*.cubin")) == found["found"]


def test_without_a_helper_the_thread_says_that_it_must_compile(helpers: Helpers) -> None:
    children = Path(f"/proc/{helpers.process.pid}/task/{helpers.process.pid}/children")
    for helper in children.read_text().split():
        os.kill(int(helper), signal.SIGKILL)
    assert not any(helpers.compile(b"form") for _ in range(4))
    assert helpers.idle == []


def test_a_form_that_a_helper_cannot_compile_leaves_it_free(helpers: Helpers) -> None:
    for _ in range(3):
        assert helpers.compile(b"no form")
    assert len(helpers.idle) == 2


@pytest.mark.parametrize(("seconds", "count", "started"), [(1.0, 8, 1), (0.01, 8, 0), (1.0, 2, 0)])
def test_the_first_form_that_the_cache_has_not_starts_helpers(
    seconds: float, count: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def start(count: int) -> SimpleNamespace:
        counts.append(count)
        return SimpleNamespace(compile=lambda request: True)

    kernel, clock = some_kernel(), iter(range(100))
    monkeypatch.setattr(compile_processes, "Helpers", start)
    monkeypatch.setattr(compile_processes.time, "thread_time", lambda: next(clock) * seconds)
    with Compilers(count) as pool:
        for name in "ab":
            assert pool.submit(triton_asks(source_of(kernel), name)).result() == name
    assert counts == [count] * started


def test_what_no_helper_could_find_is_not_asked_for() -> None:
    @triton.jit
    def local(x_ptr):
        pass

    described = compile_processes._described
    assert described(lambda: None) is None
    assert described(triton_asks(source_of(lambda: None))) is None
    request = described(triton_asks(source_of(local)))
    assert request is not None
    with pytest.raises(AttributeError):  # which ends a helper's try
        pickle.loads(request)


def test_a_kernel_is_told_so_that_its_key_is_the_same_there() -> None:
    kernel = some_kernel()
    request = compile_processes._described(triton_asks(source_of(kernel)))
    assert request is not None
    form, target, options, env_vars, _ = pickle.loads(request)
    backend = make_backend(target)
    sources = ASTSource(*form), ASTSource(kernel, {"x": "*bf16"}, {(1,): 64}, {})
    keys = {
        get_cache_key(source, backend, backend.parse_options(options), env_vars)
        for source in sources
    }
    assert len(keys) == 1
