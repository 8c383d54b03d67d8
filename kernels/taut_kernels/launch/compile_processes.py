"""Compilers in processes of their own, since Triton's front end holds Python's lock.

A helper compiles into Triton's cache on disk, and the thread that asked takes it from there. The
first form that the cache has not starts the helpers, and waits for them. Where one cannot or fails,
the thread compiles as it would without.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import triton
from triton import knobs
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.jit import JITFunction

_WORTH_IT = 4
"""Fewest compilers that helpers are started for: fewer threads keep so many cores busy."""
_IDLE_S = 600.0
"""A helper that is asked nothing for so long ends: longer than weights are read."""
_LOST_S = 120.0
"""A helper that starts or compiles for so long is given up."""
_logger = logging.getLogger(__name__)


class Compilers(ThreadPoolExecutor):
    """Threads for :class:`triton.AsyncCompileMode` that let helpers compile."""

    def submit(self, compile_: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Compile a form; ``compile_`` is Triton's, which holds what it compiles in its cells."""
        return super().submit(_compiled, compile_, self._max_workers)


class Helpers:
    """Processes that compile, each behind a connection on which it says when it is done."""

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [end.fileno() for _, end in pairs]
        command = [sys.executable, "-m", __name__, *map(str, theirs)]
        # No helper takes memory of a card; modules are found where this process finds them.
        env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            command, env=os.environ | env, pass_fds=theirs, stdin=subprocess.DEVNULL
        )
        self._idle: SimpleQueue[Connection | None] = SimpleQueue()  # None of one that has gone
        for _, end in pairs:
            end.close()
        connections = [Connection(ours.detach()) for ours, _ in pairs]
        threading.Thread(target=self._admit, args=(connections,), daemon=True).start()

    def compile(self, request: bytes) -> bool:
        """Have a helper put a form into the cache, once one is free; say whether it is done."""
        helper = self._idle.get()
        if helper is None:
            self._idle.put(None)
            return False
        try:
            helper.send_bytes(request)
            answer = _hear(helper, time.monotonic() + _LOST_S)
        except (OSError, EOFError) as error:
            _logger.warning("a process that compiles kernels is lost, this one does: %r", error)
            self._idle.put(None)
            return False
        self._idle.put(helper)
        if answer:
            _logger.warning("a kernel is compiled here, since a process could not: %s", answer)
        return not answer

    def _admit(self, connections: Sequence[Connection]) -> None:
        """Let helpers be asked once they say that they are there."""
        end = time.monotonic() + _LOST_S
        for helper in connections:
            try:
                _hear(helper, end)
            except (OSError, EOFError) as error:
                _logger.warning("a process to compile kernels did not start: %r", error)
                self._idle.put(None)
            else:
                self._idle.put(helper)
        self.process.wait()


def _hear(helper: Connection, end: float) -> str:
    """Return what a helper could not do, nothing where it could."""
    if not helper.poll(max(0.0, end - time.monotonic())):
        raise TimeoutError(f"silent for {_LOST_S:g} s")
    return helper.recv_bytes().decode()


_helpers: Helpers | None = None
_starting = threading.Lock()


def _compiled(compile_: Callable[[], Any], count: int) -> Any:
    global _helpers  # noqa: PLW0603 (of the process, as Triton's cache is)
    request = _request(compile_) if count >= _WORTH_IT else None
    if request is not None:
        with contextlib.suppress(OSError):  # no more processes here: the thread compiles
            with _starting:
                _helpers = _helpers or Helpers(count)
            _helpers.compile(request)
    return compile_()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, JITFunction):
            return _named, (value.fn.__module__, value.fn.__qualname__)
        return NotImplemented


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _request(compile_: Callable[[], Any]) -> bytes | None:
    """What a helper needs to compile the same; None for what the cache has or cannot be told."""
    kept = [cell.cell_contents for cell in compile_.__closure__ or ()]
    cells = dict(zip(compile_.__code__.co_freevars, kept, strict=True))
    sink = io.BytesIO()
    try:
        source, target, options = cells["src"], cells["target"], cells["options"]
        key = get_cache_key(source, make_backend(target), options, cells["env_vars"])
        digest = hashlib.sha256(key.encode()).hexdigest()
        if get_cache_manager(digest).get_group(f"{source.name[:150]}.json") is not None:
            return None
        kernel = source.fn
        # Gluon's kernels have a source of their own.
        form = (type(source), kernel, source.signature, source.constants, source.attrs)
        told = (target, vars(options), cells["env_vars"], knobs.cache.dir)
        _Pickler(sink).dump((form, kernel.src, kernel.cache_key, *told))
    except (AttributeError, KeyError, TypeError, pickle.PicklingError):
        return None
    return sink.getvalue()


def _serve(connection: Connection) -> None:
    """Be a helper: compile what is asked for until nobody asks."""
    with contextlib.suppress(OSError, EOFError):
        connection.send_bytes(b"")
        while connection.poll(_IDLE_S):
            request, answer = connection.recv_bytes(), ""
            try:
                _compile(*pickle.loads(request))  # noqa: S301 (our own parent's)
            except Exception as error:
                answer = repr(error)
            connection.send_bytes(answer.encode())


def _compile(
    form: tuple[Any, ...], text: str, key: str, target: Any, options: Any, env_vars: Any, cache: str
) -> None:
    kind, kernel, *rest = form
    if kernel.src != text:
        raise ValueError(f"{kernel}: its file has changed since")
    # Triton 3.6 finds another key where callees were met before; the cache is asked for this one.
    kernel.hash, knobs.cache.dir = key, cache
    triton.compile(kind(kernel, *rest), target, options, _env_vars=env_vars)


def _main(descriptors: Sequence[int]) -> None:
    """Import once, and be one helper for each descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # they end with who asks, not with a Ctrl-C
    importlib.import_module("taut_kernels.launch.launcher")  # and torch, which kernels import
    triton_key()  # reads all of Triton: half a second
    for own in descriptors:
        if os.fork() == 0:
            # Where another process had an end, nobody would see that its helper has gone.
            for other in {*descriptors} - {own}:
                os.close(other)
            _serve(Connection(own))
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in descriptors:
        os.wait()


if __name__ == "__main__":
    _main([int(one) for one in sys.argv[1:]])
